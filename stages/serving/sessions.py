"""Open sessions of a stage, their slots and cancelled epochs."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import InvalidWindow, UnknownSession
from spanmesh_proto.row_ids import has_rows
from stages.runtime.row_positions import TOKENS_ONLY
from stages.sampling.session_spec import NOTHING_RESUMED

if TYPE_CHECKING:
    from spanmesh_proto import windows_pb2 as wire
    from stages.runtime.row_positions import RowPositions
    from stages.sampling.session_spec import Resumed
    from stages.sampling.verifier import WindowVerifier

_NUM_CLOSED_REMEMBERED: Final = 4096


@dataclass
class StageSession:
    """An open session."""

    id: int
    """Id from the coordinator; never used twice, by no other coordinator either."""
    slot: int
    """Its sequence slot in llama.cpp."""
    verifier: WindowVerifier
    """Its verifier at the tail."""
    epoch: int = 0
    """Windows of a lower epoch are void."""
    num_resumed: int = 0
    """First positions that its slot may hold from before a recovery."""
    positions: RowPositions = TOKENS_ONLY
    """Positions of its rows."""

    def brings_rows(self, window: wire.Window) -> bool:
        """Whether a window has rows that are no tokens.

        Raises:
            InvalidWindow: If the session has tokens there, or the opposite.
        """
        has_ids = has_rows(window.tokens)
        if has_ids or self.positions is not TOKENS_ONLY:
            self.positions.check(window.start, window.tokens)
        return has_ids or bool(window.rows)


@dataclass
class SessionTable:
    """The open sessions of one stage."""

    num_slots: int
    """Number of slots."""
    _open: dict[int, StageSession] = field(default_factory=dict)
    _owner: dict[int, int] = field(default_factory=dict)
    # The latest session of each slot, also after its end.
    _latest: dict[int, int] = field(default_factory=dict)
    # Ids of closed sessions. A `Close` comes out of band and may overtake its `Open`.
    _closed: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self,
        session: int,
        slot: int,
        verifier: WindowVerifier,
        resumed: Resumed = NOTHING_RESUMED,
        positions: RowPositions = TOKENS_ONLY,
    ) -> StageSession:
        """Assign the slot to the session; the slot's former session ends.

        A session that was closed before it was opened ends at once: it takes the slot from the session before
        it, as at every stage, and leaves it free.

        Args:
            session: Its id.
            slot: The slot.
            verifier: Its verifier.
            resumed: Former id and positions; valid only if the slot was that session's last.
            positions: Positions of its rows.

        Raises:
            InvalidWindow: If there is no such slot.
        """
        if not 0 <= slot < self.num_slots:
            raise InvalidWindow(f"slot {slot} of {self.num_slots} does not exist")
        evicted = self._owner.get(slot)
        if evicted is not None:
            self.close(evicted)
        num_resumed = resumed.num_positions if resumed.session == self._latest.get(slot) else 0
        entry = StageSession(session, slot, verifier, num_resumed=num_resumed, positions=positions)
        self._latest[slot] = session
        if session not in self._closed:
            self._open[session] = entry
            self._owner[slot] = session
        return entry

    def close(self, session: int) -> int | None:
        """End the session; returns its slot, or None if the session is not open here."""
        self._closed[session] = None
        while len(self._closed) > _NUM_CLOSED_REMEMBERED:
            self._closed.popitem(last=False)
        entry = self._open.pop(session, None)
        if entry is None:
            return None
        del self._owner[entry.slot]
        return entry.slot

    def close_all(self) -> None:
        """End every session, as when their ring broke."""
        for session in list(self._open):
            self.close(session)

    def adopt(self, slot: int, session: int) -> None:
        """Record that a slot holds rows of another stage's session.

        Args:
            slot: The slot.
            session: Its id at that stage.
        """
        self._latest[slot] = session

    @property
    def slots(self) -> dict[int, int]:
        """The slot of each open session, by its id."""
        return {entry.id: entry.slot for entry in self._open.values()}

    def cancel(self, session: int, epoch: int) -> None:
        """Void the session's windows below `epoch`."""
        entry = self._open.get(session)
        if entry is not None:
            entry.epoch = max(entry.epoch, epoch)

    def is_open(self, session: int) -> bool:
        """Whether the session was opened here and has not ended."""
        return session in self._open

    def is_live(self, session: int, epoch: int) -> bool:
        """Whether a window of this session and epoch is still valid."""
        entry = self._open.get(session)
        return entry is not None and epoch >= entry.epoch

    def admit(self, session: int, epoch: int) -> StageSession | None:
        """The session of an arriving window, or None if the window is void.

        Raises:
            UnknownSession: If the session was never opened here.
        """
        entry = self._open.get(session)
        if entry is None:
            if session in self._closed:
                return None
            raise UnknownSession(f"session {session} is not open at this stage")
        if epoch < entry.epoch:
            return None
        entry.epoch = epoch
        return entry
