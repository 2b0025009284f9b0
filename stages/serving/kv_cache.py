"""KV cache by slot: token ids, rows sent on for replays, copies and trims.

The three always hold the same positions, so they are changed here together, and only here told to others.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import numpy as np

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import PrefixMismatch, ProtocolError, UncuttableModel
from stages.runtime.kv_state import KvRows
from stages.sampling.verifier import TokenRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stages.runtime.stage_runtime import Span, StageRuntime


# A stage that was lost has to compute all its sessions anew, and for that it needs what the stage before it
# gave: hidden states, which no KV cache holds. Kept here, they leave a second time without a layer being
# computed. So a repair costs what the lost stage computes, not what all do. Petals keeps the inputs of every
# server at its clients for that (Borzunov et al. 2023); here each stage keeps its own outputs, and the
# coordinator never sees hidden states.
# Enough for a few short sessions.
LEAST_SENT_BYTES: Final = 8 * 2**20
# Of most models a row is about a fifth of what a stage's KV cache takes for it.
SHARE_OF_CACHE: Final = 32


def max_sent_bytes(cache_bytes: int) -> int:
    """How many bytes of rows a stage keeps at most.

    Args:
        cache_bytes: Its KV cache.
    """
    return max(LEAST_SENT_BYTES, cache_bytes // SHARE_OF_CACHE)


class SentHiddenStates:
    """Encoded rows by slot and position, each slot's from 0 on without a gap.

    When there is no room for a row, those of the slot that has sent nothing for longest are dropped. What
    is missing here is computed again.

    Args:
        num_slots: Slots of the stage.
        most_bytes: What all rows together may take.
    """

    def __init__(self, num_slots: int, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._row_bytes = 0
        self._num_bytes = 0
        # The one that sent last is at the end.
        self._rows: OrderedDict[int, bytearray] = OrderedDict(
            (slot, bytearray()) for slot in range(num_slots)
        )

    @property
    def num_bytes(self) -> int:
        """What all rows together take now."""
        return self._num_bytes

    def keep(self, slot: int, start: int, rows: bytes, row_bytes: int) -> None:
        """Note rows that left, in place of what was there from `start` on.

        Args:
            slot: Whose.
            start: Position of the first.
            rows: All of them.
            row_bytes: What each takes; rows of another wire type, so of another size, are dropped.
        """
        if row_bytes != self._row_bytes:
            self._row_bytes = row_bytes
            for other in self._rows:
                self.trim(other, 0)
        self.trim(slot, start)
        self._rows.move_to_end(slot)
        kept = self._rows[slot]
        if len(kept) == start * row_bytes and self._has_room_for(len(rows), slot):
            kept += rows
            self._num_bytes += len(rows)

    def find(self, slot: int, start: int, num_rows: int, row_bytes: int) -> bytes | None:
        """Rows as they left; None if not all of them are here in this size."""
        stop = (start + num_rows) * row_bytes
        kept = self._rows[slot]
        if row_bytes != self._row_bytes or stop > len(kept):
            return None
        return bytes(kept[start * row_bytes : stop])

    def trim(self, slot: int, start: int) -> None:
        """Drop a slot's rows from a position on."""
        kept = self._rows[slot]
        surplus = len(kept) - start * self._row_bytes
        if surplus > 0:
            self._num_bytes -= surplus
            del kept[len(kept) - surplus :]

    def copy(self, source: int, slot: int, num_rows: int) -> None:
        """Have a slot hold the first rows of another, as far as they are here, and nothing else."""
        self.trim(slot, 0)
        self._rows.move_to_end(source)
        self._rows.move_to_end(slot)
        rows = self._rows[source][: num_rows * self._row_bytes]
        if self._has_room_for(len(rows), slot):
            self._rows[slot] = rows
            self._num_bytes += len(rows)

    def _has_room_for(self, num_bytes: int, slot: int) -> bool:
        """Make room; no slot makes room for itself."""
        if len(self._rows[slot]) + num_bytes > self._most_bytes:
            return False
        for other in list(self._rows):
            if self._num_bytes + num_bytes <= self._most_bytes:
                return True
            if other != slot:
                self.trim(other, 0)
        return self._num_bytes + num_bytes <= self._most_bytes


