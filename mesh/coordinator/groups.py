"""Groups of decoding sessions over one ring: how many there are, and when the windows of each leave.

Sessions are divided into groups of neighbouring slots, like the micro-batches of GPipe (Huang et al. 2019).
The windows of a group leave in one message, share batches as far as stages can compute them together, and
come back together, so that a group stays together by itself. A session that is late joins its group again at
the next departure.

Larger groups make better batches, where a stage computes several rows in the time of one; more groups keep
more stages, and the wires between them, busy. Which counts more depends on the kernels, on the wires and on
whether stages share processors. No clock of a stage tells the latter, so the rate of committed tokens
decides: a neighbouring number of groups is tried for a while, between two measurements of the best one so
far.
"""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import structlog

from spanmesh_proto.errors import StageFailed
from speculative.cost_model import smoothed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from spanmesh_proto import windows_pb2 as wire
    from spanmesh_proto.errors import MeshError

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
# Round trip before one was measured.
_UNMEASURED_MS: Final = 50.0
log = structlog.get_logger()


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


@dataclass
class _Member:
    """A session of a group."""

    slot: int
    """Its slot at every stage."""
    waits_since_ms: float | None = None
    """Since when its next window waits for the group; None if none waits."""
    is_out: bool = False
    """Whether its only window is in flight."""


