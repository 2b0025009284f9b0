"""Departures of groups: which sessions' windows leave together, and when.

Sessions are divided into groups of neighbouring slots, like the micro-batches of GPipe (Huang et al. 2019).
The windows of a group leave in one message, share batches as far as stages can compute them together, and
come back together, so that a group stays together by itself. A session that is late joins its group again at
the next departure.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


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
