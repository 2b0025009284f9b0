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
from dataclasses import dataclass, field
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


@dataclass
class _Search:
    """Search for one number of sessions, which goes on whenever there are so many again."""

    count: int
    """The best number of groups so far."""
    is_known: bool = False
    """Whether anything was measured for it."""
    search_at_ms: float = 0.0
    """When the next search begins."""
    rest_ms: float = _FIRST_REST_MS
    """How long after a search that finds nothing better."""
    direction: int = 1
    """In which the last better number was found, 1 or -1."""
    plan: deque[int] = field(default_factory=deque)
    """Numbers of groups to measure, the current one first; empty at rest."""
    rates: list[tuple[int, float]] = field(default_factory=list)
    """Number of groups and tokens per millisecond, of the search under way."""
    settled_rate: float | None = None
    """Tokens per millisecond at rest."""
    num_tokens: int = 0
    """Tokens committed in the measurement under way."""
    elapsed_ms: float = 0.0
    """Its time so far."""


class GroupCountSearch:
    """Search of the number of groups with the most tokens per second.

    Hill climbing: the neighbours of the best number are tried in turn, each between two measurements of the
    best, and the search rests when neither is better. Each number of sessions has a search of its own, which
    goes on where it stopped when there are so many again: sessions come and go all the time. For a number
    that is new it begins at what was found for the nearest.

    Args:
        num_stages: Stages of the pipeline: with fewer groups than these some would always be idle if stages
            had processors of their own, so the search begins there.
        clock_ms: Monotonic clock, milliseconds.
    """

    def __init__(self, num_stages: int, clock_ms: Callable[[], float]) -> None:
        self._clock_ms = clock_ms
        self._num_stages = num_stages
        self._searches: dict[int, _Search] = {}
        self._num_sessions = 1
        self._search = self._search_for(1)
        self._round_trip_ms = 0.0
        # Up to when everything was counted; while groups settle it is ahead of the clock.
        self._from_ms = clock_ms()

    @property
    def count(self) -> int:
        """Number of groups to use now."""
        search = self._search
        return search.plan[0] if search.plan else search.count

    @property
    def is_searching(self) -> bool:
        """Whether other numbers are being tried."""
        return bool(self._search.plan)

    @property
    def found(self) -> dict[int, int]:
        """Best number of groups for each number of sessions whose search is at rest."""
        return {
            number: search.count
            for number, search in sorted(self._searches.items())
            if search.is_known and not search.plan
        }

    def set_num_sessions(self, num_sessions: int) -> None:
        """Set the number of sessions that decode."""
        num_sessions = max(1, num_sessions)
        if num_sessions != self._num_sessions:
            self._add_time(self._clock_ms())
            self._num_sessions = num_sessions
            self._search = self._search_for(num_sessions)
            self._settle()

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
        search = self._search
        if now_ms < self._from_ms or len(group_counts(self._num_sessions)) == 1:
            return False
        search.num_tokens += num_tokens
        self._add_time(now_ms)
        length_ms = max(_SPAN_MS, _SPAN_ROUND_TRIPS * round_trip_ms)
        if search.elapsed_ms < length_ms and not _is_hopeless(search, length_ms):
            return False
        before = self.count
        rate = search.num_tokens / search.elapsed_ms
        search.num_tokens, search.elapsed_ms = 0, 0.0
        self._measured(search, rate, now_ms)
        if self.count == before:
            return False
        self._settle()
        return True

    def _add_time(self, now_ms: float) -> None:
        self._search.elapsed_ms += max(0.0, now_ms - self._from_ms)
        self._from_ms = max(self._from_ms, now_ms)

    def _settle(self) -> None:
        """Count nothing until all sessions travel in their new groups."""
        self._from_ms = self._clock_ms() + _SETTLE_ROUND_TRIPS * self._round_trip_ms

    def _search_for(self, num_sessions: int) -> _Search:
        search = self._searches.get(num_sessions)
        if search is None:
            known = [number for number, found in self._searches.items() if found.is_known]
            nearest = min(known, key=lambda number: abs(number - num_sessions), default=None)
            count = self._num_stages if nearest is None else self._searches[nearest].count
            # Of numbers with the same size of the largest group the least: fewer, fuller messages.
            count = max(each for each in group_counts(num_sessions) if each <= max(1, count))
            search = self._searches[num_sessions] = _Search(count)
        return search

    def _measured(self, search: _Search, rate: float, now_ms: float) -> None:
        if search.plan:
            count = search.plan.popleft()
            if len(search.rates) % 2 and rate < _HOPELESS * search.rates[-1][1]:
                # No further trial of it.
                search.plan = deque(each for each in search.plan if each != count)
                while len(search.plan) > 1 and search.plan[0] == search.plan[1]:
                    search.plan.popleft()
            search.rates.append((count, rate))
            if not search.plan:
                self._decide(search, now_ms)
            return
        settled = search.settled_rate
        if settled is None:
            search.settled_rate = rate
        elif abs(rate - settled) > _CHANGED * settled:
            search.search_at_ms, search.rest_ms = now_ms, _FIRST_REST_MS
            search.settled_rate = rate
        else:
            search.settled_rate = settled + (rate - settled) / 8
        if now_ms >= search.search_at_ms:
            self._begin(search)

    def _begin(self, search: _Search) -> None:
        """Plan trials of the best number's neighbours, each between two measurements of the best."""
        counts = group_counts(self._num_sessions)
        search.rates.clear()
        index = counts.index(search.count)
        neighbours = [
            counts[index + step]
            for step in (search.direction, -search.direction)
            if 0 <= index + step < len(counts)
        ]
        search.plan.append(search.count)
        for neighbour in neighbours:
            search.plan += (neighbour, search.count) * _NUM_TRIALS

    def _decide(self, search: _Search, now_ms: float) -> None:
        best = search.rates[0][0]
        gains: defaultdict[int, list[float]] = defaultdict(list)
        for (_, before), (count, rate), (_, after) in zip(
            *(search.rates[start::2] for start in range(3)), strict=False
        ):
            gains[count].append(2 * rate / max(before + after, 1e-9))
        found = max(gains, key=lambda count: min(gains[count]), default=best)
        if not gains or min(gains[found]) < _BETTER:
            found = best
        search.settled_rate = None
        search.count, search.is_known = found, True
        if found == best:
            search.search_at_ms = now_ms + search.rest_ms
            search.rest_ms = min(2 * search.rest_ms, _LONGEST_REST_MS)
            return
        search.direction = 1 if found > best else -1
        self._begin(search)


@functools.cache
def group_counts(num_sessions: int) -> tuple[int, ...]:
    """Numbers of groups worth trying, ascending: the least one for each size of the largest group."""
    counts: dict[int, int] = {}
    for count in range(1, max(1, num_sessions) + 1):
        counts.setdefault(-(-num_sessions // count), count)
    return tuple(sorted(counts.values()))


def _is_hopeless(search: _Search, length_ms: float) -> bool:
    """Whether the number that is tried is so much worse that a part of its time is enough."""
    if not search.plan or len(search.rates) % 2 == 0 or search.elapsed_ms < _SHORTEST_TRIAL * length_ms:
        return False
    return search.num_tokens < _HOPELESS * search.rates[-1][1] * search.elapsed_ms
