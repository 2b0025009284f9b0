"""Slots of a stage and of its replicas: rows and recurrent state to be sent, and those that arrive."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import ProtocolError, UncuttableModel
from stages.runtime.kv_state import KvRows
from stages.serving.slots import SlotListener

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stages.serving.slots import KvSlots

# A state of a few MB a layer, of a large stage.
_MOST_STATE_BYTES: Final = 2**30
# llama.cpp returns a slot's rows only together, which takes memory.
_MOST_KV_BYTES: Final = 64 * 2**20
_MOST_MESSAGE_BYTES: Final = 8 * 2**20
# More proposals are seldom in flight.
_NUM_LEFT_OUT: Final = 32


@dataclass(frozen=True)
class ArrivedRows:
    """KV rows that wait for the state behind them."""

    rows: KvRows
    """The rows."""
    tokens: tuple[int, ...]
    """Their token ids."""
    sent: bytes
    """Hidden states that the stage sent for them, concatenated; perhaps none."""
    sent_row_bytes: int
    """Size of each of those."""


@dataclass
class StateArrivals:
    """Rows and parts of states that have arrived, by slot."""

    _rows: dict[int, list[ArrivedRows]] = field(default_factory=dict)
    _states: dict[int, bytearray] = field(default_factory=dict)

    def add_rows(self, slot: int, rows: ArrivedRows) -> None:
        """Add rows; those at position 0, or behind others than the last, begin anew."""
        waiting = self._rows.setdefault(slot, [])
        if waiting and waiting[-1].rows.stop != rows.rows.start:
            waiting.clear()
        waiting.append(rows)
        self._states.pop(slot, None)

    def add_state(self, slot: int, part: bytes, num_bytes: int) -> NDArray[np.uint8] | None:
        """Add a part of a state; returns the state once it is whole.

        Raises:
            ProtocolError: If there is more than was announced, or than any state has.
        """
        if not part:
            return None
        state = self._states.setdefault(slot, bytearray())
        if num_bytes > _MOST_STATE_BYTES or len(state) + len(part) > num_bytes:
            raise ProtocolError(f"{len(state) + len(part)} bytes of a recurrent state of {num_bytes}")
        state += part
        return np.frombuffer(bytes(self._states.pop(slot)), np.uint8) if len(state) == num_bytes else None

    def take_rows(self, slot: int) -> list[ArrivedRows]:
        """Remove and return the rows that wait for a slot's state."""
        return self._rows.pop(slot, [])

    def drop(self, slot: int) -> None:
        """Drop all that has arrived for a slot."""
        self._rows.pop(slot, None)
        self._states.pop(slot, None)


