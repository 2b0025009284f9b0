"""Slots that begin with what others hold, in models that go back to checkpoints only: rows to the last bit.

Copies between slots are made by llama.cpp at the next decode, and states are put back at the call.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest

from spanmesh_proto.errors import StageFailed, UncuttableModel
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.windowed_hybrids import DEEPSEEK4, LFM2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.support.tiny_families import TinyFamily

pytestmark = pytest.mark.model

WITH_WINDOWS: Final = {"deepseek4": DEEPSEEK4, "lfm2": LFM2}
WITHOUT: Final = ("mamba2", "falcon-h1", "qwen3next", "nemotron_h", "granitehybrid")
FAMILIES: Final = {**WITH_WINDOWS, **{name: TINY_FAMILIES[name] for name in WITHOUT}}
NUM_ROWS: Final = 320
# Beyond the first window and the first compressed block of 128; the end of what a slot is filled with.
BACK, END = 130, 300
TEXT: Final = [int(token) for token in np.random.default_rng(3).integers(3, 300, NUM_ROWS)]
OTHER: Final = TEXT[::-1]
OPTIONS: Final = RuntimeOptions(num_slots=3, ctx_size=384, exact=True, num_checkpoints=4)


def compute(
    runtime: StageRuntime,
    slot: int,
    start: int,
    stop: int,
    *,
    checkpoints: tuple[int, ...] = (),
    text: list[int] = TEXT,
) -> NDArray[np.float32]:
    """Logits of rows, computed in pieces that begin at `start`."""
    rows = []
    for first in range(start, stop, 60):
        tokens = text[first : min(first + 60, stop)]
        span = Span(slot, first, tokens, num_outputs=len(tokens), checkpoints=checkpoints)
        rows += runtime.decode([span])
    return np.concatenate(rows)


def fill(runtime: StageRuntime, slot: int) -> None:
    compute(runtime, slot, 0, BACK)
    compute(runtime, slot, BACK, END, checkpoints=(BACK,))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> TinyFamily:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def path(family: TinyFamily, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.write(tmp_path_factory.mktemp(family.architecture) / "model.gguf")


@pytest.fixture(scope="module")
def rows(path: Path) -> NDArray[np.float32]:
    """Logits of all rows, computed in one slot from the first to the last."""
    with closing(StageRuntime(path, OPTIONS)) as runtime:
        parts = (compute(runtime, 1, *part) for part in ((0, BACK), (BACK, END), (END, NUM_ROWS)))
        return np.concatenate(list(parts))


@pytest.fixture
def runtime(path: Path) -> Iterator[StageRuntime]:
    with closing(StageRuntime(path, OPTIONS)) as runtime:
        fill(runtime, 0)
        yield runtime


def test_a_slot_goes_on_from_a_checkpoint_of_another(
    runtime: StageRuntime, rows: NDArray[np.float32]
) -> None:
    compute(runtime, 1, 0, 90, text=OTHER)
    runtime.memory.copy(0, 1, BACK)
    assert runtime.memory.return_points(1) == (0, BACK)
    assert np.array_equal(compute(runtime, 1, BACK, 190, checkpoints=(BACK,)), rows[BACK:190])
    assert np.array_equal(compute(runtime, 0, END, NUM_ROWS), rows[END:]), "the other is as it was"
    runtime.memory.trim(1, BACK)
    assert np.array_equal(compute(runtime, 1, BACK, END), rows[BACK:END])


def test_a_slot_goes_on_from_the_end_of_another(runtime: StageRuntime, rows: NDArray[np.float32]) -> None:
    runtime.memory.copy(0, 1, END)
    assert np.array_equal(compute(runtime, 1, END, NUM_ROWS, checkpoints=(BACK, END)), rows[END:])
    for back in (END, BACK):
        runtime.memory.trim(1, back)
        assert np.array_equal(compute(runtime, 1, back, END + 10), rows[back : END + 10]), back


def test_the_source_goes_back_before_anything_is_decoded(
    runtime: StageRuntime, rows: NDArray[np.float32]
) -> None:
    runtime.memory.copy(0, 1, END)
    runtime.memory.trim(0, BACK)
    assert np.array_equal(compute(runtime, 1, END, NUM_ROWS), rows[END:])
    assert np.array_equal(compute(runtime, 0, BACK, END), rows[BACK:END])


def test_the_source_is_emptied_before_anything_is_decoded(
    runtime: StageRuntime, rows: NDArray[np.float32]
) -> None:
    runtime.memory.copy(0, 1, END)
    runtime.memory.copy(0, 2, BACK)
    runtime.memory.trim(0, 0)
    compute(runtime, 0, 0, 60, text=OTHER)
    assert np.array_equal(compute(runtime, 1, END, NUM_ROWS), rows[END:])
    assert np.array_equal(compute(runtime, 2, BACK, END), rows[BACK:END])


def test_a_copy_is_copied_on(runtime: StageRuntime, rows: NDArray[np.float32]) -> None:
    runtime.memory.copy(0, 1, END)
    runtime.memory.copy(1, 2, BACK)
    runtime.memory.copy(2, 0, BACK)
    for slot in (2, 0):
        assert np.array_equal(compute(runtime, slot, BACK, END), rows[BACK:END])
    assert np.array_equal(compute(runtime, 1, END, NUM_ROWS), rows[END:])


def test_nothing_of_a_slot_leaves_an_empty_one(runtime: StageRuntime, rows: NDArray[np.float32]) -> None:
    for source in (0, 2):
        compute(runtime, 1, 0, 90, text=OTHER)
        runtime.memory.copy(source, 1, 0)
        assert runtime.memory.return_points(1) == (0,)
        assert np.array_equal(compute(runtime, 1, 0, BACK), rows[:BACK]), source


def test_where_there_is_no_checkpoint_there_is_no_copy(runtime: StageRuntime) -> None:
    with pytest.raises(UncuttableModel, match="slot 1 cannot go back to position 200"):
        runtime.memory.copy(0, 1, 200)


def test_slots_change_hands_at_random(path: Path, rows: NDArray[np.float32]) -> None:
    """Two texts; copies, returns to checkpoints and new texts, with a decode behind them or not."""
    random = np.random.default_rng(7)
    with closing(StageRuntime(path, OPTIONS)) as runtime:
        texts, expected = (TEXT, OTHER), (rows, compute(runtime, 2, 0, NUM_ROWS, text=OTHER))
        which = [0, 0, 1]
        for _ in range(150):
            slot, source = (int(each) for each in random.permutation(3)[:2])
            match random.choice(["copy", "copy", "back", "anew", "on", "on", "on", "on", "on"]):
                case "copy":
                    runtime.memory.copy(
                        source, slot, int(random.choice(runtime.memory.return_points(source)))
                    )
                    which[slot] = which[source]
                case "back":
                    runtime.memory.trim(slot, int(random.choice(runtime.memory.return_points(slot))))
                case "anew":
                    runtime.memory.trim(slot, 0)
                    which[slot] = 1 - which[slot]
                case _:
                    start = runtime.memory.length(slot)
                    stop = min(NUM_ROWS, start + int(random.integers(1, 60)))
                    if start == stop:
                        continue
                    kept = (*runtime.memory.return_points(slot)[1:-1][-3:], start) if start else ()
                    computed = compute(runtime, slot, start, stop, checkpoints=kept, text=texts[which[slot]])
                    assert np.array_equal(computed, expected[which[slot]][start:stop]), (slot, start, stop)


def test_only_where_states_hold_rows_is_a_copy_made_at_the_call(family: TinyFamily, path: Path) -> None:
    """Through memory, which takes that of the whole slot for a moment."""
    with closing(StageRuntime(path, OPTIONS)) as runtime:
        assert runtime.memory._copies_at_call == (family.architecture in WITH_WINDOWS)


def test_models_that_can_be_trimmed_leave_copies_to_llama_cpp(tmp_path: Path) -> None:
    with closing(StageRuntime(TINY_FAMILIES["gemma4"].write(tmp_path / "model.gguf"), OPTIONS)) as runtime:
        assert not runtime.memory._copies_at_call


@pytest.mark.parametrize("name", WITH_WINDOWS)
def test_a_slot_that_takes_no_copy_is_empty(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(StageRuntime(WITH_WINDOWS[name].write(tmp_path / "model.gguf"), OPTIONS)) as runtime:
        compute(runtime, 0, 0, 60)
        compute(runtime, 1, 0, 60, text=OTHER)
        monkeypatch.setattr("stages.runtime.slot_memory.write_sequence", lambda *_arguments: False)
        with pytest.raises(StageFailed, match="rejects the KV rows of slot 0"):
            runtime.memory.copy(0, 1, 60)
        assert (runtime.memory.length(1), runtime.memory.return_points(1)) == (0, (0,))
        first = compute(runtime, 1, 0, 60)
        runtime.memory.trim(0, 0)
        assert np.array_equal(compute(runtime, 0, 0, 60), first)
