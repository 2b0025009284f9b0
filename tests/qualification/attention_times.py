"""Times of batches with spanmesh's attention kernel and with ggml's, in turn in one process.

    python -m tests.qualification.attention_times --position 128 --position 4096 --kv-type q8_0

Everything else is the same for both, so the ratios are those of a build with the kernel and one without.
"""

from __future__ import annotations

import math
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

import click

from mesh.serve.options import demo_model
from mesh.util.printable import say
from meshbench.report_tools import markdown_table
from spanmesh_proto.errors import MeshError
from stages.runtime.kv_types import KV_TYPES
from stages.runtime.llama_libraries import attention_name, attention_version, loaded_kernels
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterator, Sequence

_POSITIONS: Final = (128, 1024, 4096)
_NUM_SEQUENCES: Final = (8, 16)
_WINDOW_ROWS: Final = (8, 32)
# A chunk of a prompt.
_CHUNK_ROWS: Final = 128
# Positions from which several sequences would take too long to fill.
_MOST_SHARED: Final = 2048
_TOKEN: Final = 1000


@dataclass(frozen=True)
class BatchShape:
    """A batch to be timed."""

    num_sequences: int
    """Sequences with a span each."""
    num_rows: int
    """Rows of each span."""
    position: int
    """Positions that each sequence holds before."""

    def __str__(self) -> str:
        if self.num_rows == _CHUNK_ROWS:
            return f"{self.num_rows} rows of a prompt"
        return f"{self.num_sequences} x {self.num_rows}"

    def spans(self) -> list[Span]:
        """Its spans: any tokens, the last row's logits wanted."""
        tokens = [_TOKEN] * self.num_rows
        return [Span(slot, self.position, tokens, None, 1) for slot in range(self.num_sequences)]


@dataclass(frozen=True)
class PairedTimes:
    """Times of a batch in paired rounds, in milliseconds."""

    of_ggml: tuple[float, ...]
    """With ggml's kernel."""
    own: tuple[float, ...]
    """With spanmesh's, in the same rounds."""

    @property
    def ratios(self) -> list[float]:
        """How many times less time it takes, ascending."""
        return sorted(ggml_ms / own_ms for ggml_ms, own_ms in zip(self.of_ggml, self.own, strict=True))

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the median ratio: with ten rounds, of 98 %, whatever the distribution (sign test)."""
        ratios = self.ratios
        cut = len(ratios) // 10
        return ratios[cut], ratios[-1 - cut]


def shapes_at(position: int) -> Iterator[BatchShape]:
    """Batches that are timed at a position."""
    yield BatchShape(1, 1, position)
    for num_rows in _WINDOW_ROWS:
        yield BatchShape(1, num_rows, position)
    if position <= _MOST_SHARED:
        for num_sequences in _NUM_SEQUENCES:
            yield BatchShape(num_sequences, 1, position)
    yield BatchShape(1, _CHUNK_ROWS, position)


def measure(runtime: StageRuntime, kernels: ctypes.CDLL, shape: BatchShape, num_rounds: int) -> PairedTimes:
    """Time a batch with both kernels in turn; which is first alternates.

    Args:
        runtime: Its sequences hold at least the shape's positions.
        kernels: Result of `loaded_kernels`.
        shape: The batch.
        num_rounds: Pairs of times; a pair before them is dropped.
    """
    times_ms: dict[int, list[float]] = {0: [], 1: []}
    for number in range(1 + num_rounds):
        for is_own in (0, 1) if number % 2 else (1, 0):
            kernels.attention_rows_enable(is_own)
            start_s = time.perf_counter()
            runtime.decode(shape.spans())
            times_ms[is_own].append(1e3 * (time.perf_counter() - start_s))
            for slot in range(shape.num_sequences):
                runtime.memory.trim(slot, shape.position)
    kernels.attention_rows_enable(1)
    return PairedTimes(tuple(times_ms[0][1:]), tuple(times_ms[1][1:]))


def fill(runtime: StageRuntime, position: int, num_sequences: int) -> None:
    """Bring sequences to a position, from where they are."""
    for slot in range(num_sequences):
        for start in range(runtime.memory.length(slot), position, runtime.max_rows):
            runtime.decode([Span(slot, start, [_TOKEN] * min(runtime.max_rows, position - start))])


def slope_us(positions: Sequence[int], times_ms: Sequence[float]) -> float:
    """Microseconds that a position adds, from the first position to the last."""
    return 1e3 * (times_ms[-1] - times_ms[0]) / (positions[-1] - positions[0])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="GGUF file, or the demo's.")
@click.option("--position", "positions", type=click.IntRange(1), multiple=True, default=_POSITIONS)
@click.option("--kv-type", type=click.Choice(tuple(KV_TYPES)), default="f16", show_default=True)
@click.option("--threads", "num_threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--rounds", "num_rounds", type=click.IntRange(1), default=10, show_default=True)
def main(
    model: Path | None, positions: tuple[int, ...], kv_type: str, num_threads: int, num_rounds: int
) -> None:
    """Print medians in ms, and how many times less spanmesh's kernel takes."""
    ordered = sorted(positions)
    most_sequences = max(_NUM_SEQUENCES) if ordered[0] <= _MOST_SHARED else 1
    options = RuntimeOptions(
        num_slots=most_sequences,
        ctx_size=ordered[-1] + _CHUNK_ROWS,
        num_threads=num_threads,
        kv_type=kv_type,
    )
    try:
        runtime = StageRuntime(model or demo_model(), options)
    except MeshError as error:
        sys.exit(error.message)
    with closing(runtime):
        kernels = loaded_kernels()
        if kernels is None or not attention_version(kernels):
            sys.exit("attention is computed by ggml here: there is nothing to compare")
        name = attention_name(attention_version(kernels))
        say(f"{name}; {kv_type}, threads: {num_threads}, rounds: {num_rounds}")
        table, lone = [], []
        for position in ordered:
            for shape in shapes_at(position):
                fill(runtime, position, shape.num_sequences)
                found = measure(runtime, kernels, shape, num_rounds)
                ggml_ms, own_ms = median(found.of_ggml), median(found.own)
                low, high = found.interval
                ratio = f"{median(found.ratios):.2f} [{low:.2f}, {high:.2f}]"
                table.append([f"{position:,}", str(shape), f"{ggml_ms:.1f}", f"{own_ms:.1f}", ratio])
                if shape == BatchShape(1, 1, position):
                    lone.append((ggml_ms, own_ms))
        say(markdown_table(["positions", "sequences x rows", "ggml ms", "own ms", "ratio"], table))
        if len(ordered) > 1 and not math.isclose(ordered[0], ordered[-1]):
            slopes = [slope_us(ordered, times_ms) for times_ms in zip(*lone, strict=True)]
            say(f"a position of a lone row: ggml {slopes[0]:.1f} us, own {slopes[1]:.1f} us")


if __name__ == "__main__":
    main()