class ReplicationCursor:
    """State of replication to one replica, by slot.

    Args:
        num_slots: Number of slots.

    Attributes:
        num_sent: Number of first positions that were sent and are unchanged.
        sessions: Session of the sent positions; 0 for none.
        states: Position of the recurrent state that was sent; 0 for none.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_sent = [0] * num_slots
        self.sessions = [0] * num_slots
        self.states = [0] * num_slots


class SlotReplication(SlotListener):
    """Replication of slots: to the replicas of a stage, and at a replica.

    Args:
        slots: Slots of the stage.
    """

    def __init__(self, slots: KvSlots) -> None:
        self._slots = slots
        self._runtime, self._memory = slots.runtime, slots.memory
        self._tokens, self._sent = slots.tokens, slots.sent
        self._cursors: list[ReplicationCursor] = []
        # Number of each slot's first tokens that are known to be no proposals.
        self._num_committed = [0] * slots.runtime.num_slots
        self._arrivals = StateArrivals()
        slots.tokens.listeners.append(self)

    def began(self, slot: int, num_positions: int) -> None:
        """Note a session's first positions, which are committed."""
        self._num_committed[slot] = num_positions

    def computed(self, slot: int, num_committed: int) -> None:
        """Note how many tokens of a slot's session are committed."""
        self._num_committed[slot] = max(self._num_committed[slot], num_committed)

    def changed(self, slot: int, start: int) -> None:
        """Send a slot's positions from one on again."""
        for cursor in self._cursors:
            cursor.num_sent[slot] = min(cursor.num_sent[slot], start)
            if cursor.states[slot] > start:
                cursor.states[slot] = 0

    def attach_cursor(self, cursor: ReplicationCursor, held: Sequence[wire.HeldSlot]) -> None:
        """Begin replication to a replica, until `detach_cursor`.

        Args:
            cursor: A new cursor.
            held: Positions that the replica holds; those that are the same here count as sent.
        """
        self._cursors.append(cursor)
        for one in held:
            if one.slot < self._runtime.num_slots and one.num_positions <= self._tokens.length(one.slot):
                digest = self._tokens.digest(one.slot, one.num_positions)
                cursor.num_sent[one.slot] = one.num_positions if digest == one.tokens_sha256 else 0

    def detach_cursor(self, cursor: ReplicationCursor) -> None:
        """End replication to a replica."""
        self._cursors.remove(cursor)

    def held(self, num_left_out: int = _NUM_LEFT_OUT) -> list[wire.HeldSlot]:
        """Positions held by the slots of a replica, for `attach_cursor` of the stage that it follows.

        Args:
            num_left_out: Number of last positions of each that are left out: the stage may have rolled them
                back.
        """
        lengths = [self._tokens.length(slot) - num_left_out for slot in range(self._runtime.num_slots)]
        return [
            wire.HeldSlot(slot=slot, num_positions=length, tokens_sha256=self._tokens.digest(slot, length))
            for slot, length in enumerate(lengths)
            if length > 0
        ]

    def updates(
        self, slot: int, session: int, cursor: ReplicationCursor, sent_row_bytes: int
    ) -> list[wire.SlotRows]:
        """Rows of a slot that were not sent to a replica; they count as sent from now on.

        Args:
            slot: The slot.
            session: Session of the slot.
            cursor: Cursor of the replica.
            sent_row_bytes: Current size of a row of hidden states.

        Returns:
            Messages in order; empty if the rows are too many, or llama.cpp returns none.
        """
        if not self._runtime.info.can_trim:
            return self._state_updates(slot, session, cursor, sent_row_bytes)
        start, stop = cursor.num_sent[slot], self._tokens.length(slot)
        if start == stop and cursor.sessions[slot] == session:
            return []
        if start == stop:
            cursor.sessions[slot] = session
            return [wire.SlotRows(slot=slot, session=session, start=start)]
        num_bytes = self._memory.num_kv_bytes(slot)
        if num_bytes > _MOST_KV_BYTES:
            return []
        try:
            rows = self._memory.kv_rows(slot)
        except UncuttableModel:
            return []
        cursor.num_sent[slot], cursor.sessions[slot] = stop, session
        num_rows = max(1, _MOST_MESSAGE_BYTES * len(rows) // num_bytes)
        return [
            self._rows(slot, session, rows.cut(first, min(first + num_rows, stop)), sent_row_bytes)
            for first in range(start, stop, num_rows)
        ]

    def _state_updates(
        self, slot: int, session: int, cursor: ReplicationCursor, sent_row_bytes: int
    ) -> list[wire.SlotRows]:
        """`updates` of a model with recurrent layers: up to the latest checkpoint of committed tokens."""
        latest = self._memory.checkpoint(slot, self._num_committed[slot])
        if latest is None or (cursor.states[slot], cursor.sessions[slot]) == (latest[0], session):
            return []
        stop, state = latest
        start = min(cursor.num_sent[slot], stop)
        num_bytes = self._memory.num_kv_bytes(slot)
        if num_bytes - state.size > _MOST_KV_BYTES:
            return []
        try:
            rows = self._memory.kv_rows(slot)
        except UncuttableModel:
            return []
        cursor.num_sent[slot] = cursor.states[slot] = stop
        cursor.sessions[slot] = session
        num_rows = max(1, _MOST_MESSAGE_BYTES * len(rows) // num_bytes)
        return [
            *(
                self._rows(slot, session, rows.cut(first, min(first + num_rows, stop)), sent_row_bytes)
                for first in range(start, stop, num_rows)
            ),
            *state_messages(slot, session, stop, state, _MOST_MESSAGE_BYTES),
        ]

    def apply_update(self, update: wire.SlotRows) -> None:
        """Put rows of the followed stage into the KV cache.

        Raises:
            ProtocolError: If the message does not fit the content of the slot.
            MeshError: If the rows are not of this stage's layers; the slot is empty then.
        """
        slot, start = update.slot, update.start
        can_trim = self._runtime.info.can_trim
        if slot >= self._runtime.num_slots or (can_trim and start > self._tokens.length(slot)):
            raise ProtocolError(f"rows from position {start} on do not continue slot {slot}")
        sent_row_bytes, rest = divmod(len(update.sent), len(update.tokens) or 1)
        if rest or (update.sent and not update.tokens):
            raise ProtocolError(
                f"{len(update.sent)} bytes of sent hidden states do not fit {len(update.tokens)} tokens"
            )
        if not can_trim:
            self._apply_state_update(update, sent_row_bytes)
            return
        try:
            if update.tokens:
                self._memory.put_kv_rows(slot, _rows_of(update))
            self._sent.trim(slot, start)
            self._tokens.write(slot, start, update.tokens)
            if update.sent:
                self._sent.keep(slot, start, update.sent, sent_row_bytes)
            self._memory.trim(slot, start + len(update.tokens))
        except BaseException:
            self._slots.trim(slot, 0)
            raise

    def _apply_state_update(self, update: wire.SlotRows, sent_row_bytes: int) -> None:
        slot = update.slot
        try:
            rows = None
            if update.tokens:
                rows = _rows_of(update)
                self._arrivals.add_rows(
                    slot, ArrivedRows(rows, tuple(update.tokens), update.sent, sent_row_bytes)
                )
            state = self._arrivals.add_state(slot, update.state, update.num_state_bytes)
            if state is None:
                return
            self._put_arrived(slot, self._arrivals.take_rows(slot), update.start, state)
        except BaseException:
            self._arrivals.drop(slot)
            self._slots.trim(slot, 0)
            raise

    def _put_arrived(
        self, slot: int, arrived: Sequence[ArrivedRows], stop: int, state: NDArray[np.uint8]
    ) -> None:
        rows = [each.rows for each in arrived]
        if not rows and 0 < stop <= self._memory.length(slot):
            rows = [self._memory.kv_rows(slot).cut(0, stop)]
        if not rows or rows[-1].stop != stop:
            raise ProtocolError(f"a recurrent state at position {stop} of slot {slot} follows no rows")
        self._memory.put_kv_rows(slot, functools.reduce(KvRows.followed_by, rows), state)
        self._sent.trim(slot, stop)
        self._tokens.trim(slot, stop)
        for each in arrived:
            self._sent.trim(slot, each.rows.start)
            self._tokens.write(slot, each.rows.start, each.tokens)
            if each.sent:
                self._sent.keep(slot, each.rows.start, each.sent, each.sent_row_bytes)
        self._num_committed[slot] = stop

    def _rows(self, slot: int, session: int, rows: KvRows, sent_row_bytes: int) -> wire.SlotRows:
        return wire.SlotRows(
            slot=slot,
            session=session,
            start=rows.start,
            tokens=self._tokens.tokens(slot)[rows.start : rows.stop],
            kv=rows.to_bytes(),
            sent=self._sent.find(slot, rows.start, len(rows), sent_row_bytes) or b"",
        )


def state_messages(
    slot: int, session: int, stop: int, state: NDArray[np.uint8], most_bytes: int
) -> list[wire.SlotRows]:
    """Messages of a recurrent state, which follow those of the rows.

    Args:
        slot: Its slot.
        session: Session of the slot.
        stop: Number of positions that the state is made of.
        state: The state, uint8, in llama.cpp's format.
        most_bytes: Most bytes of one message.
    """
    return [
        wire.SlotRows(
            slot=slot,
            session=session,
            start=stop,
            state=state[first : first + most_bytes].tobytes(),
            num_state_bytes=state.size,
        )
        for first in range(0, state.size, most_bytes)
    ]


def _rows_of(update: wire.SlotRows) -> KvRows:
    stop = update.start + len(update.tokens)
    rows = KvRows.without_caches(update.start, stop, update.kv)
    rows = rows or KvRows.from_bytes(update.kv, update.start)
    if (rows.start, len(rows)) != (update.start, len(update.tokens)):
        raise ProtocolError(
            f"{len(update.tokens)} tokens from position {update.start} on do not fit KV rows {rows.start} to "
            f"{rows.stop}"
        )
    return rows
