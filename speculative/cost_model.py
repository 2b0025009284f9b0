"""Cost model of speculation: times of batches and of the ring, price of a row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from speculative.outcome import WindowOutcome


# Of one row's time, for each further row, while only one row count was ever seen: between a GPU (nearly
# nothing) and a CPU (nearly all of it), so that wider windows are tried once and then known.
_UNKNOWN_SLOPE: Final = 0.5
# Of the slope between the last two known row counts, beyond the last.
_HOPE: Final = 0.8
_NEWEST_WEIGHT: Final = 0.125
# A sample this many times off what is known is a neighbour's doing; it counts as just so far off.
_MAX_SURPRISE: Final = 2.0


class BatchTimeModel:
    """t(k): milliseconds of a batch of `k` rows. Kernels work in tiles, so it has steps and is no line.

    Each row count keeps a running mean of its own. Between known ones the time is interpolated. Beyond the
    last it goes on a little flatter than the slope that leads to it: hope lets wider windows be tried, once,
    and then they are known. It never falls as rows are added.
    """

    def __init__(self) -> None:
        self._mean_ms: dict[int, float] = {}
        self._stairs: list[tuple[int, float]] = []

    @property
    def num_known(self) -> int:
        """Row counts that were measured."""
        return len(self._mean_ms)

    def add(self, num_rows: int, elapsed_ms: float) -> None:
        """Learn from one batch."""
        known_ms = self._mean_ms.get(num_rows)
        self._mean_ms[num_rows] = elapsed_ms if known_ms is None else smoothed(known_ms, elapsed_ms)
        self._stairs = []
        highest_ms = 0.0
        for rows in sorted(self._mean_ms):
            highest_ms = max(highest_ms, self._mean_ms[rows])
            self._stairs.append((rows, highest_ms))

    def ms(self, num_rows: int) -> float | None:
        """What a batch of so many rows takes; None if nothing was measured yet."""
        stairs = self._stairs
        if not stairs:
            return None
        if len(stairs) == 1 or num_rows < stairs[0][0]:
            rows, height_ms = stairs[0]
            return height_ms * _typical(num_rows) / _typical(rows)
        for (left, left_ms), (right, right_ms) in pairwise(stairs):
            if num_rows <= right:
                return left_ms + (right_ms - left_ms) * (num_rows - left) / (right - left)
        return right_ms + _HOPE * (right_ms - left_ms) * (num_rows - right) / (right - left)


def smoothed(mean_ms: float, newest_ms: float, weight: float = _NEWEST_WEIGHT) -> float:
    """A running mean that one wild sample cannot carry away."""
    newest_ms = min(max(newest_ms, mean_ms / _MAX_SURPRISE), mean_ms * _MAX_SURPRISE)
    return mean_ms + weight * (newest_ms - mean_ms)


def _typical(num_rows: int) -> float:
    return 1.0 + _UNKNOWN_SLOPE * (num_rows - 1)


class Timing:
    """Times of the ring, in milliseconds.

    Stages that share cores, with each other or with a draft model, compute more slowly while several are at
    it. So a stage's staircase is kept twice: of windows that had the ring to themselves, and of those that
    flew with others.

    Attributes:
        draft_ms_per_token: What a token costs the draft model; None without one.
        network_ms: What of a round no stage accounts for: hops, and the event loops between them; None
            before the first verdict.
        num_measured: Windows learned from.
    """

    def __init__(self) -> None:
        self.draft_ms_per_token: float | None = None
        self.forget_ring()

    def forget_ring(self) -> None:
        """Begin to learn anew: other stages, perhaps more or fewer, on other hosts."""
        self.network_ms: float | None = None
        self.num_measured = 0
        self._alone: list[BatchTimeModel] = []
        self._crowded: list[BatchTimeModel] = []
        self._contention = 1.0

    @property
    def contention(self) -> float:
        """How many times longer stages compute while windows fly together: 1 where each has its own core."""
        return self._contention

    def add(self, outcome: WindowOutcome, *, is_alone: bool) -> None:
        """Learn from a judged window.

        Args:
            outcome: Its measures may be missing: then it teaches nothing.
            is_alone: Whether nothing else of its session was under way meanwhile.
        """
        stages = outcome.stages
        if not stages:
            return
        while len(self._alone) < len(stages):
            self._alone.append(BatchTimeModel())
            self._crowded.append(BatchTimeModel())
        self.num_measured += 1
        at_stages_ms = sum(stage.queue_ms + stage.compute_ms for stage in stages)
        network_ms = max(0.0, outcome.arrived_ms - outcome.sent_ms - at_stages_ms)
        self.network_ms = network_ms if self.network_ms is None else smoothed(self.network_ms, network_ms)
        tables = self._alone if is_alone else self._crowded
        for table, stage in zip(tables, stages, strict=False):
            table.add(stage.num_rows, stage.compute_ms)
        if not is_alone:
            self._note_contention(outcome)

    def stages_ms(self, num_rows: int, *, is_alone: bool) -> tuple[float, ...]:
        """What each stage computes on `num_rows` rows; empty before the first verdict."""
        times = []
        for alone, crowded in zip(self._alone, self._crowded, strict=True):
            own, other = (alone, crowded) if is_alone else (crowded, alone)
            factor = 1.0 / self._contention if is_alone else self._contention
            # One row count is no staircase: the other table's shape is better than none.
            if own.num_known > 1 or not other.num_known:
                known_ms = own.ms(num_rows)
            else:
                other_ms = other.ms(num_rows)
                known_ms = None if other_ms is None else other_ms * factor
            times.append(known_ms or 0.0)
        return tuple(times)

    def _note_contention(self, outcome: WindowOutcome) -> None:
        computed_ms = expected_ms = 0.0
        for table, stage in zip(self._alone, outcome.stages, strict=False):
            known_ms = table.ms(stage.num_rows)
            if known_ms is None or not table.num_known:
                return
            computed_ms += stage.compute_ms
            expected_ms += known_ms
        if expected_ms > 0.0:
            # Both tables are measured at the same row counts often enough; a ratio below 1 is noise.
            self._contention = max(1.0, smoothed(self._contention, computed_ms / expected_ms))


# A server answers short questions and long ones. Held against the time of short texts, a long one's windows
# would all seem slow, and speculation be blamed for it.
_QUICKER_WEIGHT: Final = 0.3
_SLOWER_WEIGHT: Final = 0.06
# How many windows the slope remembers.
_SLOPE_MEMORY: Final = 512
# Positions closer together than this, in tokens, say little about the slope.
_NEAR_TOKENS: Final = 64.0
# Most of a window's time that may be owed to its position.
_MAX_SHARE: Final = 0.9


class DecodeTimeModel:
    """A line over positions, learned window by window. Shared by the sessions of a coordinator.

    Its slope comes from what the stages computed, so that a wire that changes does not pass for a text that
    grew; its height from whole windows. What disturbs a window makes it slower, never quicker, so quick ones
    count for more: taking plain windows for slow would make speculation seem to pay where it does not.

    Attributes:
        num_measured: Windows learned from.
    """

    def __init__(self) -> None:
        self.num_measured = 0
        self._base_ms = 0.0
        self._slope_ms = 0.0
        # Running means of positions and computing times, and how they vary together.
        self._position = 0.0
        self._computed_ms = 0.0
        self._covariance = 0.0
        self._variance = 0.0

    def add(self, position: int, elapsed_ms: float, computed_ms: float) -> None:
        """Learn from a plain window that nothing but chance disturbed.

        Args:
            position: Where it stood in its session's text, in tokens.
            elapsed_ms: From sending to verdict.
            computed_ms: What of this the stages computed.
        """
        self.num_measured += 1
        if self.num_measured == 1:
            self._base_ms, self._position, self._computed_ms = elapsed_ms, float(position), computed_ms
            return
        known_ms = self._base_ms + self._slope_ms * position
        self._learn_slope(position, computed_ms)
        weight = _QUICKER_WEIGHT if elapsed_ms < known_ms else _SLOWER_WEIGHT
        found_ms = smoothed(known_ms, elapsed_ms, weight)
        # A window at position 0 takes some time too, whatever noise says of the slope.
        self._slope_ms = min(self._slope_ms, _MAX_SHARE * found_ms / max(position, 1))
        # The line turns around where this window stands, so what was known there still holds.
        self._base_ms = found_ms - self._slope_ms * position

    def ms(self, position: int) -> float | None:
        """What a plain window takes there; None before anything was measured."""
        return self._base_ms + self._slope_ms * position if self.num_measured else None

    def _learn_slope(self, position: int, computed_ms: float) -> None:
        weight = 1.0 / min(self.num_measured, _SLOPE_MEMORY)
        off_position = position - self._position
        off_ms = min(computed_ms, 2.0 * self._computed_ms) - self._computed_ms
        self._position += weight * off_position
        self._computed_ms += weight * off_ms
        self._covariance = (1.0 - weight) * (self._covariance + weight * off_position * off_ms)
        self._variance = (1.0 - weight) * (self._variance + weight * off_position**2)
        self._slope_ms = max(0.0, self._covariance / (self._variance + _NEAR_TOKENS**2))


# A run lasts from one rejection to the next. Its first window takes the whole way, T; each one that follows
# brings its tokens a *beat* later, since it flew behind. With acceptance `a` per token, `front` proposed
# tokens in the first window and `width` in each other one, a run commits 1 / (1 - a) tokens and takes T +
# beat · a^(front + 1) / (1 - a^width).
#
# Several candidates per position (a tree in one batch) were weighed by the same account and left out. A
# second candidate helps only where the first is wrong and it is right, (1 - a)·r of the time, and then brings
# one token more than the verdict's own correction does; it costs a row always. At a = 0.8 and r = 0.5 that is
# 0.1 token for a row that costs 0.06 tokens at 20 ms one way, 0.17 at 5 ms and 0.42 at 0.1 ms (see
# `row_price`, three stages of 4.3 ms a row on two cores): five rows a run would win 0.2 of 5 tokens at best,
# and lose elsewhere.
_WIDTHS: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
# Certainty makes runs endless; answers are not.
_MAX_ACCEPTANCE: Final = 0.99
# Windows under way for each that would fill the ring if all beats were alike. They are not: stages that share
# cores stumble, and a late window must not leave the next stage without work. What waits is soon cancelled.
_DEPTH_SLACK: Final = 3.0


@dataclass(frozen=True)
class WindowPlanRate:
    """A way to send windows, and what it should bring.

    Attributes:
        front: Proposed tokens of a window that nothing flies ahead of.
        width: Proposed tokens of one that flies behind others.
        depth: Windows under way that keep the ring full.
        tokens_per_s: Expected.
    """

    front: int
    width: int
    depth: int
    tokens_per_s: float


def best_rate(
    timing: Timing, acceptance: float, *, max_width: int, max_depth: int, token_ms: float = 0.0
) -> WindowPlanRate:
    """The widths with the most expected tokens per second.

    Args:
        timing: What is known of the ring; nothing known gives a moderate guess.
        acceptance: Chance of each proposed token, in [0, 1].
        max_width: Most proposed tokens in a window.
        max_depth: Most windows under way; 1 for windows in step.
        token_ms: What a proposed token takes to come about: a draft model's are made one after the other.

    Raises:
        ValueError: If `max_width` is below 1.
    """
    network_ms = timing.network_ms
    if network_ms is None:
        return WindowPlanRate(min(4, max_width), min(4, max_width), max_depth, 0.0)
    acceptance = min(max(acceptance, 0.0), _MAX_ACCEPTANCE)
    widths = [width for width in _WIDTHS if width <= max_width]
    whole_ms = {rows: sum(timing.stages_ms(rows, is_alone=True)) for rows in [1, *(w + 1 for w in widths)]}
    best: WindowPlanRate | None = None
    for width in widths:
        crowded_ms = timing.stages_ms(width, is_alone=False)
        beat_ms = max(1e-3, *crowded_ms)
        # Fewer windows than fill the ring would leave a hole in each beat.
        num_to_fill = (network_ms + sum(crowded_ms)) / beat_ms
        depth = min(max_depth, math.ceil(_DEPTH_SLACK * num_to_fill))
        beat_ms = max(beat_ms, width * token_ms, (network_ms + sum(crowded_ms)) / max(1, depth))
        tail = 0.0 if max_depth == 1 else beat_ms / (1.0 - acceptance**width)
        for front in [0, *widths]:
            run_ms = network_ms + whole_ms[front + 1] + tail * acceptance ** (front + 1)
            num_tokens = 1.0 / (1.0 - acceptance)
            if max_depth == 1:
                num_tokens = (1.0 - acceptance ** (front + 1)) / (1.0 - acceptance)
            tokens_per_s = 1000.0 * num_tokens / run_ms
            if best is None or tokens_per_s > best.tokens_per_s * 1.005:
                best = WindowPlanRate(front, width, depth, tokens_per_s)
    if best is None:
        raise ValueError(f"max_width is {max_width}; it must be 1 or more")
    return best


# A stage that computes a row computes nothing else meanwhile, so `n` sessions that would commit tokens at the
# plain rate lose rate × the time that the row adds to a beat. While the wire is slow that is next to nothing;
# where stages have no idle time it comes near a whole token, and only what is nearly certain pays.
# A row that is wasted delays others only while it computes; part of the time the ring waits for the wire.
_SHARE_FELT: Final = 0.6
# Not even an idle ring makes a hopeless row worth its bytes, and a certain one is always worth trying.
_MIN_PRICE: Final = 0.02
_MAX_PRICE: Final = 0.95


def row_price(timing: Timing, plain_tokens_per_ms: float, *, num_rows: int, is_new_window: bool) -> float:
    """Tokens that one more row costs, from 0.02 to 0.95.

    Args:
        timing: What is known of the ring.
        plain_tokens_per_ms: What all sessions together commit without speculation.
        num_rows: Rows of the batch with the new one.
        is_new_window: Whether the row makes a batch of its own necessary: then it pays for all of that.
    """
    added_ms = row_ms(timing, 1 if is_new_window else num_rows)
    return min(max(_SHARE_FELT * plain_tokens_per_ms * added_ms, _MIN_PRICE), _MAX_PRICE)


def row_ms(timing: Timing, num_rows: int) -> float:
    """What a row adds to a batch of `num_rows` at the slowest stage; all of it, if it is the only one."""
    batch_ms = max(timing.stages_ms(num_rows, is_alone=False), default=0.0)
    if num_rows == 1:
        return batch_ms
    # The mean step: a single one is small enough to be lost in noise.
    return (batch_ms - max(timing.stages_ms(1, is_alone=False), default=0.0)) / (num_rows - 1)
