"""Memory that each of three hosts holds of a random model."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import structlog

from mesh.placement.memory_estimate import StageSizes, Workload
from mesh.util.completion_stream import COMPLETION_PATH
from meshbench.experiment import experiment
from meshbench.lab.memory_watch import MemoryWatch
from meshbench.lab.network import Lab, require_lab
from meshbench.lab.systems import MeshSystem, get_status
from meshbench.load_client.client import LoadClient
from meshbench.load_client.schedule import Request
from meshbench.report_tools import Report, Section, markdown_table
from meshbench.shared_options import json_option
from meshbench.stress.memory import footprints
from stages.slicing.model_facts import read_model_facts
from tests.qualification.random_model import SHAPES, write_random_gguf

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshbench.stress.memory import Footprint
    from tests.qualification.random_model import WeightType

_NUM_STAGES: Final = 3
_LOOK_S: Final = 1.0
# Words that the random vocabulary has, so that a prompt has about as many tokens.
_PROMPT: Final = " ".join(f"w{number % 60}" for number in range(100))
_MB = 1e6
_HEADS = ("stage", "host", "layers", "weights", "KV cache", "stage's process", "the rest", "within 300 MB")

log = structlog.get_logger()


@dataclass(frozen=True)
class BigSharesOptions:
    """Options of the measurement."""

    shape: str
    """A name in `SHAPES`."""
    weight_type: WeightType
    """Of its matrices."""
    num_tokens: int
    """Of each answer."""
    num_answers: int
    """Number of concurrent answers."""
    workload: Workload
    """What the mesh is to hold besides weights."""
    folder: Path | None = None
    """Where the model and logs go; None: a temporary one, removed afterwards."""


@dataclass(frozen=True)
class BigShares:
    """Result of the measurement."""

    model_bytes: int
    """Size of the model's file."""
    layers: tuple[str, ...]
    """Of each stage, for people."""
    footprints: tuple[Footprint, ...]
    """Of each stage, with the most that its process ever held once the mesh served."""
    num_tokens: int
    """That were answered."""


def measure_big_shares(options: BigSharesOptions) -> BigShares:
    """Measure it.

    Raises:
        ClusterError: If no lab can be made here.
        MeshError: If the mesh does not come up, or does not answer.
    """
    require_lab()
    workload = options.workload
    with ExitStack() as stack:
        folder = options.folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="mesh-big-shares-"))
        )
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
        model = folder / "random.gguf"
        log.info("writing_model", shape=options.shape, type=options.weight_type)
        write_random_gguf(model, SHAPES[options.shape], options.weight_type)
        facts = read_model_facts(model)
        lab = stack.enter_context(Lab(_NUM_STAGES + 1, shared=[folder]))
        serve = ["--speculate", "off", "--parallel", str(workload.num_slots)]
        serve += ["--ctx-size", str(workload.ctx_size), "--kv-type", workload.kv_type]
        mesh = MeshSystem(lab, model, folder, options=[*serve, *["--exact"] * workload.is_exact])
        stack.callback(mesh.kill)
        log.info("starting", hosts=_NUM_STAGES)
        mesh.start(timeout_s=600.0)
        client = stack.enter_context(LoadClient(lab))
        # It looks every second from now on: what is only there while a stage loads is another matter.
        watch = stack.enter_context(MemoryWatch(lab, _LOOK_S))
        requests = tuple(
            Request.streamed(
                {
                    "prompt": f"w{number} {_PROMPT}",
                    "temperature": 0,
                    "max_tokens": options.num_tokens,
                    **mesh.fields,
                },
                COMPLETION_PATH,
            )
            for number in range(options.num_answers)
        )
        answers = client.answer(mesh.url, requests, num_at_once=options.num_answers).answers
        time.sleep(3 * _LOOK_S)
        stages = get_status(lab, mesh.port).stages
        hosts = [int(stage.host.removeprefix("host")) for stage in stages]
        found = footprints(stages, hosts, StageSizes(facts, workload), tuple(watch.samples))
        mesh.stop()
        return BigShares(
            model_bytes=facts.file_bytes,
            layers=tuple("[{}, {})".format(*stage.layers) for stage in stages),
            footprints=tuple(found),
            num_tokens=sum(answer.num_tokens for answer in answers),
        )


def shares_table(found: Sequence[Footprint], layers: Sequence[str]) -> str:
    """A line for each stage; sizes in MB.

    Args:
        found: Stages, in order.
        layers: What each holds, for people.
    """
    return markdown_table(
        _HEADS,
        [
            (
                str(each.index),
                each.host,
                held,
                f"{each.weight_bytes / _MB:.0f}",
                f"{each.cache_bytes / _MB:.0f}",
                f"{each.process_bytes / _MB:.0f}",
                f"{each.overhead_bytes / _MB:.0f}",
                "yes" if each.is_within else "NO",
            )
            for each, held in zip(found, layers, strict=True)
        ],
    )


@click.command()
@click.option("--shape", default="1.1b", show_default=True, type=click.Choice(list(SHAPES)))
@click.option("--type", "weight_type", default="Q4_0", show_default=True, type=click.Choice(["Q4_0", "Q8_0"]))
@click.option("--tokens", default=16, show_default=True, type=click.IntRange(1), help="Of each answer.")
@click.option(
    "--answers", default=2, show_default=True, type=click.IntRange(1, 16), help="Asked for at once."
)
@click.option("--ctx-size", default=2048, show_default=True, type=click.IntRange(256, 4096))
@click.option("--parallel", default=4, show_default=True, type=click.IntRange(1, 16))
@click.option("--exact", is_flag=True)
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Keep model and logs here.")
@json_option
@experiment
def main(
    *,
    shape: str,
    weight_type: WeightType,
    tokens: int,
    answers: int,
    ctx_size: int,
    parallel: int,
    exact: bool,
    folder: Path | None,
) -> Report:
    """Run a random model of a billion parameters over three lab hosts, and see what each of them holds."""
    workload = Workload(ctx_size, parallel, is_exact=exact)
    found = measure_big_shares(BigSharesOptions(shape, weight_type, tokens, answers, workload, folder))
    is_within = all(each.is_within for each in found.footprints)
    shown = (
        f"{SHAPES[shape].num_parameters / 1e9:.2f} billion parameters in {weight_type}, "
        f"{found.model_bytes / 1e6:.0f} MB, {found.num_tokens} tokens answered; sizes in MB\n\n"
        f"{shares_table(found.footprints, found.layers)}"
    )
    return Report(
        title="Memory of shares",
        sections=[Section("", shown, shown)],
        fields=asdict(found) | {"within": is_within},
        is_good=is_within,
    )


if __name__ == "__main__":
    main()
