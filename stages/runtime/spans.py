"""Spans, rows of one slot: which of them llama.cpp computes in one pass, and their padding by measured times.

llama.cpp's processor kernels for repacked weights take rows by fours, and what remains one by one: of a model
with 1.1 billion parameters in Q4_0, seven layers took 65 ms for three rows and 41 ms for four (one thread,
AVX-512). So a row more, whose result is dropped, can save time. Whether it does depends on processor and
quantisation, so it is tried, and measured again from time to time. Servers on GPUs pad batches likewise, to
the sizes of their captured graphs.

Where each slot has a cache of its own, one pass computes a run: consecutive slots with equally many rows
each. Slots between two of them, and rows that are missing to a size that kernels compute faster, can be
padded: see `RowTimes`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from spanmesh_proto.row_ids import FIRST_ROW_ID

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from spanmesh_proto import windows_pb2 as wire

# What a batch costs around llama.cpp: changes of thread, and its message to the next stage.
_BATCH_US: Final = 300.0
# Runs become one only if that saves this share of their time.
_LEAST_SAVED: Final = 0.03
# Rows that kernels take at once; batches are padded to multiples of it.
_TILE: Final = 4
# Measurements of a number of rows before it is compared.
_FEWEST: Final = 3
# Padding must save this share of the time.
_LEAST_SAVED_BY_PADDING: Final = 0.03
# After so many batches that were padded, one is not, so that its time stays known.
_MOST_PADDED: Final = 64
_WEIGHT: Final = 1 / 8
# A time that is this many times off was disturbed by another process.
_MOST_OFF: Final = 2.0


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


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one slot, for a batch."""

    slot: int
    """Sequence slot."""
    start: int
    """Absolute position of the first row. The slot's rows from there on are dropped."""
    tokens: Sequence[int]
    """Token ids, one a row."""
    hidden: NDArray[np.float32] | None = None
    """float32 (rows, n_embd); required except at the first stage, where they replace embeddings."""
    num_outputs: int = 0
    """At the tail, number of last rows that return logits."""
    checkpoints: tuple[int, ...] = ()
    """In models with recurrent layers: positions of the slot's checkpoints that are kept, and `start` if one
    is to be made before the first row. Empty to keep all and make none."""
    embedded: NDArray[np.float32] | None = None
    """float32 (rows, width of the embedding's input): rows that are no tokens as they entered the first
    stage, for those behind it that use the embedding again."""
    may_be_padded: bool = False
    """Whether other rows may be computed with it, only because that is faster."""

    @classmethod
    def of(
        cls,
        slot: int,
        window: wire.Window,
        hidden: NDArray[np.float32] | None = None,
        embedded: NDArray[np.float32] | None = None,
    ) -> Span:
        """Rows of a window; without hidden states if they are decoded later."""
        return cls(
            slot,
            window.start,
            list(window.tokens),
            hidden,
            num_outputs=window.verify_rows,
            checkpoints=tuple(window.checkpoints),
            embedded=embedded,
        )

    @property
    def is_rows(self) -> bool:
        """Whether its ids are those of rows that are no tokens."""
        return bool(self.tokens) and self.tokens[0] >= FIRST_ROW_ID

    def behind(self, num_rows: int) -> Span:
        """The rows behind its first ones."""
        hidden, embedded = (
            None if rows is None else rows[num_rows:] for rows in (self.hidden, self.embedded)
        )
        return replace(
            self,
            start=self.start + num_rows,
            tokens=self.tokens[num_rows:],
            hidden=hidden,
            embedded=embedded,
        )

    @property
    def is_costly(self) -> bool:
        """Whether more is done than its rows are computed: states may be copied, which takes a while."""
        return bool(self.checkpoints)


