"""Cost model of speculation: times of batches and of the ring, best widths, and the price of a row."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from speculative.acceptance import WindowOutcome

# Share of one row's time for each further row, while only one row count was measured: between a GPU (nearly
# nothing) and a CPU (nearly all of it), so that wider windows are tried once and then known.
_UNKNOWN_SLOPE: Final = 0.5
# Factor of the slope between known row counts, beyond the last.
_HOPE: Final = 0.8
_NEWEST_WEIGHT: Final = 0.125
# A sample this many times off was disturbed by another process; it counts as no further off.
_MAX_SURPRISE: Final = 2.0
# Reading the cache is shared by the rows of a batch, computing is not: the first row takes as much of a
# position as so many further ones (on a processor 3.8 and 1.2 µs with SmolLM2 in f16).
_FIRST_ROW: Final = 3.0
# Positions that differ by less than this, in tokens, say little about what a position takes.
_NEAR_TOKENS: Final = 64.0
# Number of batches that the slope remembers.
_SLOPE_MEMORY: Final = 512
# Least share of a mean that remains where few positions are cached.
_LEAST_SHARE: Final = 0.1
# A server answers short and long texts. Compared with the time of short texts, all windows of a long one
# would seem slow, and speculation would be blamed.
_QUICKER_WEIGHT: Final = 0.3
_SLOWER_WEIGHT: Final = 0.06
# Largest share of a window's time that depends on its position.
_MAX_SHARE: Final = 0.9
_WIDTHS: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
# Avoids infinite runs: answers are finite.
_MAX_ACCEPTANCE: Final = 0.99
# Windows in flight for each that would fill the ring if all beats were equal. They are not: stages that share
# cores are irregular, and a late window must not leave the next stage idle. Waiting windows are soon
# cancelled.
_DEPTH_SLACK: Final = 3.0
_SHARE_FELT: Final = 0.6
# Even in an idle ring a hopeless row does not pay, and a certain one always does.
_MIN_PRICE: Final = 0.02
_MAX_PRICE: Final = 0.95


@dataclass
class _Mean:
    """Running means of batches with one number of rows."""

    elapsed_ms: float
    """Of their times."""
    load: float
    """Of their loads, see `BatchTimeModel`."""


class BatchTimeModel:
    """t(k, p): milliseconds of a batch of `k` rows, each of which attends to `p` positions or so.

    Each row count has a running mean: kernels work in tiles, so there are steps. Attention adds a slope times
    the load, `p` times the rows' weights; it is learned from batches of equally many rows at different
    positions, so that the steps do not count as a part of it. Between known row counts the time is
    interpolated. Beyond the last it continues a little flatter than the last slope and than the mean one,
    since a single one may be noise: the optimism lets wider windows be tried once. It never falls as rows
    are added.
    """

    def __init__(self) -> None:
        self._means: dict[int, _Mean] = {}
        self._known: list[int] = []
        self._num_added = 0
        self._slope_ms = 0.0
        self._covariance = 0.0
        self._variance = 0.0
        # For one position, since plans ask for many row counts.
        self._stairs: list[tuple[int, float]] = []
        self._stairs_position: float | None = None

    @property
    def num_known(self) -> int:
        """Number of measured row counts."""
        return len(self._means)

    def add(self, num_rows: int, elapsed_ms: float, position: float = 0.0) -> None:
        """Record a batch.

        Args:
            num_rows: Its rows.
            elapsed_ms: Its time.
            position: Positions that a row attended to.
        """
        self._stairs_position = None
        self._num_added += 1
        load = _load(num_rows, position)
        mean = self._means.get(num_rows)
        if mean is None:
            self._means[num_rows] = _Mean(elapsed_ms, load)
            self._known = sorted(self._means)
            return
        expected_ms = self._at(mean, load)
        if abs(load - mean.load) > _load(num_rows, _NEAR_TOKENS):
            # What a far position takes may be many times as much, and is no disturbance.
            self._learn_slope(load - mean.load, elapsed_ms - mean.elapsed_ms)
            expected_ms = self._at(mean, load)
        off_ms = smoothed(expected_ms, elapsed_ms) - expected_ms
        mean.load += _NEWEST_WEIGHT * (load - mean.load)
        mean.elapsed_ms += off_ms + _NEWEST_WEIGHT * (expected_ms - mean.elapsed_ms)

    def ms(self, num_rows: float, position: float = 0.0) -> float | None:
        """Time of a batch of this many rows at a position; None before the first measurement."""
        stairs = self._stairs_at(position)
        if not stairs:
            return None
        if len(stairs) == 1 or num_rows < stairs[0][0]:
            rows, height_ms = stairs[0]
            return height_ms * _typical(num_rows) / _typical(rows)
        for (left, left_ms), (right, right_ms) in pairwise(stairs):
            if num_rows <= right:
                return left_ms + (right_ms - left_ms) * (num_rows - left) / (right - left)
        first, first_ms = stairs[0]
        slope_ms = min((right_ms - left_ms) / (right - left), (right_ms - first_ms) / (right - first))
        return right_ms + _HOPE * slope_ms * (num_rows - right)

    def _stairs_at(self, position: float) -> list[tuple[int, float]]:
        if self._stairs_position != position:
            self._stairs, self._stairs_position = [], position
            highest_ms = 0.0
            for rows in self._known:
                highest_ms = max(highest_ms, self._at(self._means[rows], _load(rows, position)))
                self._stairs.append((rows, highest_ms))
        return self._stairs

    def _at(self, mean: _Mean, load: float) -> float:
        elapsed_ms = mean.elapsed_ms + self._slope_ms * (load - mean.load)
        return max(elapsed_ms, _LEAST_SHARE * mean.elapsed_ms)

    def _learn_slope(self, off_load: float, off_ms: float) -> None:
        weight = 1.0 / min(self._num_added, _SLOPE_MEMORY)
        self._covariance += weight * (off_load * off_ms - self._covariance)
        self._variance += weight * (off_load**2 - self._variance)
        self._slope_ms = max(0.0, self._covariance / (self._variance + _NEAR_TOKENS**2))


@dataclass(frozen=True)
class DraftCost:
    """Measured cost of a drafter."""

    ms_per_token: float
    """Time of a drafted token, in ms; of a block, its time divided by its tokens."""
    tokens_per_pass: float = 1.0
    """Tokens of a block, in the mean; 1 where each token takes a pass of its own."""
    row_ms: float | None = None
    """Time that one more token adds to a block, or to a draft of the last stage; None for others."""
    is_at_tail: bool = False
    """Whether the last stage drafts, which computes no window meanwhile."""


class Timing:
    """Times of the ring, in milliseconds.

    Stages that share cores, with each other or with a draft model, compute more slowly while several compute.
    So batch times of a stage are kept twice: of windows alone in the ring, and of windows among others.

    Attributes:
        draft_ms_per_token: Time of the draft model per token; None without one.
        draft_row_ms: See `DraftCost.row_ms`.
        drafts_at_tail: See `DraftCost.is_at_tail`.
        network_ms: Part of a round trip beyond the stages' times: hops, and event loops; None before the
            first verdict.
        num_measured: Number of recorded windows.
    """

    def __init__(self) -> None:
        self.draft_ms_per_token: float | None = None
        self.draft_row_ms: float | None = None
        self.drafts_at_tail = False
        self.forget_ring()

    def forget_ring(self) -> None:
        """Start anew, for a ring of other stages."""
        self.network_ms: float | None = None
        self.num_measured = 0
        self._alone: list[BatchTimeModel] = []
        self._crowded: list[BatchTimeModel] = []
        self._contention = 1.0

    @property
    def contention(self) -> float:
        """Factor of the stages' times while windows are in flight together: 1 where each has its own core."""
        return self._contention

    def add(self, outcome: WindowOutcome, *, is_alone: bool) -> None:
        """Record a judged window.

        Args:
            outcome: Without measures it has no effect.
            is_alone: Whether no other window of its session was in flight meanwhile.
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
        self.network_ms = smoothed(self.network_ms, network_ms)
        tables = self._alone if is_alone else self._crowded
        for table, stage in zip(tables, stages, strict=False):
            table.add(stage.num_rows, stage.compute_ms, outcome.position)
        if not is_alone:
            self._note_contention(outcome)

    def stages_ms(self, num_rows: float, *, is_alone: bool, position: float = 0.0) -> tuple[float, ...]:
        """Time of each stage for `num_rows` rows at a position; empty before the first verdict."""
        times = []
        for alone, crowded in zip(self._alone, self._crowded, strict=True):
            own, other = (alone, crowded) if is_alone else (crowded, alone)
            factor = 1.0 / self._contention if is_alone else self._contention
            # A single row count has no slope: the shape of the other table is better than none.
            if own.num_known > 1 or not other.num_known:
                known_ms = own.ms(num_rows, position)
            else:
                other_ms = other.ms(num_rows, position)
                known_ms = None if other_ms is None else other_ms * factor
            times.append(known_ms or 0.0)
        return tuple(times)

    def note_draft_cost(self, cost: DraftCost | None) -> None:
        """Record what a session's drafter costs; None changes nothing."""
        if cost is not None:
            self.draft_ms_per_token, self.draft_row_ms = cost.ms_per_token, cost.row_ms
            self.drafts_at_tail = cost.is_at_tail

    def _note_contention(self, outcome: WindowOutcome) -> None:
        computed_ms = expected_ms = 0.0
        for table, stage in zip(self._alone, outcome.stages, strict=False):
            known_ms = table.ms(stage.num_rows, outcome.position)
            if known_ms is None or not table.num_known:
                return
            computed_ms += stage.compute_ms
            expected_ms += known_ms
        if expected_ms > 0.0:
            # Both tables have the same row counts often enough; a ratio below 1 is noise.
            self._contention = max(1.0, smoothed(self._contention, computed_ms / expected_ms))


