"""What a session begins with: rows from disk, what its own slot holds, a copy of another's, or nothing."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from spanmesh_proto.errors import PrefixMismatch, StageFailed
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.serving.prefix_blocks import FetchedPrefix
from stages.serving.slots import KvSlots
from tests.support.fake_stage import FakeRuntime
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.windowed_hybrids import DEEPSEEK4, LFM2

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

TEXT: Final = [int(token) for token in np.random.default_rng(3).integers(3, 300, 100)]
OTHER: Final = TEXT[::-1]
OPTIONS: Final = RuntimeOptions(num_slots=3, ctx_size=128, exact=True, num_checkpoints=3)
RECURRENT: Final = {"falcon-h1": TINY_FAMILIES["falcon-h1"], "deepseek4": DEEPSEEK4, "lfm2": LFM2}


def slots_of(runtime: Any) -> KvSlots:
    return KvSlots(runtime, 1 << 20)


def compute(
    slots: KvSlots,
    slot: int,
    start: int,
    stop: int,
    *,
    checkpoints: tuple[int, ...] = (),
    text: Sequence[int] = TEXT,
) -> NDArray[np.float32]:
    """Compute rows together, as a worker does."""
    span = Span(slot, start, text[start:stop], num_outputs=stop - start, checkpoints=checkpoints)
    (output,) = slots.runtime.decode([span])
    slots.computed(span, 0)
    return output


def begin(
    slots: KvSlots, slot: int, source: int, num_cached: int, fetched: FetchedPrefix | None = None
) -> None:
    slots.begin(slot, source, TEXT[:num_cached], 0, 4, brought=fetched)


def prefix_from(slots: KvSlots, slot: int, stop: int) -> FetchedPrefix:
    """What the disk would bring of the first positions of a slot, which ends there."""
    tokens = np.asarray(TEXT[:stop], np.int64)
    runtime = slots.runtime
    if runtime.info.has_windows:
        rows, state = runtime.memory.kv_rows_and_window(slot)
        return FetchedPrefix(tokens, np.frombuffer(rows.to_bytes(), np.uint8), state)
    return FetchedPrefix(tokens, np.frombuffer(runtime.memory.kv_rows(slot).to_bytes(), np.uint8))


@pytest.mark.model
@pytest.mark.parametrize("name", RECURRENT)
def test_a_slot_without_a_checkpoint_there_takes_a_copy_of_one_that_has_it(name: str, tmp_path: Path) -> None:
    path = RECURRENT[name].write(tmp_path / "model.gguf")
    with closing(StageRuntime(path, OPTIONS)) as runtime:
        slots = slots_of(runtime)
        compute(slots, 0, 0, 30)
        compute(slots, 0, 30, 50, checkpoints=(30,))
        # The same tokens, in one piece: it can go back to its beginning and its end only.
        whole = compute(slots, 1, 0, 50)
        begin(slots, 1, 0, 30)
        assert slots.tokens.tokens(1).tolist() == TEXT[:30]
        assert np.array_equal(compute(slots, 1, 30, 50), whole[30:])
        assert runtime.memory.length(0) == 50, "the other is as it was"
        # Its own checkpoint is preferred: nothing is copied.
        compute(slots, 2, 0, 30)
        compute(slots, 2, 30, 60, checkpoints=(30,))
        begin(slots, 2, 0, 30)
        assert not runtime.memory._copying
        assert np.array_equal(compute(slots, 2, 30, 50), whole[30:])


@pytest.mark.model
def test_a_session_begins_anew_only_where_no_slot_can_go_back(tmp_path: Path) -> None:
    path = RECURRENT["falcon-h1"].write(tmp_path / "model.gguf")
    with closing(StageRuntime(path, OPTIONS)) as runtime:
        slots = slots_of(runtime)
        for slot in (0, 1):
            compute(slots, slot, 0, 50)
        with pytest.raises(PrefixMismatch, match=r"slot 0, which can go back to positions \[0, 50\] only"):
            begin(slots, 1, 0, 30)
        with pytest.raises(PrefixMismatch, match=r"slot 1, which can go back to positions \[0, 50\] only"):
            begin(slots, 1, 1, 30)
        with pytest.raises(PrefixMismatch, match="slot 2, which has only the first 0 of them"):
            begin(slots, 1, 2, 30)
        begin(slots, 1, 1, 50)
        begin(slots, 1, 1, 0)
        assert (runtime.memory.length(0), runtime.memory.length(1)) == (50, 0)


@pytest.mark.model
@pytest.mark.parametrize("name", ["gpt-oss", "gemma4"])
def test_a_slot_that_lacks_rows_in_windows_takes_those_from_disk_or_of_another(
    name: str, tmp_path: Path
) -> None:
    path = TINY_FAMILIES[name].write(tmp_path / "model.gguf")
    with closing(StageRuntime(path, OPTIONS)) as runtime:
        slots = slots_of(runtime)
        rows = compute(slots, 0, 0, 60)
        prefixes = {}
        for stop in (50, 40):
            slots.trim(0, stop)
            prefixes[stop] = prefix_from(slots, 0, stop)
        begin(slots, 1, 1, 50, prefixes[50])
        assert np.array_equal(compute(slots, 1, 50, 60), rows[50:])
        # It holds these tokens, but behind the first 50 only it has all rows in windows.
        begin(slots, 1, 1, 40, prefixes[40])
        assert runtime.memory.length(1) == 40
        assert np.array_equal(compute(slots, 1, 40, 60), rows[40:])
        with pytest.raises(PrefixMismatch, match="slot 1, which lacks rows in sliding windows"):
            begin(slots, 1, 1, 30)
        with pytest.raises(PrefixMismatch, match="slot 1, which lacks rows in sliding windows"):
            begin(slots, 2, 1, 30)
        begin(slots, 1, 0, 30)
        assert np.array_equal(compute(slots, 1, 30, 60), rows[30:])
        # What a recovery lets a session resume is used as far as the slot can go back.
        begin(slots, 1, 1, 50, prefixes[50])
        slots.begin(1, 1, (), 45, 4)
        assert runtime.memory.length(1) == 0
        for num_resumed in (50, 80):
            begin(slots, 1, 1, 50, prefixes[50])
            slots.begin(1, 1, (), num_resumed, 4)
            assert runtime.memory.length(1) == 50


@pytest.mark.model
def test_rows_from_disk_replace_the_same_tokens_in_the_slot(tmp_path: Path) -> None:
    """Which may have been computed in another ring, while those from disk are certainly of this one."""
    path = TINY_FAMILIES["qwen3moe"].write(tmp_path / "model.gguf")
    with closing(StageRuntime(path, OPTIONS)) as runtime:
        slots = slots_of(runtime)
        rows = compute(slots, 0, 0, 60)
        slots.trim(0, 40)
        prefix = prefix_from(slots, 0, 40)
        # Rows of another text, under the same token ids.
        compute(slots, 1, 0, 60, text=OTHER)
        slots.tokens.write(1, 0, TEXT[:60])
        begin(slots, 1, 1, 40, prefix)
        assert np.array_equal(compute(slots, 1, 40, 60), rows[40:])


@pytest.mark.parametrize("error", [StageFailed("llama.cpp fails"), MemoryError()])
def test_a_slot_that_takes_no_copy_is_empty(error: Exception) -> None:
    runtime: Any = FakeRuntime(0, 3)
    slots = slots_of(runtime)
    text = [token % 64 for token in TEXT]

    def fail(*_arguments: object) -> None:
        raise error

    for slot, first in ((0, 0), (1, 20)):
        span = Span(slot, 0, text[first : first + 16])
        runtime.decode([span])
        slots.computed(span, 0)
    runtime.memory.copy = fail
    with pytest.raises(PrefixMismatch, match="10 positions of slot 0 cannot be copied to slot 1"):
        slots.begin(1, 0, text[:10], 0, 4)
    assert (runtime.memory.length(1), slots.tokens.length(1)) == (0, 0)


@pytest.mark.model
def test_rows_may_be_put_into_a_slot_while_others_are_to_be_copied(tmp_path: Path) -> None:
    path = TINY_FAMILIES["qwen3moe"].write(tmp_path / "model.gguf")
    with closing(StageRuntime(path, OPTIONS)) as runtime:
        slots = slots_of(runtime)
        rows = compute(slots, 0, 0, 60)
        slots.trim(0, 40)
        prefix = prefix_from(slots, 0, 40)
        begin(slots, 1, 0, 30)
        begin(slots, 2, 2, 40, prefix)
        for slot in (0, 1):
            with pytest.raises(PrefixMismatch, match="has yet to copy rows from slot to slot"):
                begin(slots, slot, slot, 40, prefix)
        begin(slots, 1, 2, 30)
        for slot, start in ((2, 40), (1, 30)):
            assert np.array_equal(compute(slots, slot, start, 60), rows[start:]), slot