@dataclass
class _Measured:
    """Times of batches with one number of rows."""

    mean_us: float = 0.0
    """Running mean."""
    num_times: int = 0
    """How many were measured."""
    num_padded: int = 0
    """Batches that were padded since the last of exactly this number."""

    def add(self, elapsed_us: float) -> None:
        self.num_times += 1
        if self.num_times == 1 or elapsed_us < self.mean_us / _MOST_OFF:
            # The first one may have waited for the disk.
            self.mean_us = elapsed_us
        else:
            elapsed_us = min(elapsed_us, self.mean_us * _MOST_OFF)
            self.mean_us += _WEIGHT * (elapsed_us - self.mean_us)


class RowTimes:
    """Measured times of batches, by their number of rows."""

    def __init__(self) -> None:
        self._by_rows: dict[int, _Measured] = {}
        # Keys of the above with a time, ascending.
        self._known: list[int] = []

    def add(self, num_rows: int, elapsed_us: float, *, num_needed: int) -> None:
        """Note the time of a batch.

        Args:
            num_rows: Its rows.
            elapsed_us: Its time, microseconds.
            num_needed: Its rows without padding.
        """
        if num_rows not in self._known:
            self._known.insert(bisect_left(self._known, num_rows), num_rows)
        self._of(num_rows).add(elapsed_us)
        needed = self._of(num_needed)
        needed.num_padded = 0 if num_rows == num_needed else needed.num_padded + 1

    def us(self, num_rows: int) -> float | None:
        """Time of a batch, microseconds; None if none was measured.

        Between known numbers it is interpolated, outside of them it is in proportion to the nearest.
        """
        known = self._known
        if not known:
            return None
        index = bisect_left(known, num_rows)
        if index in {0, len(known)}:
            nearest = known[min(index, len(known) - 1)]
            return self._by_rows[nearest].mean_us * num_rows / nearest
        left, right = known[index - 1], known[index]
        left_us, right_us = self._by_rows[left].mean_us, self._by_rows[right].mean_us
        return left_us + (right_us - left_us) * (num_rows - left) / (right - left)

    def padded(self, num_rows: int, most_rows: int) -> int:
        """Number of rows, at least `num_rows`, with which a batch takes least.

        Args:
            num_rows: Rows that are needed.
            most_rows: Most rows, at least those that are needed.
        """
        tile = -(-num_rows // _TILE) * _TILE
        needed = self._by_rows.get(num_rows)
        # A lone row is never slower than four.
        if not 1 < num_rows < tile <= most_rows or needed is None or needed.num_times < _FEWEST:
            return num_rows
        full = self._by_rows.get(tile)
        if full is None or full.num_times < _FEWEST:
            return tile
        if needed.num_padded >= _MOST_PADDED:
            return num_rows
        return tile if full.mean_us < (1 - _LEAST_SAVED_BY_PADDING) * needed.mean_us else num_rows

    def _of(self, num_rows: int) -> _Measured:
        return self._by_rows.setdefault(num_rows, _Measured())


@dataclass(frozen=True)
class SpanBatch:
    """Spans that llama.cpp computes in one pass."""

    spans: Sequence[Span]
    """In the order in which they are computed, padding spans included."""
    paddings: Sequence[int]
    """Number of padding rows behind each."""
    fillers: Sequence[Span] = ()
    """Those that were not asked for: padding in slots between the others, or beside them."""
    run: Run | None = None
    """Its plan, to learn its time; None if nothing is padded for speed."""

    def pads_logits(self, span: Span) -> bool:
        """Whether padding rows of one of the spans get logits.

        The head of a model computes only rows with logits: if the span's own all have some, it computes a
        padded batch as well.
        """
        return self.run is not None and span.num_outputs == len(span.tokens)

    @property
    def num_rows(self) -> list[int]:
        """Number of rows of each span, padding included."""
        return [len(span.tokens) + padding for span, padding in zip(self.spans, self.paddings, strict=True)]

    @property
    def num_logits(self) -> list[int]:
        """Number of rows with logits of each span, padding included."""
        return [
            span.num_outputs + padding * self.pads_logits(span)
            for span, padding in zip(self.spans, self.paddings, strict=True)
        ]


class SpanBatches:
    """Divides spans into batches.

    Args:
        lengths: Number of positions that each slot holds, kept up to date by the owner.
        most_rows: Most rows of a batch.
        min_rows: Fewest rows of a span in the numeric mode; shorter ones are padded.
        ctx_size: Positions for which a slot has room.
        n_ctx_train: Trained positions: behind the last one a table may end.
        has_runs: Whether only slots of a run are computed in one pass.
        pads_for_speed: Whether batches of spans that may be padded are, where that saves time.
        make_filler: Makes a padding span of a slot, with so many rows behind what it holds.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        most_rows: int,
        min_rows: int,
        ctx_size: int,
        n_ctx_train: int,
        has_runs: bool,
        pads_for_speed: bool,
        make_filler: Callable[[int, int], Span],
    ) -> None:
        self._lengths = lengths
        self._most_rows = most_rows
        self._min_rows = min_rows
        self._ctx_size = ctx_size
        self._n_ctx_train = n_ctx_train
        self._has_runs = has_runs
        self._planner = RunPlanner(len(lengths), most_rows) if has_runs and pads_for_speed else None
        self._make_filler = make_filler

    def divide(self, spans: Sequence[Span]) -> Iterator[SpanBatch]:
        """The spans, each in one batch."""
        planner = self._planner
        if not self._has_runs:
            yield SpanBatch(spans, [self._padding(span) for span in spans])
        elif planner is None or not all(span.may_be_padded for span in spans):
            sizes = [(span.slot, len(span.tokens) + self._padding(span)) for span in spans]
            for indices in runs_of_equals(sizes, self._most_rows):
                batch = [spans[index] for index in indices]
                yield SpanBatch(batch, [self._padding(span) for span in batch])
        else:
            yield from self._divide_and_pad(spans, planner)

    def run_around(self, slot: int, rows_of: Mapping[int, int]) -> range:
        """Slots that gain from sharing a batch with a slot; those between that have no rows are padded.

        Args:
            slot: A key of `rows_of`.
            rows_of: Waiting rows by slot.
        """
        num_rows = rows_of[slot]
        alike = sorted(each for each, rows in rows_of.items() if rows == num_rows)
        if self._planner is None or len(alike) == 1 or not 1 <= num_rows <= self._most_rows:
            return run_around(slot, rows_of, self._most_rows)
        runs = self._planner.plan(alike, num_rows, lambda each: self._room(self._lengths[each]))
        return next(run.slots for run in runs if slot in run.slots)

    def learn(self, batch: SpanBatch, elapsed_us: float) -> None:
        """Note the time of a batch, microseconds."""
        if self._planner is not None and batch.run is not None:
            self._planner.learn(batch.run, elapsed_us)

    def _divide_and_pad(self, spans: Sequence[Span], planner: RunPlanner) -> Iterator[SpanBatch]:
        span_of = {span.slot: span for span in spans}
        slots_of: dict[int, list[int]] = {}
        for slot in sorted(span_of):
            slots_of.setdefault(len(span_of[slot].tokens), []).append(slot)
        for num_rows, slots in slots_of.items():

            def room_of(slot: int, num_rows: int = num_rows) -> int:
                span = span_of.get(slot)
                if span is None:
                    return self._room(self._lengths[slot])
                # One whose own span is of another batch is no padding for this one.
                return self._room(span.start + num_rows) if len(span.tokens) == num_rows else 0

            for run in planner.plan(slots, num_rows, room_of):
                fillers = {
                    slot: self._make_filler(slot, num_rows) for slot in run.slots if slot not in span_of
                }
                yield SpanBatch(
                    [fillers.get(slot) or span_of[slot] for slot in run.slots],
                    [run.num_rows - num_rows] * len(run.slots),
                    tuple(fillers.values()),
                    run,
                )

    def _room(self, num_positions: int) -> int:
        return min(self._ctx_size, self._n_ctx_train) - num_positions

    def _padding(self, span: Span) -> int:
        """Padding rows that the numeric mode asks for."""
        rows = len(span.tokens)
        return max(0, min(self._min_rows - rows, self._n_ctx_train - span.start - rows))


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
