"""The run: a model made on the spot, a mesh over three lab hosts, a few answers, a look at each host."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from mesh.bench.big_shares.random_gguf import write_random_gguf
from mesh.bench.big_shares.shapes import SHAPES
from mesh.bench.blocking_client import COMPLETION_PATH, Ask, Batch, Client
from mesh.bench.stress.memory import footprints
from mesh.lab.memory_watch import MemoryWatch
from mesh.lab.network import Lab, lab_supported
from mesh.lab.systems import MeshSystem, get_json
from mesh.placement.stage_sizes import StageSizes, Workload
from spanmesh_proto.errors import ClusterError
from stages.slicing.model_facts import read_model_facts

if TYPE_CHECKING:
    from mesh.bench.big_shares.random_gguf import WeightType
    from mesh.bench.stress.memory import Footprint

log = structlog.get_logger()

_NUM_STAGES: Final = 3
_LOOK_S: Final = 1.0
# Words that the random vocabulary has, so that a prompt has about as many tokens.
_PROMPT: Final = " ".join(f"w{number % 60}" for number in range(100))


@dataclass(frozen=True)
class BigSharesOptions:
    """What the user says.

    Attributes:
        shape: A name in `SHAPES`.
        weight_type: Of its matrices.
        num_tokens: Of each answer.
        num_answers: Asked for at once.
        workload: What the mesh is to hold besides weights.
        folder: Where the model and logs go; None: a temporary one, removed afterwards.
    """

    shape: str
    weight_type: WeightType
    num_tokens: int
    num_answers: int
    workload: Workload
    folder: Path | None = None


@dataclass(frozen=True)
class BigShares:
    """What came of it.

    Attributes:
        model_bytes: Size of the model's file.
        layers: Of each stage, for people.
        footprints: Of each stage, with the most that its process ever held once the mesh served.
        num_tokens: That were answered.
    """

    model_bytes: int
    layers: tuple[str, ...]
    footprints: tuple[Footprint, ...]
    num_tokens: int


def measure_big_shares(options: BigSharesOptions) -> BigShares:
    """Measure it.

    Raises:
        ClusterError: If no lab can be made here.
        MeshError: If the mesh does not come up, or does not answer.
    """
    reason = lab_supported()
    if reason is not None:
        raise ClusterError(reason)
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
        client = stack.enter_context(Client(lab))
        # It looks every second from now on: what is only there while a stage loads is another matter.
        watch = stack.enter_context(MemoryWatch(lab, _LOOK_S))
        asks = tuple(
            Ask(
                COMPLETION_PATH,
                {
                    "prompt": f"w{number} {_PROMPT}",
                    "temperature": 0,
                    "max_tokens": options.num_tokens,
                    **mesh.fields,
                },
            )
            for number in range(options.num_answers)
        )
        answers = client.ask(Batch(mesh.port, asks, num_at_once=options.num_answers)).answers
        time.sleep(3 * _LOOK_S)
        stages = get_json(lab, 0, mesh.port, "/mesh/status")["stages"]
        hosts = [int(stage["host"].removeprefix("host")) for stage in stages]
        found = footprints(stages, hosts, StageSizes(facts, workload), tuple(watch.samples))
        mesh.stop()
        return BigShares(
            model_bytes=facts.file_bytes,
            layers=tuple("[{}, {})".format(*stage["layers"]) for stage in stages),
            footprints=tuple(found),
            num_tokens=sum(answer.num_tokens for answer in answers),
        )
