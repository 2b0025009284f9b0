"""Replay of sessions in a new ring: order, and trial of sessions suspected of a crash."""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import structlog

from mesh.coordinator.crash_suspects import crash_suspect
from spanmesh_proto.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from mesh.coordinator.ring import RingLoss
    from mesh.coordinator.session import Session

log = structlog.get_logger()

Replayed = TypeVar("Replayed")


class ReplayOrder(Generic[Replayed]):
    """Order of replays: each session begins when the one before it has sent all that it replays.

    The pipeline stays full, and no chunk of a later session comes between those of an earlier one. Sessions
    with the least to compute come first, which keeps most pauses short (shortest processing time first: Smith
    1956).

    Args:
        sessions: Sessions in that order.
        begin: Begins a session; its second argument is to be called when the session has sent all, or ended.
        on_end: Called after the last one.
    """

    def __init__(
        self,
        sessions: Iterable[Replayed],
        begin: Callable[[Replayed, Callable[[], None]], None],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._waiting = deque(sessions)
        self._begin = begin
        self._on_end = on_end
        self._is_going = False
        self._is_busy = False

    def go_on(self) -> None:
        """Begin the next session, and those after it for as long as each has sent all at once."""
        self._is_busy = False
        if self._is_going:
            return
        self._is_going = True
        try:
            while self._waiting and not self._is_busy:
                self._is_busy = True
                self._begin(self._waiting.popleft(), self.go_on)
        finally:
            self._is_going = False
        if not self._is_busy:
            self._on_end()

    def drop(self) -> None:
        """Begin no further session: the ring broke again."""
        self._waiting.clear()


class Replay(Protocol):
    """Replays a session in the new ring; see `Session.replay`."""

    def __call__(
        self, session: Session, on_replayed: Callable[[], None], *, is_suspect: bool = False
    ) -> None:
        """Replay a session, and call `on_replayed` when the next one may begin."""


class SessionReplayer:
    """Replay of all sessions: those on trial first, one by one, then the others.

    Args:
        sessions: All sessions, suspended.
        replay: Begins the replay of one.
        on_tried: Called when those on trial have passed or ended: new sessions may begin.
    """

    def __init__(self, sessions: Collection[Session], replay: Replay, on_tried: Callable[[], None]) -> None:
        in_order = sorted(sessions, key=lambda session: session.num_to_compute)
        self._suspects = [each for each in in_order if each.crash_history.is_suspect and not each.is_over]
        self._others = ReplayOrder((each for each in in_order if each not in self._suspects), replay)
        self._suspect_order = ReplayOrder(
            self._suspects, functools.partial(replay, is_suspect=True), on_end=self._clear_suspects
        )
        self._on_tried = on_tried

    def start(self) -> None:
        """Begin the first replay."""
        if self._suspects:
            log.warning("sessions_on_trial", sessions=[session.id for session in self._suspects])
        self._suspect_order.go_on()

    def drop(self) -> None:
        """Begin no further replay: the ring broke again."""
        self._suspect_order.drop()
        self._others.drop()

    def _clear_suspects(self) -> None:
        for session in self._suspects:
            session.clear_suspicion()
        self._others.go_on()
        self._on_tried()


def attribute_crash(sessions: Collection[Session], loss: RingLoss | None, most_crashes: int) -> None:
    """Count a crash for sessions with windows in flight, and end the session that must have caused it.

    Args:
        sessions: All sessions, suspended.
        loss: Loss of the old ring; None if it was not lost.
        most_crashes: See `crash_suspect`.
    """
    if loss is None or not loss.is_crash:
        return
    under_way = [session for session in sessions if session.was_under_way and not session.is_over]
    for session in under_way:
        session.crash_history.add(session.num_to_compute, is_alone=len(under_way) == 1)
    guilty = crash_suspect([session.crash_history for session in under_way], most_crashes)
    for session in under_way:
        if session.crash_history is guilty:
            log.error("session_crashes_stages", session=session.id, position=guilty.position)
            session.fail(
                StageFailed(
                    f"a stage crashed again at token {guilty.position} of this request, alone in the ring: "
                    f"{loss.reason}; it is not retried"
                )
            )
