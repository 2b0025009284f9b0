"""Number of groups, by the throughput that was measured with it.

Larger groups make better batches, where a stage computes several rows in the time of one; more groups keep
more stages, and the wires between them, busy. Which counts more depends on the kernels, on the wires and on
whether stages share processors. No clock of a stage tells the latter, so the rate of committed tokens
decides: a neighbouring number of groups is tried for a while, between two measurements of the best one so
far.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

# Another number of groups must be better by this factor in each of its trials: rates of the same number
# differ by several percent from second to second.
_BETTER: Final = 1.02
_NUM_TRIALS: Final = 2
_SPAN_MS: Final = 1000.0
_SPAN_ROUND_TRIPS: Final = 12
# Round trips after a change until all sessions travel in their new groups.
_SETTLE_ROUND_TRIPS: Final = 2
# After a search that found nothing better, the next one begins after this time; it doubles with each.
_FIRST_REST_MS: Final = 15_000.0
_LONGEST_REST_MS: Final = 240_000.0
# A rate that changes by more than this share begins a search at once.
_CHANGED: Final = 0.25
# A trial that is worse than this share of the best ends after this part of its time.
_HOPELESS: Final = 0.85
_SHORTEST_TRIAL: Final = 0.3


@functools.cache
def group_counts(num_sessions: int) -> tuple[int, ...]:
    """Numbers of groups worth trying, ascending: the least one for each size of the largest group."""
    counts: dict[int, int] = {}
    for count in range(1, max(1, num_sessions) + 1):
        counts.setdefault(-(-num_sessions // count), count)
    return tuple(sorted(counts.values()))


@dataclass
class _Found:
    """Result of the searches for one number of sessions.

    Attributes:
        count: The best number of groups.
        search_at_ms: When the next search begins.
        rest_ms: How long after a search that finds nothing better.
    """

    count: int
    search_at_ms: float
    rest_ms: float = _FIRST_REST_MS


@dataclass
class _Span:
    """A measurement under way.

    Attributes:
        count: Number of groups.
        from_ms: When it begins: behind the time in which groups settle.
        num_tokens: Tokens committed since.
    """

    count: int
    from_ms: float
    num_tokens: int = 0


class GroupCountSearch:
    """Search of the number of groups with the most tokens per second.

    Hill climbing: the neighbours of the best number are tried in turn, each between two measurements of the
    best, and the search rests when neither is better. What was found is remembered for each number of
    sessions; for one that is new the search begins at what was found for the nearest.

    Args:
        num_stages: Stages of the pipeline: with fewer groups than these some would always be idle if stages
            had processors of their own, so the search begins there.
        clock_ms: Monotonic clock, milliseconds.
    """

    def __init__(self, num_stages: int, clock_ms: Callable[[], float]) -> None:
        self._clock_ms = clock_ms
        self._num_stages = num_stages
        self._found: dict[int, _Found] = {}
        self._num_sessions = 1
        self._round_trip_ms = 0.0
        self._plan: deque[int] = deque()
        self._rates: list[tuple[int, float]] = []
        self._settled_rate: float | None = None
        self._direction = 1
        self._span = _Span(self.count, clock_ms())

    @property
    def count(self) -> int:
        """Number of groups to use now."""
        return min(self._plan[0], self._num_sessions) if self._plan else self._best

    @property
    def is_searching(self) -> bool:
        """Whether other numbers are being tried."""
        return bool(self._plan)

    def set_num_sessions(self, num_sessions: int) -> None:
        """Set the number of sessions that decode."""
        num_sessions = max(1, num_sessions)
        if num_sessions == self._num_sessions:
            return
        self._num_sessions = num_sessions
        # What was measured with another number does not count.
        self._plan.clear()
        self._rates.clear()
        self._settled_rate = None
        self._begin_span()

    def landed(self, num_tokens: int, round_trip_ms: float) -> bool:
        """Count a verdict.

        Args:
            num_tokens: Tokens that it commits.
            round_trip_ms: Smoothed time from a departure to its verdict.

        Returns:
            Whether the number of groups changed.
        """
        now_ms = self._clock_ms()
        self._round_trip_ms = round_trip_ms
        span = self._span
        if now_ms < span.from_ms or len(group_counts(self._num_sessions)) == 1:
            return False
        span.num_tokens += num_tokens
        elapsed_ms = now_ms - span.from_ms
        length_ms = max(_SPAN_MS, _SPAN_ROUND_TRIPS * round_trip_ms)
        if elapsed_ms < length_ms and not self._is_hopeless(span.num_tokens, elapsed_ms, length_ms):
            return False
        before = self.count
        self._measured(span.count, span.num_tokens / elapsed_ms, now_ms)
        self._begin_span()
        return self.count != before

    def _is_hopeless(self, num_tokens: int, elapsed_ms: float, length_ms: float) -> bool:
        """Whether the number that is tried is so much worse that a part of its time is enough."""
        if not self._plan or len(self._rates) % 2 == 0 or elapsed_ms < _SHORTEST_TRIAL * length_ms:
            return False
        return num_tokens < _HOPELESS * self._rates[-1][1] * elapsed_ms

    def _measured(self, count: int, rate: float, now_ms: float) -> None:
        if self._plan:
            self._plan.popleft()
            if len(self._rates) % 2 and rate < _HOPELESS * self._rates[-1][1]:
                # No further trial of it.
                self._plan = deque(each for each in self._plan if each != count)
                while len(self._plan) > 1 and self._plan[0] == self._plan[1]:
                    self._plan.popleft()
            self._rates.append((count, rate))
            if not self._plan:
                self._decide(now_ms)
            return
        found = self._found.setdefault(self._num_sessions, _Found(self._best, now_ms))
        settled = self._settled_rate
        if settled is None:
            self._settled_rate = rate
        elif abs(rate - settled) > _CHANGED * settled:
            found.search_at_ms, found.rest_ms = now_ms, _FIRST_REST_MS
            self._settled_rate = rate
        else:
            self._settled_rate = settled + (rate - settled) / 8
        if now_ms >= found.search_at_ms:
            self._search()

    def _search(self) -> None:
        """Plan a trial of the next neighbour, between two measurements of the best."""
        counts = group_counts(self._num_sessions)
        best = self._best
        self._rates.clear()
        index = counts.index(best)
        neighbours = [
            counts[index + step]
            for step in (self._direction, -self._direction)
            if 0 <= index + step < len(counts)
        ]
        self._plan.append(best)
        for neighbour in neighbours:
            self._plan += (neighbour, best) * _NUM_TRIALS

    def _decide(self, now_ms: float) -> None:
        best = self._rates[0][0]
        gains: defaultdict[int, list[float]] = defaultdict(list)
        for (_, before), (count, rate), (_, after) in zip(
            *(self._rates[start::2] for start in range(3)), strict=False
        ):
            gains[count].append(2 * rate / max(before + after, 1e-9))
        found = max(gains, key=lambda count: min(gains[count]), default=best)
        if not gains or min(gains[found]) < _BETTER:
            found = best
        self._settled_rate = None
        known = self._found[self._num_sessions]
        known.count = found
        if found == best:
            known.search_at_ms = now_ms + known.rest_ms
            known.rest_ms = min(2 * known.rest_ms, _LONGEST_REST_MS)
            return
        self._direction = 1 if found > best else -1
        self._search()

    def _begin_span(self) -> None:
        settle_ms = _SETTLE_ROUND_TRIPS * self._round_trip_ms
        self._span = _Span(self.count, self._clock_ms() + settle_ms)

    @property
    def _best(self) -> int:
        """The number that was found for so many sessions, or for the nearest, in `group_counts`."""
        nearest = min(self._found, key=lambda known: abs(known - self._num_sessions), default=None)
        count = self._num_stages if nearest is None else self._found[nearest].count
        # Of numbers with the same size of the largest group the least: fewer, fuller messages.
        return max(each for each in group_counts(self._num_sessions) if each <= max(1, count))