class GroupDepartures:
    """Membership of sessions in groups, and the times at which a group's windows leave.

    A group leaves once no window of its sessions is in flight. Where most of its windows wait, they wait for
    the others for one group time at most: the round trip divided by the number of groups. A minority, such as
    a session that has just missed its group, waits for the others for one round trip at most.

    A session with further windows in flight is not waited for.
    """

    def __init__(self) -> None:
        self._members: dict[int, _Member] = {}
        self._num_groups = 1
        self._groups: list[list[int]] | None = None

    @property
    def groups(self) -> list[list[int]]:
        """Sessions of each group, in the order of their slots; sizes differ by one at most."""
        if self._groups is None:
            sessions = sorted(self._members, key=lambda session: self._members[session].slot)
            num_groups = max(1, min(self._num_groups, len(sessions)))
            bounds = [index * len(sessions) // num_groups for index in range(num_groups + 1)]
            self._groups = [sessions[start:stop] for start, stop in pairwise(bounds)]
        return self._groups

    def __len__(self) -> int:
        """Number of sessions."""
        return len(self._members)

    def __contains__(self, session: int) -> bool:
        return session in self._members

    def set_num_groups(self, num_groups: int) -> None:
        """Divide the sessions anew."""
        if num_groups != self._num_groups:
            self._num_groups = num_groups
            self._groups = None

    def join(self, session: int, slot: int) -> None:
        """Add a session."""
        self._members[session] = _Member(slot)
        self._groups = None

    def leave(self, session: int) -> None:
        """Remove a session, if it is there."""
        if self._members.pop(session, None) is not None:
            self._groups = None

    def is_alone(self, session: int) -> bool:
        """Whether no other session is in its group, or it is in none."""
        if session not in self._members or len(self._members) == 1:
            return True
        if self._num_groups < len(self._members):
            return any(group == [session] for group in self.groups)
        return True

    def wait(self, session: int, now_ms: float) -> None:
        """Note that the next window of a session is ready to leave."""
        member = self._members[session]
        if member.waits_since_ms is None:
            member.waits_since_ms = now_ms

    def left(self, sessions: Iterable[int]) -> None:
        """Note that the windows of these sessions left; those that are in no group are ignored."""
        for session in sessions:
            if (member := self._members.get(session)) is not None:
                member.waits_since_ms, member.is_out = None, True

    def landed(self, session: int) -> None:
        """Note a verdict on a window of a session."""
        if (member := self._members.get(session)) is not None:
            member.is_out = False

    def due(self, now_ms: float, round_trip_ms: float) -> list[list[int]]:
        """Sessions of each group whose windows leave now.

        Args:
            now_ms: Time.
            round_trip_ms: Time from the departure of a window to its verdict.
        """
        return [
            [session for session in group if self._members[session].waits_since_ms is not None]
            for group in self.groups
            if (deadline_ms := self._deadline_ms(group, round_trip_ms)) is not None and deadline_ms <= now_ms
        ]

    def next_ms(self, round_trip_ms: float) -> float | None:
        """Time at which the next group leaves at the latest; None if no window waits."""
        deadlines_ms = [self._deadline_ms(group, round_trip_ms) for group in self.groups]
        return min((each_ms for each_ms in deadlines_ms if each_ms is not None), default=None)

    def _deadline_ms(self, group: list[int], round_trip_ms: float) -> float | None:
        members = [self._members[session] for session in group]
        waiting_ms = [each.waits_since_ms for each in members if each.waits_since_ms is not None]
        if not waiting_ms:
            return None
        num_out = sum(each.is_out for each in members)
        if not num_out:
            return min(waiting_ms)
        patience_ms = round_trip_ms
        if len(waiting_ms) >= num_out:
            patience_ms /= len(self.groups)
        return min(waiting_ms) + patience_ms


@dataclass
class _Held:
    """Windows of one session that wait for their group."""

    windows: list[wire.Window]
    """In order."""
    on_left: Callable[[float], None]
    """Called when they leave, with the time."""


class WindowGroups:
    """Sends windows of decoding sessions, those of a group in one message.

    A session's next window is held while windows of its group are in flight; see `GroupDepartures`. Windows
    of sessions in no group, such as prefill chunks, and those that a session sends while others of its own
    are in flight, leave at once. Windows of one session always leave in order.

    Args:
        num_stages: Stages of the pipeline.
        send: Sends windows to the first stage in one message, where they share a batch.
        clock_ms: Monotonic clock, milliseconds.
        num_groups: Fixed number of groups; None to find the best one.
        on_failed: Called with an error because of which windows that are held may never leave.
    """

    def __init__(
        self,
        num_stages: int,
        send: Callable[[Sequence[wire.Window]], None],
        *,
        clock_ms: Callable[[], float],
        num_groups: int | None = None,
        on_failed: Callable[[MeshError], None] = lambda _reason: None,
    ) -> None:
        self._on_failed = on_failed
        self._send = send
        self._clock_ms = clock_ms
        self._departures = GroupDepartures()
        self._search = None if num_groups else GroupCountSearch(num_stages, clock_ms)
        self._held: dict[int, _Held] = {}
        self._ahead: list[wire.Window] = []
        self._left_ms: dict[int, float] = {}
        self._round_trip_ms: float | None = None
        self._is_check_due = False
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._departures.set_num_groups(num_groups or num_stages)

    def join(self, session: int, slot: int) -> None:
        """Add a session that begins to decode."""
        self._departures.join(session, slot)
        self._members_changed()

    def leave(self, session: int) -> None:
        """Remove a session; windows of it that have not left never do."""
        self._departures.leave(session)
        self._held.pop(session, None)
        self._ahead = [window for window in self._ahead if window.session != session]
        self._left_ms.pop(session, None)
        self._members_changed()

    def send(
        self,
        session: int,
        windows: Sequence[wire.Window],
        *,
        is_first: bool,
        on_left: Callable[[float], None],
    ) -> bool:
        """Send windows of a session, now or with its group.

        Args:
            session: Its id.
            windows: In order.
            is_first: Whether no window of the session is in flight.
            on_left: Called with the time, in milliseconds, when windows leave that are held.

        Returns:
            Whether they leave now.
        """
        if self._is_closed:
            return False
        if session in self._held:
            self._held[session].windows += windows
            return False
        if self._departures.is_alone(session) and not self._is_ahead(session):
            self._send(windows)
            if is_first and session in self._departures:
                self._departures.left([session])
                self._left_ms[session] = self._clock_ms()
            return True
        if is_first:
            self._departures.wait(session, self._clock_ms())
            self._held[session] = _Held(list(windows), on_left)
            self._check_soon()
            return False
        # With those that other sessions send in this turn of the event loop.
        self._ahead += windows
        self._check_soon()
        return True

    def _is_ahead(self, session: int) -> bool:
        """Whether windows of the session leave at the end of this turn; later ones must not overtake them."""
        return any(window.session == session for window in self._ahead)

    def landed(self, session: int, num_tokens: int) -> None:
        """Note a verdict.

        Args:
            session: Its session.
            num_tokens: Tokens that it commits.
        """
        self._departures.landed(session)
        if (left_ms := self._left_ms.pop(session, None)) is not None:
            self._round_trip_ms = smoothed(self._round_trip_ms, self._clock_ms() - left_ms)
        search = self._search
        if search is not None and search.landed(num_tokens, self._patience_ms):
            self._departures.set_num_groups(search.count)
        if self._held:
            self._check_soon()

    @property
    def sizes(self) -> list[int]:
        """Sessions of each group."""
        return [len(group) for group in self._departures.groups if group]

    @property
    def found(self) -> dict[int, int]:
        """Best number of groups for each number of sessions, as far as it was found."""
        return {} if self._search is None else self._search.found

    @property
    def _patience_ms(self) -> float:
        return _UNMEASURED_MS if self._round_trip_ms is None else self._round_trip_ms

    def _members_changed(self) -> None:
        if self._search is not None:
            self._search.set_num_sessions(len(self._departures))
            self._departures.set_num_groups(self._search.count)
        if self._held:
            self._check_soon()

    def _check_soon(self) -> None:
        """Look for groups that leave, once all verdicts of a message have been taken."""
        if not self._is_check_due:
            self._is_check_due = True
            asyncio.get_running_loop().call_soon(self._check)

    def _check(self) -> None:
        self._is_check_due = False
        if self._is_closed:
            return
        try:
            self._let_leave()
        except Exception as error:
            log.exception("groups_failed")
            self._on_failed(StageFailed(f"the coordinator failed to send windows: {error!r}"))

    def _let_leave(self) -> None:
        """Send what is due, and look again when the next group leaves at the latest."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_ms = self._clock_ms()
        if self._ahead:
            ahead, self._ahead = self._ahead, []
            self._send(ahead)
        for group in self._departures.due(now_ms, self._patience_ms):
            self._departures.left(group)
            self._left_ms.update(dict.fromkeys(group, now_ms))
            leaving = [self._held.pop(session) for session in group]
            self._send([window for held in leaving for window in held.windows])
            for held in leaving:
                held.on_left(now_ms)
        next_ms = self._departures.next_ms(self._patience_ms)
        if next_ms is not None:
            delay_s = max(0.0, next_ms - now_ms) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._check)

    def close(self) -> None:
        """Hold nothing any more, and send none of what was held."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._held.clear()
        self._ahead.clear()


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
