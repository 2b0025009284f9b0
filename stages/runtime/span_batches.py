"""Batches of spans: which spans llama.cpp computes in one pass, and their padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages.runtime.runs import Run, RunPlanner, run_around, runs_of_equals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from stages.runtime.spans import Span


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