class DecodeTimeModel:
    """Time of a plain window as a line over positions. Shared by the sessions of a coordinator.

    The slope comes from the stages' computing times, so that a change of the network is not taken for a
    longer text; the height from whole windows. Disturbances make windows slower, never faster, so fast ones
    count for more: overestimated plain windows would make speculation seem to pay where it does not.

    Attributes:
        num_measured: Number of recorded windows.
    """

    def __init__(self) -> None:
        self.num_measured = 0
        self._base_ms = 0.0
        self._slope_ms = 0.0
        # Running means of positions and computing times, and their covariance.
        self._position = 0.0
        self._computed_ms = 0.0
        self._covariance = 0.0
        self._variance = 0.0

    def add(self, position: int, elapsed_ms: float, computed_ms: float) -> None:
        """Record an undisturbed plain window.

        Args:
            position: Its position in its session's text, in tokens.
            elapsed_ms: Time from sending to verdict.
            computed_ms: Part of it that the stages computed.
        """
        self.num_measured += 1
        if self.num_measured == 1:
            self._base_ms, self._position, self._computed_ms = elapsed_ms, float(position), computed_ms
            return
        known_ms = self._base_ms + self._slope_ms * position
        self._learn_slope(position, computed_ms)
        weight = _QUICKER_WEIGHT if elapsed_ms < known_ms else _SLOWER_WEIGHT
        found_ms = smoothed(known_ms, elapsed_ms, weight)
        # A window at position 0 takes some time too, whatever the noise of the slope.
        self._slope_ms = min(self._slope_ms, _MAX_SHARE * found_ms / max(position, 1))
        # The line turns around this window's position, so that estimates near it remain.
        self._base_ms = found_ms - self._slope_ms * position

    def ms(self, position: int) -> float | None:
        """Time of a plain window at a position; None before the first measurement."""
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


