"""Blocks of a slot's rows, joined again: the very rows, and only in the order of one text."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanmesh_proto import windows_pb2 as wire
from stages.runtime.kv_state import KvRows
from stages.runtime.spans import Span
from stages.serving.block_store import DamagedBlock, RowsBlock
from stages.serving.prefix_blocks import BlockPlace, FetchedPrefix, PrefixReader, SlotCopy
from tests.support.fake_stage import FakeRuntime

if TYPE_CHECKING:
    from collections.abc import Iterable

TEXT: Final = tuple((7 * place) % 60 + 1 for place in range(90))
OTHER_TEXT: Final = (*TEXT[:20], *TEXT[:19:-1])
STATE: Final = np.arange(5, dtype=np.uint8)


def runtime_of(tokens: tuple[int, ...], slot: int = 1) -> FakeRuntime:
    """A stage whose slot has computed these tokens."""
    runtime = FakeRuntime(0, 3)
    for first in range(0, len(tokens), FakeRuntime.max_rows):
        runtime.decode([Span(slot, first, tokens[first : first + FakeRuntime.max_rows])])
    return runtime


def copy_of(tokens: tuple[int, ...] = TEXT, *, states: tuple[int, ...] = ()) -> SlotCopy:
    return SlotCopy(
        np.asarray(tokens, np.int64), runtime_of(tokens).memory.kv_rows(1), dict.fromkeys(states, STATE)
    )


def place(start: int, stop: int, *, has_state: bool = False) -> BlockPlace:
    return BlockPlace(hashlib.sha256(f"{start} {stop}".encode()).digest(), start, stop, has_state)


def blocks_of(copied: SlotCopy, *bounds: int) -> list[RowsBlock]:
    places = [place(*pair) for pair in itertools.pairwise(bounds)]
    return [block for _place, block in copied.blocks(places)]


def prefix_of(blocks: Iterable[RowsBlock]) -> FetchedPrefix:
    reader = PrefixReader()
    for block in blocks:
        reader.add(block)
    prefix = reader.prefix()
    assert prefix is not None
    assert reader.num_positions == len(prefix.tokens)
    return prefix


@given(stop=st.integers(1, 90), cuts=st.sets(st.integers(1, 89), max_size=6))
def test_blocks_of_a_slot_are_its_rows_again(stop: int, cuts: set[int]) -> None:
    copied = copy_of()
    bounds = sorted({0, stop, *(cut for cut in cuts if cut < stop)})
    prefix = prefix_of(blocks_of(copied, *bounds))
    assert prefix.tokens.tolist() == list(TEXT[:stop])
    assert prefix.saved.tobytes() == copied.rows.cut(0, stop).to_bytes()
    target = FakeRuntime(0, 3, is_poisoned=True)
    target.memory.put_saved(2, prefix.saved, stop)
    (expected,) = runtime_of(TEXT[:stop]).decode([Span(1, stop, [5])])
    assert np.array_equal(target.decode([Span(2, stop, [5])])[0], expected)


def test_blocks_of_different_copies_fit_together_if_their_texts_do() -> None:
    shorter = copy_of(TEXT[:40])
    prefix = prefix_of([*blocks_of(shorter, 0, 16, 32), *blocks_of(copy_of(), 32, 48)])
    assert prefix.saved.tobytes() == copy_of().rows.cut(0, 48).to_bytes()


def test_blocks_that_do_not_follow_are_refused() -> None:
    first, second, third = blocks_of(copy_of(), 0, 16, 32, 48)
    (elsewhere,) = blocks_of(copy_of(OTHER_TEXT), 16, 32)
    reader = PrefixReader()
    assert reader.prefix() is None
    for wrong in (second, third):
        with pytest.raises(DamagedBlock, match="it begins at position"):
            reader.add(wrong)
    reader.add(first)
    with pytest.raises(DamagedBlock, match="it begins at position 32, not 16"):
        reader.add(third)
    # Its own tokens are as its rows are, but those before are others.
    reader_of_other = PrefixReader()
    reader_of_other.add(blocks_of(copy_of((9, *TEXT[1:])), 0, 16)[0])
    with pytest.raises(DamagedBlock, match="it follows other tokens"):
        reader_of_other.add(second)
    with pytest.raises(DamagedBlock, match="it follows other tokens"):
        reader.add(replace(second, tokens=elsewhere.tokens))
    with pytest.raises(DamagedBlock, match="its rows are of positions 0 to 16"):
        reader.add(replace(second, rows=first.rows))
    with pytest.raises(DamagedBlock, match="cannot be split by rows"):
        reader.add(replace(second, rows=second.rows[:-1]))
    reader.add(second)
    assert reader.num_positions == 32


def test_what_is_not_there_is_left_out() -> None:
    copied = copy_of(TEXT[:40], states=(20,))
    places = [
        place(32, 48),
        place(16, 24, has_state=True),
        place(16, 20, has_state=True),
        place(16, 32),
        place(0, 16),
    ]
    found = dict(copied.blocks(places))
    assert list(found) == [places[4], places[2], places[3]]
    assert found[places[2]].state.tolist() == STATE.tolist()
    prefix = prefix_of([found[places[4]], found[places[2]]])
    assert prefix.state is not None
    assert prefix.state.tolist() == STATE.tolist()


def test_rows_without_attention_are_a_head_alone() -> None:
    rows = KvRows.without_caches(0, 40, b"headhead")
    assert rows is not None
    copied = SlotCopy(np.asarray(TEXT[:40], np.int64), rows, {40: STATE})
    places = [place(0, 16), place(16, 32), place(32, 40, has_state=True)]
    prefix = prefix_of(block for _place, block in copied.blocks(places))
    assert prefix.saved.tobytes() == b"headhead"
    assert prefix.state is not None


def test_a_prefix_serves_what_it_holds() -> None:
    tokens = np.asarray(TEXT[:32], np.int64)
    plain = FetchedPrefix(tokens, np.empty(0, np.uint8))
    stateful = replace(plain, state=STATE)
    for prefix, cached, is_served in (
        (plain, TEXT[:32], True),
        (plain, TEXT[:20], True),
        (plain, (), False),
        (plain, TEXT[:33], False),
        (plain, (*TEXT[:31], 0), False),
        (stateful, TEXT[:32], True),
        (stateful, TEXT[:20], False),
    ):
        assert prefix.serves(cached) == is_served


def test_a_place_that_cannot_be_one_is_none() -> None:
    name = bytes(32)
    assert BlockPlace.from_wire(wire.Block(name=name, start=0, stop=4)) == BlockPlace(name, 0, 4)
    for message in (
        wire.Block(name=name[:-1], start=0, stop=4),
        wire.Block(name=name, start=4, stop=4),
        wire.Block(start=0, stop=4),
    ):
        assert BlockPlace.from_wire(message) is None