class SlotTokens:
    """Token ids by slot and position, as the KV cache has them. Follows every change of the cache.

    Args:
        num_slots: Slots that there are.
    """

    def __init__(self, num_slots: int) -> None:
        self._records = [TokenRecord() for _ in range(num_slots)]
        self._cursors: list[ReplicationCursor] = []

    def length(self, slot: int) -> int:
        """Positions that a slot holds."""
        return len(self._records[slot])

    def tokens(self, slot: int) -> NDArray[np.int64]:
        """Its token ids, int64; a view that the next `write` may change."""
        record = self._records[slot]
        return record.before(len(record))

    def num_same(self, slot: int, start: int, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first on, a slot holds at the positions from `start` on.

        A slot that does not exist holds none.
        """
        if not 0 <= slot < len(self._records):
            return 0
        stop = start + len(tokens)
        held = self._records[slot].before(stop)[start:]
        differs = np.flatnonzero(held != np.asarray(tokens, np.int64)[: len(held)])
        return int(differs[0]) if len(differs) else len(held)

    def digest(self, slot: int, num_positions: int) -> bytes:
        """A hash of its first token ids: slots of two stages with the same one hold the same there."""
        return hashlib.sha256(self._records[slot].before(num_positions).tobytes()).digest()

    def write(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        """Put tokens in place of what was there from `start` on.

        Raises:
            InvalidWindow: If that would leave a gap.
        """
        self._records[slot].write(start, tokens)
        self._lower(slot, start)

    def trim(self, slot: int, start: int) -> None:
        """Forget a slot's tokens from a position on."""
        if start < self.length(slot):
            self.write(slot, start, ())

    def copy(self, source: int, slot: int, num_positions: int) -> None:
        """Have a slot hold the first tokens of another, and nothing else."""
        self.write(slot, 0, self._records[source].before(num_positions).tolist())

    def attach(self, cursor: ReplicationCursor) -> None:
        """Keep the marks of somebody who is told of every slot, until `detach`."""
        self._cursors.append(cursor)

    def detach(self, cursor: ReplicationCursor) -> None:
        """Keep them no more."""
        self._cursors.remove(cursor)

    def _lower(self, slot: int, start: int) -> None:
        for cursor in self._cursors:
            cursor.num_sent[slot] = min(cursor.num_sent[slot], start)


class ReplicationCursor:
    """What somebody has been told of the slots.

    Args:
        num_slots: Slots that there are.

    Attributes:
        num_sent: By slot, how many of its first positions, as they are now.
        sessions: By slot, which session's they were; 0 for none.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_sent = [0] * num_slots
        self.sessions = [0] * num_slots


# llama.cpp gives a slot's rows only all together, for which there has to be memory.
_MOST_KV_BYTES: Final = 64 * 2**20
_MOST_MESSAGE_BYTES: Final = 8 * 2**20
# As many proposals are seldom under way.
_NUM_LEFT_OUT: Final = 32


class KvSlots:
    """Slots of one stage.

    Args:
        runtime: Has the KV cache.
        sent: What the stage sent on.
    """

    def __init__(self, runtime: StageRuntime, sent: SentHiddenStates) -> None:
        self._runtime = runtime
        self._sent = sent
        self._tokens = SlotTokens(runtime.num_slots)

    def trim(self, slot: int, num_positions: int) -> None:
        """Forget all that a slot holds but its first positions."""
        self._sent.trim(slot, num_positions)
        self._tokens.trim(slot, num_positions)
        self._runtime.trim(slot, num_positions)

    def begin(self, slot: int, source: int, cached: Sequence[int], num_resumed: int) -> None:
        """Have a slot hold what a session begins with, and nothing else.

        The coordinator names the tokens, this stage compares them with what the slots hold: a wrong belief
        costs time, never a wrong answer.

        Args:
            slot: The session's.
            source: The slot that holds its first tokens, perhaps the same one.
            cached: These tokens' ids.
            num_resumed: How many positions of `slot` are kept although they are not among `cached`: they may
                be the session's from before a repair, which `num_same` tells.

        Raises:
            PrefixMismatch: If neither slot holds these tokens.
            UncuttableModel: If a slot's memory has no positions to go back to.
        """
        if self._tokens.num_same(slot, 0, cached) == len(cached):
            self.trim(slot, max(len(cached), num_resumed))
        elif source != slot and self._tokens.num_same(source, 0, cached) == len(cached):
            self._runtime.copy(source, slot, len(cached))
            self._sent.copy(source, slot, len(cached))
            self._tokens.copy(source, slot, len(cached))
        else:
            raise PrefixMismatch(
                f"a session is to begin in slot {slot} with {len(cached)} tokens of slot {source}, which has "
                f"the first {self._tokens.num_same(source, 0, cached)} of them: compute them anew"
            )

    def num_same(self, span: Span) -> int:
        """How many of the span's tokens, from the first on, its slot holds at these positions."""
        return self._tokens.num_same(span.slot, span.start, span.tokens)

    def give_up(self, slot: int, start: int) -> None:
        """Forget a slot's positions from `start` on, or all if its memory cannot go back to one."""
        try:
            self.trim(slot, start)
        except UncuttableModel:
            self.trim(slot, 0)

    def computed(self, span: Span) -> None:
        """Note what the runtime has computed."""
        self._tokens.write(span.slot, span.start, span.tokens)

    def sent_on(self, span: Span, rows: bytes) -> None:
        """Note what left of that; nothing did if there are no rows."""
        if rows:
            # Of its own size: the type for the windows to come may be another by now.
            self._sent.keep(span.slot, span.start, rows, len(rows) // len(span.tokens))

    def find_sent(self, span: Span, row_bytes: int) -> bytes | None:
        """What left at these positions; None if not all of it is here in this size."""
        return self._sent.find(span.slot, span.start, len(span.tokens), row_bytes)

    def attach_cursor(self, cursor: ReplicationCursor, held: Sequence[wire.HeldSlot]) -> None:
        """Keep the marks of a copy of this stage, until `detach_cursor`.

        Args:
            cursor: New ones.
            held: What the copy has from before; what the slot here holds by now counts as told.
        """
        self._tokens.attach(cursor)
        for one in held:
            if one.slot < self._runtime.num_slots and one.num_positions <= self._tokens.length(one.slot):
                digest = self._tokens.digest(one.slot, one.num_positions)
                cursor.num_sent[one.slot] = one.num_positions if digest == one.tokens_sha256 else 0

    def detach_cursor(self, cursor: ReplicationCursor) -> None:
        """Keep them no more."""
        self._tokens.detach(cursor)

    def held(self, num_left_out: int = _NUM_LEFT_OUT) -> list[wire.HeldSlot]:
        """What the slots here have, for `attach_cursor` of the stage that this one is a copy of.

        Args:
            num_left_out: Positions of each that are not spoken of: the stage may have gone back on them.
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
        """What a copy has not been told of a slot; now it counts as told.

        Args:
            slot: The slot.
            session: Whose it is.
            cursor: The copy's.
            sent_row_bytes: Size of a row that leaves now.

        Returns:
            In order; nothing if the rows are too many, or llama.cpp gives none.
        """
        start, stop = cursor.num_sent[slot], self._tokens.length(slot)
        if start == stop and cursor.sessions[slot] == session:
            return []
        if start == stop:
            cursor.sessions[slot] = session
            return [wire.SlotRows(slot=slot, session=session, start=start)]
        num_bytes = self._runtime.num_kv_bytes(slot)
        if not self._runtime.info.can_trim or num_bytes > _MOST_KV_BYTES:
            return []
        try:
            rows = self._runtime.kv_rows(slot)
        except UncuttableModel:
            return []
        cursor.num_sent[slot], cursor.sessions[slot] = stop, session
        num_rows = max(1, _MOST_MESSAGE_BYTES * len(rows) // num_bytes)
        return [
            self._rows(slot, session, rows.cut(first, min(first + num_rows, stop)), sent_row_bytes)
            for first in range(start, stop, num_rows)
        ]

    def apply_update(self, update: wire.SlotRows) -> None:
        """Hold what the stage that this one is a copy of has computed.

        Raises:
            ProtocolError: If the message cannot be meant for what the slot holds.
            MeshError: If the rows are not of this stage; the slot is empty then.
        """
        slot, start = update.slot, update.start
        if slot >= self._runtime.num_slots or start > self._tokens.length(slot):
            raise ProtocolError(f"rows from {start} on for slot {slot}, which does not reach so far")
        sent_row_bytes, rest = divmod(len(update.sent), len(update.tokens) or 1)
        if rest or (update.sent and not update.tokens):
            raise ProtocolError(f"{len(update.sent)} bytes sent on of {len(update.tokens)} tokens")
        try:
            if update.tokens:
                self._runtime.put_kv_rows(slot, _rows_of(update))
            self._sent.trim(slot, start)
            self._tokens.write(slot, start, update.tokens)
            if update.sent:
                self._sent.keep(slot, start, update.sent, sent_row_bytes)
            self._runtime.trim(slot, start + len(update.tokens))
        except BaseException:
            self.trim(slot, 0)
            raise

    def _rows(self, slot: int, session: int, rows: KvRows, sent_row_bytes: int) -> wire.SlotRows:
        return wire.SlotRows(
            slot=slot,
            session=session,
            start=rows.start,
            tokens=self._tokens.tokens(slot)[rows.start : rows.stop],
            kv=rows.to_bytes(),
            sent=self._sent.find(slot, rows.start, len(rows), sent_row_bytes) or b"",
        )


def _rows_of(update: wire.SlotRows) -> KvRows:
    rows = KvRows.from_bytes(update.kv)
    if (rows.start, len(rows)) != (update.start, len(update.tokens)):
        raise ProtocolError(
            f"{len(update.tokens)} tokens from {update.start} on with rows {rows.start} to {rows.stop}"
        )
    return rows
