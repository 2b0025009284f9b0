"""KV cache by slot: token ids, rows kept for replays, copies and trims.

The three always hold the same positions, so all changes go through this module.
"""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import numpy as np

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import MeshError, PrefixMismatch, ProtocolError, UncuttableModel
from stages.runtime.kv_state import KvRows, no_state
from stages.sampling.verifier import TokenRecord
from stages.serving.prefix_blocks import SlotCopy
from stages.serving.state_arrivals import ArrivedRows, StateArrivals, state_messages

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from stages.runtime.span import Span
    from stages.runtime.stage_runtime import StageRuntime
    from stages.serving.prefix_blocks import FetchedPrefix

# Enough for a few short sessions.
LEAST_SENT_BYTES: Final = 8 * 2**20
# For most models a row is about a fifth of its share of a stage's KV cache.
SHARE_OF_CACHE: Final = 32
# llama.cpp returns a slot's rows only together, which takes memory.
_MOST_KV_BYTES: Final = 64 * 2**20
_MOST_MESSAGE_BYTES: Final = 8 * 2**20
# More proposals are seldom in flight.
_NUM_LEFT_OUT: Final = 32


# A replacement of a lost stage has to compute all its sessions anew, and for that it needs the hidden states
# of the stage before it, which no KV cache holds. Kept here, they are sent a second time without computing a
# layer. So a recovery costs the computation of the lost stage, not of all stages. Petals keeps the inputs of
# every server at its clients for that (Borzunov et al. 2023); here each stage keeps its own outputs, and the
# coordinator never sees hidden states.
class SentHiddenStates:
    """Encoded rows by slot and position, each slot's from 0 on without a gap.

    When there is no room for a row, those of the least recently sending slot are dropped. Missing rows are
    computed again.

    Args:
        num_slots: Number of slots.
        most_bytes: Most bytes of all rows together.
    """

    def __init__(self, num_slots: int, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._row_bytes = 0
        self._num_bytes = 0
        # In the order of sending, the latest last.
        self._rows: OrderedDict[int, bytearray] = OrderedDict(
            (slot, bytearray()) for slot in range(num_slots)
        )

    @property
    def num_bytes(self) -> int:
        """Size of all rows."""
        return self._num_bytes

    def keep(self, slot: int, start: int, rows: bytes, row_bytes: int) -> None:
        """Store rows that were sent, replacing the slot's rows from `start` on.

        Args:
            slot: The slot.
            start: Position of the first row.
            rows: The rows, concatenated.
            row_bytes: Size of each; rows of another size, so of another wire type, are dropped.
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
        """Rows as sent; None if some are missing or have another size."""
        stop = (start + num_rows) * row_bytes
        kept = self._rows[slot]
        if row_bytes != self._row_bytes or stop > len(kept):
            return None
        return bytes(kept[start * row_bytes : stop])

    def num_rows(self, slot: int, row_bytes: int) -> int:
        """Number of a slot's rows, if they have this size."""
        return len(self._rows[slot]) // row_bytes if row_bytes == self._row_bytes else 0

    def trim(self, slot: int, start: int) -> None:
        """Drop a slot's rows from a position on."""
        kept = self._rows[slot]
        surplus = len(kept) - start * self._row_bytes
        if surplus > 0:
            self._num_bytes -= surplus
            del kept[len(kept) - surplus :]

    def copy(self, source: int, slot: int, num_rows: int) -> None:
        """Replace a slot's rows by the first rows of another, as far as they are kept."""
        self.trim(slot, 0)
        self._rows.move_to_end(source)
        self._rows.move_to_end(slot)
        rows = self._rows[source][: num_rows * self._row_bytes]
        if self._has_room_for(len(rows), slot):
            self._rows[slot] = rows
            self._num_bytes += len(rows)

    def _has_room_for(self, num_bytes: int, slot: int) -> bool:
        """Make room in other slots."""
        if len(self._rows[slot]) + num_bytes > self._most_bytes:
            return False
        for other in list(self._rows):
            if self._num_bytes + num_bytes <= self._most_bytes:
                return True
            if other != slot:
                self.trim(other, 0)
        return self._num_bytes + num_bytes <= self._most_bytes


class SlotTokens:
    """Token ids by slot and position. Changed together with the KV cache.

    Args:
        num_slots: Number of slots.
    """

    def __init__(self, num_slots: int) -> None:
        self._records = [TokenRecord() for _ in range(num_slots)]
        self._cursors: list[ReplicationCursor] = []

    def length(self, slot: int) -> int:
        """Number of positions that a slot holds."""
        return len(self._records[slot])

    def tokens(self, slot: int) -> NDArray[np.int64]:
        """Token ids of a slot, int64; a view that the next `write` may change."""
        record = self._records[slot]
        return record.before(len(record))

    def num_same(self, slot: int, start: int, tokens: Sequence[int]) -> int:
        """Number of these tokens, from the first on, that a slot holds at the positions from `start` on.

        0 for a slot that does not exist.
        """
        if not 0 <= slot < len(self._records):
            return 0
        stop = start + len(tokens)
        held = self._records[slot].before(stop)[start:]
        differs = np.flatnonzero(held != np.asarray(tokens, np.int64)[: len(held)])
        return int(differs[0]) if len(differs) else len(held)

    def digest(self, slot: int, num_positions: int) -> bytes:
        """Hash of its first token ids, for comparison with another stage."""
        return hashlib.sha256(self._records[slot].before(num_positions).tobytes()).digest()

    def write(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        """Replace the tokens from `start` on.

        Raises:
            InvalidWindow: If that would leave a gap.
        """
        self._records[slot].write(start, tokens)
        self._lower(slot, start)

    def trim(self, slot: int, start: int) -> None:
        """Drop a slot's tokens from a position on."""
        if start < self.length(slot):
            self.write(slot, start, ())

    def copy(self, source: int, slot: int, num_positions: int) -> None:
        """Replace a slot's tokens by the first tokens of another."""
        self.write(slot, 0, self._records[source].before(num_positions).tolist())

    def attach(self, cursor: ReplicationCursor) -> None:
        """Update a cursor with every change, until `detach`."""
        self._cursors.append(cursor)

    def detach(self, cursor: ReplicationCursor) -> None:
        """Stop updating a cursor."""
        self._cursors.remove(cursor)

    def _lower(self, slot: int, start: int) -> None:
        for cursor in self._cursors:
            cursor.num_sent[slot] = min(cursor.num_sent[slot], start)
            if cursor.states[slot] > start:
                cursor.states[slot] = 0


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


class KvSlots:
    """KV cache, token ids and sent rows of one stage, by slot.

    Args:
        runtime: Runtime with the KV cache.
        sent: Rows that the stage sent.
    """

    def __init__(self, runtime: StageRuntime, sent: SentHiddenStates) -> None:
        self._runtime = runtime
        self._sent = sent
        self._tokens = SlotTokens(runtime.num_slots)
        # Number of each slot's first tokens that are known to be no proposals.
        self._num_committed = [0] * runtime.num_slots
        self._arrivals = StateArrivals()

    def trim(self, slot: int, num_positions: int) -> None:
        """Drop all but the first positions of a slot.

        Raises:
            UncuttableModel: If its memory cannot go back to this position.
        """
        self._runtime.trim(slot, num_positions)
        self._sent.trim(slot, num_positions)
        self._tokens.trim(slot, num_positions)

    def begin(
        self,
        slot: int,
        source: int,
        cached: Sequence[int],
        num_resumed: int,
        sent_row_bytes: int,
        *,
        fetched: FetchedPrefix | None = None,
    ) -> None:
        """Prepare a slot with a session's cached prefix, and nothing else.

        The coordinator names the cached tokens, and this stage compares them with those of the slots: a wrong
        expectation costs time, never a wrong answer.

        Args:
            slot: Slot of the session.
            source: Slot with the prefix, perhaps the same one.
            cached: Token ids of the prefix.
            num_resumed: Number of positions of `slot` that are kept although they are not in `cached`: they
                may be the session's from before a recovery, which `num_same` checks.
            sent_row_bytes: Current size of a row of hidden states.
            fetched: Rows from disk for the prefix, if there are any.

        Raises:
            PrefixMismatch: If there are no rows from disk, and no slot holds these tokens and can go back to
                their end; or if llama.cpp does not take the rows.
        """
        self._num_committed[slot] = len(cached)
        if fetched is not None and fetched.serves(cached):
            # Even if the slot holds these tokens: it may be unable to go back to their end, or hold rows that
            # were computed in another ring and are not those of the blocks' identities.
            self._put_fetched(slot, fetched, len(cached))
            return
        num_kept = self._return_point(slot, cached, num_resumed, sent_row_bytes)
        if num_kept is not None:
            self.trim(slot, num_kept)
            self._num_committed[slot] = num_kept
        elif source != slot and self._can_begin_as(source, cached):
            self._copy(source, slot, len(cached))
        else:
            raise PrefixMismatch(
                f"a session begins in slot {slot} with {len(cached)} cached tokens of slot {source}, which "
                f"{self._lack(source, cached)}: compute them again"
            )

    def _can_begin_as(self, slot: int, cached: Sequence[int]) -> bool:
        """Whether a slot holds these first tokens, and can go back to their end."""
        num_cached = len(cached)
        is_held = self._tokens.num_same(slot, 0, cached) == num_cached
        return is_held and self._runtime.can_go_back(slot, num_cached)

    def _lack(self, slot: int, cached: Sequence[int]) -> str:
        """Reason why a session cannot begin with these tokens of a slot, for a message."""
        num_same = self._tokens.num_same(slot, 0, cached)
        if num_same < len(cached):
            return f"has only the first {num_same} of them"
        if self._runtime.info.can_trim:
            return "lacks rows in sliding windows before their end"
        points = list(self._runtime.return_points(slot))
        return f"can go back to positions {points} only, with recurrent state"

    def _copy(self, source: int, slot: int, num_positions: int) -> None:
        """Replace the content of a slot by the first positions of another."""
        self.trim(slot, 0)
        try:
            self._runtime.copy(source, slot, num_positions)
        except (MeshError, MemoryError) as error:
            raise PrefixMismatch(
                f"{num_positions} positions of slot {source} cannot be copied to slot {slot}, so they are "
                f"computed: {error}"
            ) from error
        self._sent.copy(source, slot, num_positions)
        self._tokens.copy(source, slot, num_positions)

    def _put_fetched(self, slot: int, fetched: FetchedPrefix, num_positions: int) -> None:
        """Replace the content of a slot by the first positions of a prefix from disk."""
        self.trim(slot, 0)
        try:
            self._runtime.put_saved(slot, fetched.saved, len(fetched.tokens), fetched.state)
        except (MeshError, MemoryError) as error:
            raise PrefixMismatch(
                f"slot {slot} does not take {len(fetched.tokens)} positions from disk, so they are computed: "
                f"{error}"
            ) from error
        self._tokens.write(slot, 0, fetched.tokens.tolist())
        self.trim(slot, num_positions)

    def copy_of(
        self,
        slot: int,
        num_positions: int,
        tokens_sha256: bytes,
        state_positions: Collection[int],
        most_bytes: int,
    ) -> SlotCopy | None:
        """Copy of a slot's first positions, for the disk.

        Of a model with sliding windows llama.cpp saves the rows in the windows at the slot's end only. If a
        state is wanted, the slot drops all positions beyond, which were rejected.

        Args:
            slot: The slot.
            num_positions: Number of the positions.
            tokens_sha256: SHA-256 of their token ids.
            state_positions: Numbers of positions behind which states are wanted: recurrent states, or rows in
                sliding windows.
            most_bytes: Most bytes of the slot's rows.

        Returns:
            The copy, without states that are not kept; None if the slot holds other tokens, or too many rows.

        Raises:
            MeshError: If llama.cpp does not return the rows.
        """
        is_same = 0 < num_positions <= self._tokens.length(slot)
        if not is_same or self._tokens.digest(slot, num_positions) != tokens_sha256:
            return None
        if self._runtime.num_kv_bytes(slot) > most_bytes:
            return None
        tokens = self._tokens.tokens(slot)[:num_positions].copy()
        runtime = self._runtime
        if not runtime.info.can_trim:
            states = {position: runtime.state_at(slot, position) for position in state_positions}
            found = {position: state for position, state in states.items() if state is not None}
            return SlotCopy(tokens, runtime.kv_rows(slot), found)
        if runtime.info.has_windows and state_positions:
            self.trim(slot, num_positions)
            rows, window = runtime.kv_rows_and_window(slot)
            return SlotCopy(tokens, rows, {num_positions: window})
        return SlotCopy(tokens, runtime.kv_rows(slot), dict.fromkeys(state_positions, no_state()))

    def _return_point(
        self, slot: int, cached: Sequence[int], num_resumed: int, sent_row_bytes: int
    ) -> int | None:
        """Number of a slot's positions that a session goes on from: as many as may be the session's.

        With recurrent state that is the latest point to which the slot can go back, and before which no row
        has to be computed: what was sent for the others has to be there. None if the slot holds other tokens
        than the cached ones, or cannot go back to a position at their end or behind it.
        """
        num_cached = len(cached)
        if self._tokens.num_same(slot, 0, cached) < num_cached:
            return None
        num_positions = min(max(num_cached, num_resumed), self._tokens.length(slot))
        if self._runtime.info.can_trim:
            # Rows before the windows may be missing.
            wanted = (num_positions, num_cached)
            return next((each for each in wanted if self._runtime.can_go_back(slot, each)), None)
        if not self._runtime.info.is_tail:
            num_positions = min(num_positions, max(num_cached, self._sent.num_rows(slot, sent_row_bytes)))
        points = self._runtime.return_points(slot)
        return max((point for point in points if num_cached <= point <= num_positions), default=None)

    def num_reusable(self, span: Span, most: int, sent_row_bytes: int) -> int:
        """Number of first rows of a resumed session's window that need not be computed.

        The slot holds them, and what was sent for them is there. With recurrent state they end where the slot
        can go back to, unless they are all of the window's rows.

        Args:
            span: Rows of the window.
            most: Most rows that may be reused; 0 or less for none.
            sent_row_bytes: Current size of a row of hidden states.

        Raises:
            PrefixMismatch: If the slot cannot go back to where any of the rows is computed.
        """
        slot, start = span.slot, span.start
        # The slot may hold a rejected proposal, or rows of another session.
        num_held = self._tokens.num_same(slot, start, span.tokens[:most]) if most > 0 else 0
        if num_held and not self._runtime.info.is_tail:
            # Those of the session that sent least recently are dropped when others need the room.
            num_held = min(num_held, max(0, self._sent.num_rows(slot, sent_row_bytes) - start))
        if self._runtime.info.can_trim or num_held == len(span.tokens):
            return num_held
        points = self._runtime.return_points(slot)
        fitting = [point for point in points if start <= point <= start + num_held]
        if not fitting:
            raise PrefixMismatch(
                f"slot {slot} holds {num_held} rows of a resumed session from position {start} on, and with "
                f"recurrent state it cannot compute the next one: it can go back to {list(points)} only"
            )
        return fitting[-1] - start

    def give_up(self, slot: int, start: int) -> None:
        """Drop a slot's positions from `start` on, or all if its memory cannot go back to one."""
        try:
            self.trim(slot, start)
        except UncuttableModel:
            self.trim(slot, 0)

    def computed(self, span: Span, num_committed: int) -> None:
        """Record computed rows.

        Args:
            span: The rows.
            num_committed: Number of the session's tokens that are no proposals; 0 if that is not known.
        """
        self._tokens.write(span.slot, span.start, span.tokens)
        self._num_committed[span.slot] = max(self._num_committed[span.slot], num_committed)

    def sent_on(self, span: Span, rows: bytes) -> None:
        """Record the rows that were sent; empty at the tail."""
        if rows:
            # By their own size: the wire type of later windows may differ.
            self._sent.keep(span.slot, span.start, rows, len(rows) // len(span.tokens))

    def find_sent(self, span: Span, row_bytes: int) -> bytes | None:
        """Sent rows of these positions; None if some are missing or have another size."""
        return self._sent.find(span.slot, span.start, len(span.tokens), row_bytes)

    def attach_cursor(self, cursor: ReplicationCursor, held: Sequence[wire.HeldSlot]) -> None:
        """Begin replication to a replica, until `detach_cursor`.

        Args:
            cursor: A new cursor.
            held: Positions that the replica holds; those that are the same here count as sent.
        """
        self._tokens.attach(cursor)
        for one in held:
            if one.slot < self._runtime.num_slots and one.num_positions <= self._tokens.length(one.slot):
                digest = self._tokens.digest(one.slot, one.num_positions)
                cursor.num_sent[one.slot] = one.num_positions if digest == one.tokens_sha256 else 0

    def detach_cursor(self, cursor: ReplicationCursor) -> None:
        """End replication to a replica."""
        self._tokens.detach(cursor)

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
        num_bytes = self._runtime.num_kv_bytes(slot)
        if num_bytes > _MOST_KV_BYTES:
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

    def _state_updates(
        self, slot: int, session: int, cursor: ReplicationCursor, sent_row_bytes: int
    ) -> list[wire.SlotRows]:
        """`updates` of a model with recurrent layers: up to the latest checkpoint of committed tokens."""
        latest = self._runtime.checkpoint(slot, self._num_committed[slot])
        if latest is None or (cursor.states[slot], cursor.sessions[slot]) == (latest[0], session):
            return []
        stop, state = latest
        start = min(cursor.num_sent[slot], stop)
        num_bytes = self._runtime.num_kv_bytes(slot)
        if num_bytes - state.size > _MOST_KV_BYTES:
            return []
        try:
            rows = self._runtime.kv_rows(slot)
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
                self._runtime.put_kv_rows(slot, _rows_of(update))
            self._sent.trim(slot, start)
            self._tokens.write(slot, start, update.tokens)
            if update.sent:
                self._sent.keep(slot, start, update.sent, sent_row_bytes)
            self._runtime.trim(slot, start + len(update.tokens))
        except BaseException:
            self.trim(slot, 0)
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
            self.trim(slot, 0)
            raise

    def _put_arrived(
        self, slot: int, arrived: Sequence[ArrivedRows], stop: int, state: NDArray[np.uint8]
    ) -> None:
        rows = [each.rows for each in arrived]
        if not rows and 0 < stop <= self._runtime.length(slot):
            rows = [self._runtime.kv_rows(slot).cut(0, stop)]
        if not rows or rows[-1].stop != stop:
            raise ProtocolError(f"a recurrent state at position {stop} of slot {slot} follows no rows")
        self._runtime.put_kv_rows(slot, functools.reduce(KvRows.followed_by, rows), state)
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


def max_sent_bytes(cache_bytes: int) -> int:
    """Most bytes of rows that a stage keeps.

    Args:
        cache_bytes: Size of its KV cache.
    """
    return max(LEAST_SENT_BYTES, cache_bytes // SHARE_OF_CACHE)


def _rows_of(update: wire.SlotRows) -> KvRows:
    stop = update.start + len(update.tokens)
    rows = KvRows.without_caches(update.start, stop, update.kv) or KvRows.from_bytes(update.kv)
    if (rows.start, len(rows)) != (update.start, len(update.tokens)):
        raise ProtocolError(
            f"{len(update.tokens)} tokens from position {update.start} on do not fit KV rows {rows.start} to "
            f"{rows.stop}"
        )
    return rows
