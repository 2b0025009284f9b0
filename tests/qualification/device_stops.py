"""Cost of ending a graph behind a stage's last layer on a device, and of other ways to its hidden states.

    python -m tests.qualification.device_stops --shape 1.1b

llama.cpp asks a callback about every node of a graph, and computes in one go what lies between two nodes that
the callback wants. The stage's way is to want the last layer's output, copy it and end the graph there.
Beside it are timed: the same in Python; copying and letting the graph run to its end, norm and head included;
a callback that wants nothing; and none at all, as llama.cpp computes by itself. The last two give no hidden
states: they show what the callback costs, which on CUDA includes what a replayed graph would save.
"""

from __future__ import annotations

import re
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final, Literal, get_args

import click
import llama_cpp
import numpy as np

from meshbench.experiment import experiment
from meshbench.report_tools import Report, Section, markdown_table
from meshbench.shared_options import json_option
from stages.certification.certify import cut_stage
from stages.layers import LayerRange
from stages.runtime.hidden_tap import LayerTap, StopTap
from stages.runtime.llama import heard_log
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.slicing.source_model import read_source
from tests.qualification.device_parity import first_device
from tests.qualification.random_model import SHAPES, write_random_gguf

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from stages.runtime.stage_runtime import Batch

WITH_OUTPUT: Final[frozenset[Way]] = frozenset({"ends", "ends, in Python", "runs on"})
"""Ways that give hidden states."""
_NUM_ROWS: Final = (1, 8, 64)
_NUM_WARM_UP: Final = 3
_NUM_ROUNDS: Final = 20
_DEPTH: Final = 128
_SPLITS: Final = re.compile(r"splits = ([\d /]+)")

Way = Literal["ends", "ends, in Python", "runs on", "wants nothing", "no callback"]


@dataclass(frozen=True)
class StopTiming:
    """Time of one window."""

    stage: str
    """`first` or `middle`."""
    num_on_device: int
    """Layers on the device; those before are the processor's."""
    way: Way
    """How the graph is run."""
    num_rows: int
    """Rows of the window."""
    window_ms: float
    """Median time."""
    splits: str
    """Parts of the graph on one device after another, as llama.cpp logs them: for many rows, and for one if
    that differs."""


class _RunningOnTap(StopTap):
    """Copies one layer's output, and lets the graph go on."""

    def begin(self, hidden: NDArray[np.float32] | None = None, *, is_tapped: bool = False) -> None:
        del is_tapped
        super().begin(hidden, is_tapped=True)

    def take(self, layer: int) -> NDArray[np.float32] | None:
        return self.feature(layer)


class _TimedRuntime(StageRuntime):
    """A stage that runs its graphs in one of the ways; without hidden states where a way gives none."""

    def __init__(self, path: Path, options: RuntimeOptions, way: Way) -> None:
        self._way = way
        super().__init__(path, options)

    def _make_tap(self) -> StopTap | LayerTap | None:
        last = len(self.info.layers) - 1
        if self._way == "ends":
            return StopTap(last, self._boundary, self.max_rows)
        if self._way == "ends, in Python":
            return LayerTap([last], self._boundary, stop=True)
        if self._way == "runs on":
            tap = _RunningOnTap(None, self._boundary, self.max_rows)
            tap.set_features([last])
            return tap
        return None if self._way == "no callback" else StopTap(None, self._boundary, self.max_rows)

    def _run(self, filled: Batch) -> None:
        super()._run(filled)
        # Without a callback a device may still compute.
        llama_cpp.llama_synchronize(self._context)

    def _hidden(self) -> NDArray[np.float32] | None:
        if self._way in WITH_OUTPUT:
            return super()._hidden()
        return np.zeros((self.max_rows, self.info.n_embd), np.float32)


def time_stage(
    path: Path,
    device: str,
    num_on_device: int,
    *,
    ways: Sequence[Way] = get_args(Way),
    num_rows: Sequence[int] = _NUM_ROWS,
    num_rounds: int = _NUM_ROUNDS,
) -> Iterator[StopTiming]:
    """Time windows of a stage that is no tail, in each way.

    Args:
        path: A stage file.
        device: llama.cpp's name of the device.
        num_on_device: Layers there.
        ways: How graphs are run.
        num_rows: Rows of the windows.
        num_rounds: Measurements of each, of which the median is taken.

    Raises:
        MeshError: If the stage cannot be loaded or computed.
        ImportError: If the compiled callback is missing.
    """
    options = RuntimeOptions(ctx_size=_DEPTH + max(num_rows), gpu_layers=((device, num_on_device),))
    for way in ways:
        log: list[str] = []
        with heard_log(log.append), closing(_TimedRuntime(path, options, way)) as runtime:
            splits = next((found[1].strip() for line in log if (found := _SPLITS.search(line))), "")
            stage = "first" if runtime.info.is_first else "middle"
            noise = np.random.default_rng(1).standard_normal((_DEPTH, runtime.info.n_embd), np.float32)
            _compute(runtime, 0, noise)
            for count in num_rows:
                times_ms = []
                for number in range(_NUM_WARM_UP + num_rounds):
                    start_s = time.perf_counter()
                    _compute(runtime, _DEPTH, noise[:count])
                    if number >= _NUM_WARM_UP:
                        times_ms.append(1e3 * (time.perf_counter() - start_s))
                yield StopTiming(stage, num_on_device, way, count, median(times_ms), splits)