@dataclass(frozen=True)
class WindowPlanRate:
    """Widths and depth of windows, and their expected rate."""

    front: int
    """Proposed tokens of a window with none in flight ahead of it."""
    width: int
    """Proposed tokens of a window behind others."""
    depth: int
    """Windows in flight that keep the ring full."""
    tokens_per_s: float
    """Expected rate."""


def _load(num_rows: float, position: float) -> float:
    """Work of attention: 1 for each position of a lone row."""
    return position * (_FIRST_ROW + num_rows - 1.0) / _FIRST_ROW


def moved(mean: float | None, newest: float, weight: float) -> float:
    """An exponentially weighted moving mean with one more value; None before the first one."""
    return newest if mean is None else mean + weight * (newest - mean)


def smoothed(mean_ms: float | None, newest_ms: float, weight: float = _NEWEST_WEIGHT) -> float:
    """A moving mean that limits the effect of a single outlier; None before the first value."""
    if mean_ms is not None:
        newest_ms = min(max(newest_ms, mean_ms / _MAX_SURPRISE), mean_ms * _MAX_SURPRISE)
    return moved(mean_ms, newest_ms, weight)


def _typical(num_rows: float) -> float:
    return 1.0 + _UNKNOWN_SLOPE * (num_rows - 1)


# A run lasts from one rejection to the next. Its first window takes a whole round trip, T; each further one
# brings its tokens a *beat* later, since it was in flight behind. With acceptance `a` per token, `front`
# proposed tokens in the first window and `width` in each other one, a run commits 1 / (1 - a) tokens and
# takes T + beat · a^(front + 1) / (1 - a^width).
#
# Several candidates per position (a tree in one batch) were evaluated by the same model and rejected. A
# second candidate helps only where the first is wrong and it is right, (1 - a)·r of the time, and then brings
# one token more than the verdict's own correction does; it costs a row always. At a = 0.8 and r = 0.5 that is
# 0.1 token for a row that costs 0.06 tokens at 20 ms one way, 0.17 at 5 ms and 0.42 at 0.1 ms (see
# `row_price`, three stages of 4.3 ms a row on two cores): five rows a run would win 0.2 of 5 tokens at best,
# and lose elsewhere.
def best_rate(
    timing: Timing,
    acceptance: float,
    *,
    max_width: int,
    max_depth: int,
    position: float = 0.0,
    token_ms: float = 0.0,
    is_recurrent: bool = False,
) -> WindowPlanRate:
    """The widths with the most expected tokens per second.

    Args:
        timing: Times of the ring; without measurements the result is a moderate guess.
        acceptance: Acceptance probability of each proposed token, in [0, 1].
        max_width: Maximum of proposed tokens in a window.
        max_depth: Most windows in flight; 1 for one at a time.
        position: Position in the session's text, in tokens.
        token_ms: Time to make a proposed token: a draft model makes them one after the other, beside the
            stages or at the last one, see `Timing.drafts_at_tail`.
        is_recurrent: Whether a rejection goes back to a checkpoint, see `mean_recomputed`.

    Raises:
        ValueError: If `max_width` is below 1.
    """
    network_ms = timing.network_ms
    if network_ms is None:
        return WindowPlanRate(min(4, max_width), min(4, max_width), max_depth, 0.0)
    acceptance = min(max(acceptance, 0.0), _MAX_ACCEPTANCE)
    widths = [width for width in _WIDTHS if width <= max_width]
    at_tail_ms = token_ms if timing.drafts_at_tail else 0.0

    @functools.cache
    def whole_ms(num_rows: float) -> float:
        return sum(timing.stages_ms(num_rows, is_alone=True, position=position))

    best: WindowPlanRate | None = None
    for width in widths:
        crowded_ms = timing.stages_ms(width, is_alone=False, position=position)
        if at_tail_ms and crowded_ms:
            crowded_ms = (*crowded_ms[:-1], crowded_ms[-1] + width * at_tail_ms)
        beat_ms = max(1e-3, *crowded_ms)
        # Fewer windows than fill the ring would leave a gap in each beat.
        num_to_fill = (network_ms + sum(crowded_ms)) / beat_ms
        depth = min(max_depth, math.ceil(_DEPTH_SLACK * num_to_fill))
        beat_ms = max(beat_ms, width * token_ms, (network_ms + sum(crowded_ms)) / max(1, depth))
        tail = 0.0 if max_depth == 1 else beat_ms / (1.0 - acceptance**width)
        for front in [0, *widths]:
            # Halves of rows, so that few times need working out.
            again = round(2 * mean_recomputed(front, width, acceptance)) / 2 if is_recurrent else 0.0
            run_ms = network_ms + whole_ms(front + 1 + again) + tail * acceptance ** (front + 1)
            run_ms += front * at_tail_ms
            num_tokens = 1.0 / (1.0 - acceptance)
            if max_depth == 1:
                num_tokens = (1.0 - acceptance ** (front + 1)) / (1.0 - acceptance)
            tokens_per_s = 1000.0 * num_tokens / run_ms
            if best is None or tokens_per_s > best.tokens_per_s * 1.005:
                best = WindowPlanRate(front, width, depth, tokens_per_s)
    if best is None:
        raise ValueError(f"max_width is {max_width}; it must be 1 or more")
    return best


