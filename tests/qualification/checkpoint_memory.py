"""Command that holds the memory of a stage with recurrent layers against what the plan foretells.

The middle third of a model is loaded in a process of its own, with every number of slots. All slots are
filled to their ends, all checkpoints are made, then requests come and go: prompts in chunks, and rejections.

    python -m tests.qualification.checkpoint_memory
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import numpy as np

from mesh.cli.shared_options import Numbers, int_option
from mesh.placement.memory_estimate import StageSizes, Workload
from meshbench.experiment import experiment
from meshbench.report_tools import Line, Report, table_section
from meshbench.shared_options import FILE
from spanmesh_proto.errors import MeshError
from stages.certification.certify import cut_stage
from stages.layers import LayerRange
from stages.runtime.llama import init_backend
from stages.runtime.process_memory import resident_bytes
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.serving.sent_rows import max_sent_bytes
from stages.serving.slots import KvSlots
from stages.slicing.model_facts import read_model_facts
from tests.qualification.bounded_report import bounded_report
from tests.qualification.programs import program_command
from tests.qualification.random_hybrid import write_random_hybrid

_CTX_SIZE: Final = 1024
_CHUNK_ROWS: Final = 96
_WINDOW_ROWS: Final = 4
_TOLERANCE: Final = 0.1
# Pages of the process that come and go.
_FLAT_BYTES: Final = 8 << 20
_SEED: Final = 21


@dataclass(frozen=True)
class Memory:
    """Resident memory of one stage, without that of its process before it is loaded."""

    foretold_bytes: int
    """What the plan counts for it, hidden states that were sent included."""
    filled_bytes: int
    """Once all slots are full, and all checkpoints made."""
    first_bytes: int
    """After the first tenth of the requests."""
    last_bytes: int
    """After the last of them."""


def occupy(path: Path, workload: Workload, most_sent_bytes: int, num_requests: int) -> tuple[int, int, int]:
    """Fill a stage's slots and serve requests; in a process of its own.

    Args:
        path: The stage file.
        workload: What it holds.
        most_sent_bytes: Most bytes of sent rows.
        num_requests: Number of requests.

    Returns:
        Resident bytes: with everything full, after the first tenth of the requests, and after the last.
    """
    init_backend()
    own_bytes = resident_bytes()
    options = RuntimeOptions(
        num_slots=workload.num_slots, ctx_size=workload.ctx_size, num_checkpoints=workload.num_checkpoints
    )
    with closing(StageRuntime(path, options)) as runtime:
        slots = KvSlots(runtime, most_sent_bytes)
        noise = np.random.default_rng(_SEED)
        hidden = noise.normal(size=(_CHUNK_ROWS, runtime.info.n_embd)).astype(np.float32)

        def compute(slot: int, start: int, num_rows: int, checkpoints: tuple[int, ...]) -> None:
            span = Span(slot, start, [0] * num_rows, hidden[:num_rows], checkpoints=checkpoints)
            (rows,) = runtime.decode([span])
            slots.computed(span, start)
            slots.sent_on(span, rows.tobytes())

        def request(slot: int, num_rows: int, chunk_rows: int) -> None:
            slots.begin(slot, slot, (), 0, 4 * runtime.info.n_embd)
            kept: tuple[int, ...] = ()
            for start in range(0, num_rows, chunk_rows):
                kept = (*kept, start)[-workload.num_checkpoints :] if start else ()
                compute(slot, start, min(chunk_rows, num_rows - start), kept)
            # A rejection: back to the latest checkpoint.
            compute(slot, kept[-1], _WINDOW_ROWS, ())

        for slot in range(workload.num_slots):
            request(slot, workload.ctx_size, _CHUNK_ROWS)
        filled = resident_bytes()
        first = filled
        for number in range(num_requests):
            request(number % workload.num_slots, 3 * _WINDOW_ROWS, _WINDOW_ROWS)
            if number == num_requests // 10:
                first = resident_bytes()
        return filled - own_bytes, first - own_bytes, resident_bytes() - own_bytes


def measure(model: Path, workload: Workload, num_requests: int) -> Memory:
    """Memory of a model's middle third.

    Raises:
        MeshError: If the process fails.
    """
    facts = read_model_facts(model)
    layers = LayerRange(facts.n_layers // 3, 2 * facts.n_layers // 3)
    memory = StageSizes(facts, workload).memory(layers)
    with tempfile.TemporaryDirectory(prefix="mesh-checkpoints-") as folder:
        path = Path(folder) / "stage.gguf"
        cut_stage(model, layers, path)
        sizes = (workload.num_slots, workload.num_checkpoints, memory.cache_bytes, num_requests)
        argv = program_command(__spec__.name, "--occupy", str(path), *map(str, sizes))
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MeshError(f"a stage ended with code {done.returncode}: {done.stderr[-500:]}")
    filled, first, last = json.loads(done.stdout.splitlines()[-1])
    return Memory(memory.total_bytes - memory.process_bytes, filled, first, last)


def lines(found: dict[int, Memory]) -> list[Line]:
    """The figures with their bounds."""
    all_lines = []
    for num_slots, memory in found.items():
        ratio = memory.filled_bytes / memory.foretold_bytes
        title = f"{num_slots} slots: memory off what was foretold, share"
        all_lines.append(
            Line(title, abs(ratio - 1.0), _TOLERANCE, is_ceiling=True, note=f"{ratio:.3f} of it")
        )
        growth = (memory.last_bytes - memory.first_bytes) / (1 << 20)
        title = f"{num_slots} slots: growth over the requests, MiB"
        all_lines.append(Line(title, growth, _FLAT_BYTES / (1 << 20), is_ceiling=True))
    return all_lines


@click.command()
@click.option("--model", type=FILE, help="A model with recurrent layers; a random one unless given.")
@click.option("--slots", type=Numbers(int, 1), default=(1, 4, 16), metavar="A,B,…", help="Numbers of slots.")
@int_option("--checkpoints", default=8, help="Checkpoints of each slot.")
@int_option("--requests", "num_requests", least=10, default=500, help="Requests, once all is full.")
@experiment
def main(*, model: Path | None, slots: tuple[int, ...], checkpoints: int, num_requests: int) -> Report:
    """Hold the memory of a stage with recurrent layers against the plan's.

    Exits with 1 if a bound is missed.
    """
    loads = {count: Workload(_CTX_SIZE, count, num_checkpoints=checkpoints) for count in slots}
    with tempfile.TemporaryDirectory(prefix="mesh-checkpoints-") as folder:
        if model is None:
            model = Path(folder) / "hybrid.gguf"
            write_random_hybrid(model)
        return report({count: measure(model, load, num_requests) for count, load in loads.items()})


def report(found: dict[int, Memory]) -> Report:
    """Memory with each number of slots, and the figures with their bounds."""
    rows = [
        (
            str(count),
            *(
                f"{size / 1e6:.0f}"
                for size in (each.foretold_bytes, each.filled_bytes, each.first_bytes, each.last_bytes)
            ),
        )
        for count, each in found.items()
    ]
    heads = ("slots", "foretold, MB", "all full", "after a tenth of the requests", "after all")
    return bounded_report("Memory of checkpoints", {}, lines(found), table_section("## Memory", heads, rows))


def _occupy(path: str, *sizes: str) -> None:
    num_slots, num_checkpoints, cache_bytes, num_requests = map(int, sizes)
    workload = Workload(_CTX_SIZE, num_slots, num_checkpoints=num_checkpoints)
    found = occupy(Path(path), workload, max_sent_bytes(cache_bytes), num_requests)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--occupy"]:
        _occupy(*sys.argv[2:])
    else:
        main()