def _compute(runtime: StageRuntime, start: int, rows: NDArray[np.float32]) -> None:
    hidden = None if runtime.info.is_first else rows
    runtime.decode([Span(0, start, [5] * len(rows), hidden)])


def measure(
    model: Path,
    device: str,
    folder: Path,
    *,
    num_rows: Sequence[int] = _NUM_ROWS,
    num_rounds: int = _NUM_ROUNDS,
) -> list[StopTiming]:
    """Time the first and a middle stage of a model, all on the device and half there.

    Args:
        model: A whole model of at least three layers, a GGUF file.
        device: llama.cpp's name of the device.
        folder: Where stage files are written.
        num_rows: Rows of the windows.
        num_rounds: Measurements of each.

    Raises:
        MeshError: If it cannot be cut, loaded or computed.
    """
    n_layers = read_source(model).n_layers
    third = max(1, n_layers // 3)
    found: list[StopTiming] = []
    for name, layers in (("first", LayerRange(0, third)), ("middle", LayerRange(third, 2 * third))):
        path = folder / f"{name}.gguf"
        cut_stage(model, layers, path)
        for count in dict.fromkeys((third, max(1, third // 2))):
            found += time_stage(path, device, count, num_rows=num_rows, num_rounds=num_rounds)
    return found


def cheapest(found: Sequence[StopTiming]) -> dict[tuple[str, int, int], Way]:
    """The fastest way to hidden states, by stage, layers on the device and rows."""
    best: dict[tuple[str, int, int], StopTiming] = {}
    for each in found:
        case = each.stage, each.num_on_device, each.num_rows
        if each.way in WITH_OUTPUT and (case not in best or each.window_ms < best[case].window_ms):
            best[case] = each
    return {case: each.way for case, each in best.items()}


def table(found: Sequence[StopTiming]) -> str:
    """A line for each stage and number of rows, a column for each way, in Markdown; times in ms."""
    cases = dict.fromkeys((each.stage, each.num_on_device, each.num_rows) for each in found)
    ways = tuple(dict.fromkeys(each.way for each in found))
    best = cheapest(found)

    def line(case: tuple[str, int, int]) -> list[str]:
        of_case = [each for each in found if (each.stage, each.num_on_device, each.num_rows) == case]
        times = {each.way: f"{each.window_ms:.2f}" for each in of_case}
        splits = dict.fromkeys(each.splits for each in of_case)
        return [
            *map(str, case),
            *(times.get(way, "") for way in ways),
            " or ".join(splits),
            best.get(case, ""),
        ]

    return markdown_table(
        ("stage", "layers on the device", "rows", *ways, "splits", "cheapest with hidden states"),
        map(line, cases),
    )


@click.command()
@click.argument("model", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--shape", type=click.Choice(list(SHAPES)), default="small", show_default=True)
@click.option("--device", help="llama.cpp's name of the device; the first one unless given.")
@click.option("--rounds", default=_NUM_ROUNDS, show_default=True, type=click.IntRange(1))
@json_option
@experiment
def main(model: Path | None, shape: str, device: str | None, rounds: int) -> Report:
    """Time stages of MODEL, or of a random one, in each way of running a graph on a device."""
    chosen = first_device(device)
    with tempfile.TemporaryDirectory(prefix="mesh-stops-") as folder:
        if model is None:
            model = Path(folder) / "random.gguf"
            write_random_gguf(model, SHAPES[shape], "Q4_0")
        found = measure(model, chosen.name, Path(folder), num_rounds=rounds)
    shown = f"{chosen.description}, {model.name}; times of a window in ms\n\n{table(found)}"
    fields = {"device": chosen.description, "timings": found}
    return Report(title="Ways to end a graph", sections=[Section("", shown, shown)], fields=fields)


if __name__ == "__main__":
    main()
