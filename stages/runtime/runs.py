"""Runs: slots whose rows llama.cpp computes in one pass where each slot has a cache of its own.

Those are consecutive slots with equally many rows each. Slots between two of them, and rows that are missing
to a size that kernels compute faster, can be padded: see `RowTimes`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from stages.runtime.spans import RowTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# What a batch costs around llama.cpp: changes of thread, and its message to the next stage.
_BATCH_US: Final = 300.0
# Runs become one only if that saves this share of their time.
_LEAST_SAVED: Final = 0.03


@dataclass(frozen=True)
class Run:
    """A batch of consecutive slots with equally many rows each, some of them padding."""

    slots: range
    """Its slots; those that were not asked for are padding."""
    num_rows: int
    """Rows of each; those beyond what was asked for are padding."""
    num_needed: int
    """Rows of the batch without those that only make it faster."""

    @property
    def size(self) -> int:
        """Rows of the batch."""
        return len(self.slots) * self.num_rows


class RunPlanner:
    """Divides slots with equally many rows each into runs, and pads these as far as that saves time.

    Args:
        num_slots: Slots of the stage.
        most_rows: Most rows of a batch.
    """

    def __init__(self, num_slots: int, most_rows: int) -> None:
        self._num_slots = num_slots
        self._most_rows = most_rows
        # Rows of one slot read the same keys and values in attention, rows of several do not.
        self._alone = RowTimes()
        self._together = RowTimes()

    def learn(self, run: Run, elapsed_us: float) -> None:
        """Note the time of a run, microseconds."""
        times = self._alone if len(run.slots) == 1 else self._together
        times.add(run.size, elapsed_us, num_needed=run.num_needed)

    def plan(self, slots: Sequence[int], num_rows: int, room_of: Callable[[int], int]) -> list[Run]:
        """Runs of some slots.

        Args:
            slots: Ascending, at least one.
            num_rows: Rows of each, from 1 to those of a batch.
            room_of: Number of rows that can be added to a slot: behind its own, if it is among `slots`.
        """
        neighbours = list(self._neighbours(slots, max(1, self._most_rows // num_rows)))
        joined = list(self._joined(neighbours, num_rows, room_of))
        return [self._padded(run, slots, num_rows, room_of) for run in joined]

    def _neighbours(self, slots: Sequence[int], limit: int) -> Iterator[range]:
        start = slots[0]
        for left, right in pairwise([*slots, -1]):
            if right != left + 1 or right - start == limit:
                yield range(start, left + 1)
                start = right

    def _joined(
        self, neighbours: Sequence[range], num_rows: int, room_of: Callable[[int], int]
    ) -> Iterator[range]:
        """The runs, some made one over the slots between them: those that take the least time in all."""
        if len(neighbours) == 1 or self._us(1, 1) == math.inf:
            yield from neighbours
            return
        # From each run to the last: the least time, how many of them become one first, and its slots.
        best: list[tuple[float, int, range]] = [(0.0, 0, range(0))]
        for first in reversed(range(len(neighbours))):
            whole = neighbours[first]
            options = [(self._us(len(whole), num_rows) + best[-1][0], 1, whole)]
            for count, run in enumerate(neighbours[first + 1 :], start=2):
                between = range(whole.stop, run.start)
                whole = range(whole.start, run.stop)
                is_room = all(room_of(slot) >= num_rows for slot in between)
                if not is_room or len(whole) * num_rows > self._most_rows:
                    break
                own_us = self._us(len(whole), num_rows) / (1 - _LEAST_SAVED)
                options.append((own_us + best[-count][0], count, whole))
            best.append(min(options, key=lambda option: option[0]))
        first = 0
        while first < len(neighbours):
            _, count, whole = best[len(neighbours) - first]
            yield whole
            first += count

    def _us(self, width: int, num_rows: int) -> float:
        """Time of a batch with so many slots; infinite before any was measured."""
        times, other = (self._alone, self._together) if width == 1 else (self._together, self._alone)
        size = times.padded(width * num_rows, self._most_rows)
        us = times.us(size) or other.us(size)
        return math.inf if us is None else _BATCH_US + us

    def _padded(self, run: range, slots: Sequence[int], num_rows: int, room_of: Callable[[int], int]) -> Run:
        size = len(run) * num_rows
        if len(run) == 1:
            target = self._alone.padded(size, self._most_rows)
            return Run(run, target if target - size <= room_of(run.start) else size, size)
        width, rest = divmod(self._together.padded(size, self._most_rows), num_rows)
        # From the slots behind the run to those before it.
        for start in range(run.start, run.stop - width - 1, -1):
            wider = range(start, start + width)
            beside = [slot for slot in wider if slot not in run]
            is_within = start >= 0 and wider.stop <= self._num_slots
            if rest or not is_within or any(slot in slots for slot in beside):
                continue
            if all(room_of(slot) >= num_rows for slot in beside):
                return Run(wider, num_rows, size)
        return Run(run, num_rows, size)


def runs_of_equals(sizes: Sequence[tuple[int, int]], most_rows: int) -> Iterator[list[int]]:
    """Runs without padding slots.

    Args:
        sizes: Slot and number of rows of each span, padding included.
        most_rows: Most rows of a batch, at least those of the largest span.

    Yields:
        Indices of the spans of a batch.
    """
    run: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: (sizes[index][1], sizes[index][0])):
        slot, num_rows = sizes[index]
        follows = run and sizes[run[-1]] == (slot - 1, num_rows)
        if run and not (follows and (len(run) + 1) * num_rows <= most_rows):
            yield run
            run = []
        run.append(index)
    yield run


def run_around(slot: int, rows_of: Mapping[int, int], most_rows: int) -> range:
    """Run without padding slots, around a given slot.

    A longer run is divided from its beginning, so that a slot always meets the same neighbours: sessions that
    are batched together come back together.

    Args:
        slot: A key of `rows_of`.
        rows_of: Waiting rows by slot; a window without any is refused later, by itself.
        most_rows: Most rows of a batch, at least those of the slot.
    """
    num_rows = rows_of[slot]
    first = last = slot
    while rows_of.get(first - 1) == num_rows:
        first -= 1
    while rows_of.get(last + 1) == num_rows:
        last += 1
    limit = max(1, most_rows // max(1, num_rows))
    start = first + (slot - first) // limit * limit
    return range(start, min(start + limit, last + 1))