@functools.lru_cache(maxsize=1 << 12)
def mean_recomputed(front: int, width: int, acceptance: float) -> float:
    """Rows that the first window of a run computes again, because a rejection ended the run before.

    A model with recurrent layers goes back to the start of the window that has the rejected token. Behind
    others a window's first token is judged by the window before it, and costs nothing.

    Args:
        front: Proposed tokens of a run's first window, which begins with a committed one.
        width: Proposed tokens of each other window.
        acceptance: Acceptance probability of each proposed token, below 1.
    """
    in_front = sum(index * acceptance ** (index - 1) for index in range(1, front + 1))
    behind = sum(index * acceptance**index for index in range(1, width)) / (1.0 - acceptance**width)
    return (1.0 - acceptance) * (in_front + acceptance**front * behind)


# While a stage computes a row it computes nothing else, so `n` sessions that would commit tokens at the plain
# rate lose rate × the time that the row adds to a beat. While the network is slow that is next to nothing;
# where stages have no idle time it comes near a whole token, and only nearly certain tokens pay. A wasted row
# delays others only while it computes; part of the time the ring waits for the network.
def row_price(
    timing: Timing,
    plain_tokens_per_ms: float,
    *,
    num_rows: int,
    is_new_window: bool,
    position: float = 0.0,
) -> float:
    """Cost of one more row in tokens, from 0.02 to 0.95.

    Args:
        timing: Times of the ring.
        plain_tokens_per_ms: Rate of all sessions together without speculation.
        num_rows: Rows of the batch with the new one.
        is_new_window: Whether the row needs a batch of its own, whose whole cost then counts.
        position: Position in the session's text, in tokens.
    """
    added_ms = row_ms(timing, 1 if is_new_window else num_rows, position)
    return min(max(_SHARE_FELT * plain_tokens_per_ms * added_ms, _MIN_PRICE), _MAX_PRICE)


def row_ms(timing: Timing, num_rows: int, position: float = 0.0) -> float:
    """Time that a row adds to a batch of `num_rows` at the slowest stage; all of it for the only one."""
    batch_ms = max(timing.stages_ms(num_rows, is_alone=False, position=position), default=0.0)
    if num_rows == 1:
        return batch_ms
    # The mean step: a single one is lost in noise.
    lone_ms = max(timing.stages_ms(1, is_alone=False, position=position), default=0.0)
    return (batch_ms - lone_ms) / (num_rows - 1)
