"""What llama.cpp computes at one go where every sequence has a KV cache of its own. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def run_around(slot: int, rows_of: Mapping[int, int], most_slots: int, most_rows: int) -> range:
    """Slots that follow one another with equally many rows each, the given one among them.

    A longer run is divided from its beginning, so that a slot meets the same neighbours again and again:
    those that go round the pipeline together come back together.

    Args:
        slot: One of `rows_of`.
        rows_of: Rows that wait, by slot; a window without any is refused later, but by itself.
        most_slots: How many may be computed together, at least 1.
        most_rows: How many rows may be, at least those of the slot.
    """
    num_rows = rows_of[slot]
    first = last = slot
    while rows_of.get(first - 1) == num_rows:
        first -= 1
    while rows_of.get(last + 1) == num_rows:
        last += 1
    limit = max(1, min(most_slots, most_rows // max(1, num_rows)))
    start = first + (slot - first) // limit * limit
    return range(start, min(start + limit, last + 1))
