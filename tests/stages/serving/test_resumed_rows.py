"""Rows of a resumed session that a stage need not compute: where it holds them, and can go on behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from spanmesh_proto.errors import PrefixMismatch
from stages.runtime.spans import Span
from stages.serving.slots import KvSlots
from tests.support.fake_recurrent import FakeRecurrentRuntime
from tests.support.fake_stage import FakeRuntime

if TYPE_CHECKING:
    from collections.abc import Sequence

ROW_BYTES = 4
TEXT = tuple(range(1, 41))


def slots_of(runtime: Any, checkpoints: Sequence[int], *, num_sent: int = len(TEXT)) -> KvSlots:
    """Slots of which slot 0 holds the text; what was sent for its first rows is there."""
    slots = KvSlots(runtime, 1 << 20)
    slots.begin(0, 0, (), 0, ROW_BYTES)
    for start in range(0, len(TEXT), 10):
        kept = tuple(each for each in checkpoints if each <= start)
        span = Span(0, start, TEXT[start : start + 10], checkpoints=kept)
        runtime.decode([span])
        slots.computed(span, 0)
        slots.sent_on(span, bytes(ROW_BYTES * len(span.tokens)))
    slots.sent.trim(0, num_sent)
    return slots


def window(start: int, stop: int, changed_at: int | None = None) -> Span:
    """A window with the text's tokens, from one of them on with others."""
    tokens = [60 if changed_at is not None and at >= changed_at else TEXT[at] for at in range(start, stop)]
    return Span(0, start, tokens)


@pytest.mark.parametrize(
    ("span", "most", "num_sent", "num_reused"),
    [
        (window(0, 16), 16, 40, 16),
        (window(16, 32), 10, 40, 10),
        (window(16, 32), -3, 40, 0),
        (window(16, 32, changed_at=20), 16, 40, 4),
        (window(16, 32), 16, 25, 9),
        (window(16, 32), 16, 10, 0),
    ],
)
def test_a_slot_that_can_be_trimmed_goes_on_behind_all_that_it_holds(
    span: Span, most: int, num_sent: int, num_reused: int
) -> None:
    slots = slots_of(FakeRuntime(0, 3), (), num_sent=num_sent)
    assert slots.num_reusable(span, most, ROW_BYTES) == num_reused


def test_rows_that_were_sent_in_another_size_are_computed() -> None:
    assert slots_of(FakeRuntime(0, 3), ()).num_reusable(window(0, 16), 16, 2) == 0


def test_a_tail_needs_nothing_that_was_sent() -> None:
    slots = slots_of(FakeRecurrentRuntime(2, 3), (20,), num_sent=0)
    assert slots.num_reusable(window(0, 16), 16, ROW_BYTES) == 16


@pytest.mark.parametrize(
    ("span", "most", "num_sent", "num_reused"),
    [
        # Nothing is left to compute, so nothing goes back.
        (window(0, 16), 16, 40, 16),
        (window(32, 40), 8, 40, 8),
        # Behind a checkpoint, behind the last that it holds, or from the beginning.
        (window(16, 32), 15, 40, 4),
        (window(16, 32, changed_at=28), 16, 40, 4),
        (window(16, 32), 16, 25, 4),
        (window(20, 36), 15, 40, 0),
        (window(20, 36), 0, 40, 0),
        (Span(0, 32, [*TEXT[32:], 7, 8]), 8, 40, 8),
        (Span(0, 40, [7, 8]), 0, 40, 0),
        (window(0, 16, changed_at=12), 16, 40, 0),
    ],
)
def test_a_slot_with_recurrent_state_goes_on_from_where_it_can_go_back_to(
    span: Span, most: int, num_sent: int, num_reused: int
) -> None:
    runtime = FakeRecurrentRuntime(0, 3)
    slots = slots_of(runtime, (20,), num_sent=num_sent)
    assert runtime.memory.return_points(0) == (0, 20, 40)
    assert slots.num_reusable(span, most, ROW_BYTES) == num_reused


@pytest.mark.parametrize(
    ("span", "most", "num_sent"),
    [
        # The tokens are others there, the sent rows are gone, the tail is to sample them, or a gap is before.
        (window(21, 36, changed_at=30), 15, 40),
        (window(21, 36), 15, 30),
        (window(21, 36), 15, 0),
        (window(21, 36), 14, 40),
        (Span(0, 41, [7, 8]), 0, 40),
    ],
)
def test_a_slot_that_cannot_go_back_to_where_it_would_compute_says_so(
    span: Span, most: int, num_sent: int
) -> None:
    slots = slots_of(FakeRecurrentRuntime(0, 3), (20,), num_sent=num_sent)
    with pytest.raises(PrefixMismatch, match=r"it can go back to \[0, 20, 40\] only"):
        slots.num_reusable(span, most, ROW_BYTES)
