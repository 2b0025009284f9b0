"""What a stage keeps by slot: the KV cache, what it sent on, and the tokens of both. One thread owns it.

The three always hold the same positions, so they are changed here together, and only here told to others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import PrefixMismatch, ProtocolError, UncuttableModel
from stages.runtime.kv_state import KvRows
from stages.slot_tokens import SlotTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stages.runtime.stage_runtime import Span, StageRuntime
    from stages.sent_rows import SentRows
    from stages.slot_tokens import Marks

# llama.cpp gives a slot's rows only all together, for which there has to be memory.
_MOST_KV_BYTES: Final = 64 * 2**20
_MOST_MESSAGE_BYTES: Final = 8 * 2**20
# As many proposals are seldom under way.
_NUM_LEFT_OUT: Final = 32


class StageSlots:
    """Slots of one stage.

    Args:
        runtime: Has the KV cache.
        sent: What the stage sent on.
    """

    def __init__(self, runtime: StageRuntime, sent: SentRows) -> None:
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

    def follow(self, marks: Marks, held: Sequence[wire.HeldSlot]) -> None:
        """Keep the marks of a copy of this stage, until `unfollow`.

        Args:
            marks: New ones.
            held: What the copy has from before; what the slot here holds by now counts as told.
        """
        self._tokens.follow(marks)
        for one in held:
            if one.slot < self._runtime.num_slots and one.num_positions <= self._tokens.length(one.slot):
                digest = self._tokens.digest(one.slot, one.num_positions)
                marks.told[one.slot] = one.num_positions if digest == one.tokens_sha256 else 0

    def unfollow(self, marks: Marks) -> None:
        """Keep them no more."""
        self._tokens.unfollow(marks)

    def held(self, num_left_out: int = _NUM_LEFT_OUT) -> list[wire.HeldSlot]:
        """What the slots here have, for `follow` of the stage that this one is a copy of.

        Args:
            num_left_out: Positions of each that are not spoken of: the stage may have gone back on them.
        """
        lengths = [self._tokens.length(slot) - num_left_out for slot in range(self._runtime.num_slots)]
        return [
            wire.HeldSlot(slot=slot, num_positions=length, tokens_sha256=self._tokens.digest(slot, length))
            for slot, length in enumerate(lengths)
            if length > 0
        ]

    def news(self, slot: int, session: int, marks: Marks, sent_row_bytes: int) -> list[wire.SlotRows]:
        """What a copy has not been told of a slot; now it counts as told.

        Args:
            slot: The slot.
            session: Whose it is.
            marks: The copy's.
            sent_row_bytes: Size of a row that leaves now.

        Returns:
            In order; nothing if the rows are too many, or llama.cpp gives none.
        """
        start, stop = marks.told[slot], self._tokens.length(slot)
        if start == stop and marks.sessions[slot] == session:
            return []
        if start == stop:
            marks.sessions[slot] = session
            return [wire.SlotRows(slot=slot, session=session, start=start)]
        num_bytes = self._runtime.num_kv_bytes(slot)
        if not self._runtime.info.can_trim or num_bytes > _MOST_KV_BYTES:
            return []
        try:
            rows = self._runtime.kv_rows(slot)
        except UncuttableModel:
            return []
        marks.told[slot], marks.sessions[slot] = stop, session
        num_rows = max(1, _MOST_MESSAGE_BYTES * len(rows) // num_bytes)
        return [
            self._rows(slot, session, rows.cut(first, min(first + num_rows, stop)), sent_row_bytes)
            for first in range(start, stop, num_rows)
        ]

    def take(self, news: wire.SlotRows) -> None:
        """Hold what the stage that this one is a copy of has computed.

        Raises:
            ProtocolError: If the message cannot be meant for what the slot holds.
            MeshError: If the rows are not of this stage; the slot is empty then.
        """
        slot, start = news.slot, news.start
        if slot >= self._runtime.num_slots or start > self._tokens.length(slot):
            raise ProtocolError(f"rows from {start} on for slot {slot}, which does not reach so far")
        sent_row_bytes, rest = divmod(len(news.sent), len(news.tokens) or 1)
        if rest or (news.sent and not news.tokens):
            raise ProtocolError(f"{len(news.sent)} bytes sent on of {len(news.tokens)} tokens")
        try:
            if news.tokens:
                self._runtime.put_kv_rows(slot, _rows_of(news))
            self._sent.trim(slot, start)
            self._tokens.write(slot, start, news.tokens)
            if news.sent:
                self._sent.keep(slot, start, news.sent, sent_row_bytes)
            self._runtime.trim(slot, start + len(news.tokens))
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


def _rows_of(news: wire.SlotRows) -> KvRows:
    rows = KvRows.from_bytes(news.kv)
    if (rows.start, len(rows)) != (news.start, len(news.tokens)):
        raise ProtocolError(
            f"{len(news.tokens)} tokens from {news.start} on with rows {rows.start} to {rows.stop}"
        )
    return rows
