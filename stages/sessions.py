"""Which sessions are open at a stage, in which slots, and which of their windows are void. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from spanmesh_proto.errors import InvalidWindow, UnknownSession
from stages.opening import NOTHING_RESUMED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stages.judge import Judge
    from stages.opening import Resumed

_NUM_CLOSED_REMEMBERED: Final = 4096


@dataclass
class StageSession:
    """One open session.

    Attributes:
        id: Given by the coordinator; never used twice.
        slot: Its sequence slot in llama.cpp.
        judge: Draws for it at the tail.
        epoch: Windows of a lower epoch are void.
        num_resumed: First positions that its slot may hold from before a repair.
        told: The tokens at these positions as long as it is not known that they are the session's: this stage
            did not compute them, but was told of them.
    """

    id: int
    slot: int
    judge: Judge
    epoch: int = 0
    num_resumed: int = 0
    told: NDArray[np.int64] | None = None

    def confirm(self, start: int, tokens: Sequence[int]) -> None:
        """Give up what the slot holds from here on if it is of other tokens than the session's.

        What a stage tells its copy may be a proposal, which it rejected without having told that yet.

        Args:
            start: Position of the first; what is before it was confirmed.
            tokens: The session's.
        """
        if self.told is None or start >= len(self.told):
            return
        known = self.told[start : start + len(tokens)]
        if not np.array_equal(known, np.asarray(tokens, np.int64)[: len(known)]):
            # Until the window is computed the slot holds what is wrong: whoever resumes must know.
            self.num_resumed, self.told = start, self.told[:start]
        elif start + len(known) == len(self.told):
            self.told = None


@dataclass
class SessionTable:
    """The open sessions of one stage.

    Attributes:
        num_slots: Slots that exist.
    """

    num_slots: int
    _open: dict[int, StageSession] = field(default_factory=dict)
    _owner: dict[int, int] = field(default_factory=dict)
    # Of each slot the session that had it last, also when that is over.
    _latest: dict[int, int] = field(default_factory=dict)
    # Of slots that hold what this stage was told of, and nobody has confirmed: the tokens.
    _told: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    _closed: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._open)

    def open(self, session: int, slot: int, judge: Judge, resumed: Resumed = NOTHING_RESUMED) -> StageSession:
        """Give the slot to the session; whoever had it must leave.

        Args:
            session: Its id.
            slot: The slot.
            judge: Draws for it.
            resumed: What it goes on with: counts only if the slot was that session's last.

        Raises:
            InvalidWindow: If there is no such slot.
        """
        if not 0 <= slot < self.num_slots:
            raise InvalidWindow(f"slot {slot} of {self.num_slots} does not exist")
        evicted = self._owner.get(slot)
        if evicted is not None:
            self.close(evicted)
        num_resumed = resumed.num_positions if resumed.session == self._latest.get(slot) else 0
        told = self._told.pop(slot, None)
        if told is not None:
            num_resumed = min(num_resumed, len(told))
            told = told[:num_resumed] if num_resumed else None
        entry = StageSession(session, slot, judge, num_resumed=num_resumed, told=told)
        self._open[session] = entry
        self._owner[slot] = self._latest[slot] = session
        return entry

    def close(self, session: int) -> int | None:
        """End the session; returns the slot that is free now, or None if the session is not open here."""
        self._closed[session] = None
        while len(self._closed) > _NUM_CLOSED_REMEMBERED:
            self._closed.popitem(last=False)
        entry = self._open.pop(session, None)
        if entry is None:
            return None
        del self._owner[entry.slot]
        if entry.told is not None:
            self._told[entry.slot] = entry.told
        return entry.slot

    def close_all(self) -> None:
        """End every session, as when their ring broke."""
        for session in list(self._open):
            self.close(session)

    def forget(self) -> None:
        """Let no session go on with another's slot: ids of the next coordinator mean other sessions."""
        self._latest.clear()
        self._told.clear()

    def keep(self, slot: int, session: int, num_positions: int) -> None:
        """Note that a slot is about to hold something else behind its first positions.

        Args:
            slot: The slot.
            session: Whose it is at another stage, those positions included.
            num_positions: How many.
        """
        told = self._told.pop(slot, np.empty(0, np.int64))
        if num_positions <= len(told):
            self.adopt(slot, session, told[:num_positions])
        else:
            self._latest.pop(slot, None)

    def adopt(self, slot: int, session: int, tokens: NDArray[np.int64]) -> None:
        """Note that a slot holds what a session computed at another stage.

        Args:
            slot: The slot.
            session: Its id there.
            tokens: At the positions from 0 on, int64.
        """
        self._latest[slot], self._told[slot] = session, tokens

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
        """Whether a window of this session and epoch is still worth computing."""
        entry = self._open.get(session)
        return entry is not None and epoch >= entry.epoch

    def admit(self, session: int, epoch: int) -> StageSession | None:
        """The session of an arriving window, or None if the window is void and to be dropped.

        Raises:
            UnknownSession: If the session was never open here.
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
