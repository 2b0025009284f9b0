"""KV cache by slot: token ids, rows kept for replays, copies and trims.

The three always hold the same positions, so all changes go through this module.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from spanmesh_proto.errors import MeshError, PrefixMismatch, UncuttableModel
from stages.sampling.verifier import TokenRecord
from stages.serving.sent_rows import SentHiddenStates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stages.runtime.slot_memory import Prefix
    from stages.runtime.spans import Span
    from stages.runtime.stage_runtime import StageRuntime


class SlotListener:
    """What takes part in the slots of a stage beside the core. For the computing thread."""

    def began(self, slot: int, num_positions: int) -> None:
        """A session has begun in a slot, with so many positions."""

    def computed(self, slot: int, num_committed: int) -> None:
        """Rows of a slot were computed.

        Args:
            slot: The slot.
            num_committed: Number of its tokens that are no proposals; 0 if that is not known.
        """

    def changed(self, slot: int, start: int) -> None:
        """A slot holds other tokens than before from this position on, or none."""


class SlotTokens:
    """Token ids by slot and position. Changed together with the KV cache.

    Args:
        num_slots: Number of slots.

    Attributes:
        listeners: Called with every change.
    """

    def __init__(self, num_slots: int) -> None:
        self._records = [TokenRecord() for _ in range(num_slots)]
        self.listeners: list[SlotListener] = []

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
        for listener in self.listeners:
            listener.changed(slot, start)

    def trim(self, slot: int, start: int) -> None:
        """Drop a slot's tokens from a position on."""
        if start < self.length(slot):
            self.write(slot, start, ())

    def copy(self, source: int, slot: int, num_positions: int) -> None:
        """Replace a slot's tokens by the first tokens of another."""
        self.write(slot, 0, self._records[source].before(num_positions).tolist())


class KvSlots:
    """KV cache, token ids and sent rows of one stage, by slot.

    Args:
        runtime: Runtime with the KV cache.
        most_sent_bytes: Most bytes of sent rows that are kept.

    Attributes:
        runtime: Runtime with the KV cache.
        memory: That cache.
        sent: Rows that the stage sent.
        tokens: Token ids.
    """

    def __init__(self, runtime: StageRuntime, most_sent_bytes: int) -> None:
        self.runtime = runtime
        self.memory = runtime.memory
        self.sent = SentHiddenStates(runtime.num_slots, most_sent_bytes)
        self.tokens = SlotTokens(runtime.num_slots)

    def trim(self, slot: int, num_positions: int) -> None:
        """Drop all but the first positions of a slot.

        Raises:
            UncuttableModel: If its memory cannot go back to this position.
        """
        self.memory.trim(slot, num_positions)
        self.sent.trim(slot, num_positions)
        self.tokens.trim(slot, num_positions)

    def begin(
        self,
        slot: int,
        source: int,
        cached: Sequence[int],
        num_resumed: int,
        sent_row_bytes: int,
        *,
        brought: Prefix | None = None,
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
            brought: The prefix as a plug has brought it; None if it has to be in a slot.

        Raises:
            PrefixMismatch: If nothing was brought, and no slot holds these tokens and can go back to their
                end; or if llama.cpp does not take the rows.
        """
        self._note_begin(slot, len(cached))
        if brought is not None and brought.serves(cached):
            # Even if the slot holds these tokens: it may be unable to go back to their end, or hold rows that
            # were computed in another ring and are not those of the blocks' identities.
            self._put(slot, brought, len(cached))
            return
        num_kept = self._return_point(slot, cached, num_resumed, sent_row_bytes)
        if num_kept is not None:
            self.trim(slot, num_kept)
            self._note_begin(slot, num_kept)
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
        is_held = self.tokens.num_same(slot, 0, cached) == num_cached
        return is_held and self.memory.can_go_back(slot, num_cached)

    def _lack(self, slot: int, cached: Sequence[int]) -> str:
        """Reason why a session cannot begin with these tokens of a slot, for a message."""
        num_same = self.tokens.num_same(slot, 0, cached)
        if num_same < len(cached):
            return f"has only the first {num_same} of them"
        if self.runtime.info.can_trim:
            return "lacks rows in sliding windows before their end"
        points = list(self.memory.return_points(slot))
        return f"can go back to positions {points} only, with recurrent state"

    def _copy(self, source: int, slot: int, num_positions: int) -> None:
        """Replace the content of a slot by the first positions of another."""
        self.trim(slot, 0)
        try:
            self.memory.copy(source, slot, num_positions)
        except (MeshError, MemoryError) as error:
            raise PrefixMismatch(
                f"{num_positions} positions of slot {source} cannot be copied to slot {slot}, so they are "
                f"computed: {error}"
            ) from error
        self.sent.copy(source, slot, num_positions)
        self.tokens.copy(source, slot, num_positions)

    def _note_begin(self, slot: int, num_positions: int) -> None:
        for listener in self.tokens.listeners:
            listener.began(slot, num_positions)

    def _put(self, slot: int, brought: Prefix, num_positions: int) -> None:
        """Replace the content of a slot by the first positions of a prefix that a plug has brought."""
        self.trim(slot, 0)
        try:
            brought.put_into(self.memory, slot)
        except (MeshError, MemoryError) as error:
            raise PrefixMismatch(
                f"slot {slot} does not take {len(brought.tokens)} positions {brought.origin}, so they are "
                f"computed: {error}"
            ) from error
        self.tokens.write(slot, 0, brought.tokens.tolist())
        self.trim(slot, num_positions)

    def _return_point(
        self, slot: int, cached: Sequence[int], num_resumed: int, sent_row_bytes: int
    ) -> int | None:
        """Number of a slot's positions that a session goes on from: as many as may be the session's.

        With recurrent state that is the latest point to which the slot can go back, and before which no row
        has to be computed: what was sent for the others has to be there. None if the slot holds other tokens
        than the cached ones, or cannot go back to a position at their end or behind it.
        """
        num_cached = len(cached)
        if self.tokens.num_same(slot, 0, cached) < num_cached:
            return None
        num_positions = min(max(num_cached, num_resumed), self.tokens.length(slot))
        info = self.runtime.info
        if not (info.can_trim or info.is_tail):
            num_positions = min(num_positions, max(num_cached, self.sent.num_rows(slot, sent_row_bytes)))
        return self.memory.latest_return(slot, num_cached, num_positions)

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
        num_held = self.tokens.num_same(slot, start, span.tokens[:most]) if most > 0 else 0
        if num_held and not self.runtime.info.is_tail:
            # Those of the session that sent least recently are dropped when others need the room.
            num_held = min(num_held, max(0, self.sent.num_rows(slot, sent_row_bytes) - start))
        if self.runtime.info.can_trim or num_held == len(span.tokens):
            return num_held
        stop = self.memory.latest_return(slot, start, start + num_held)
        if stop is None:
            points = list(self.memory.return_points(slot))
            raise PrefixMismatch(
                f"slot {slot} holds {num_held} rows of a resumed session from position {start} on, and with "
                f"recurrent state it cannot compute the next one: it can go back to {points} only"
            )
        return stop - start

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
        self.tokens.write(span.slot, span.start, span.tokens)
        for listener in self.tokens.listeners:
            listener.computed(span.slot, num_committed)

    def sent_on(self, span: Span, rows: bytes) -> None:
        """Record the rows that were sent; empty at the tail."""
        if rows:
            # By their own size: the wire type of later windows may differ.
            self.sent.keep(span.slot, span.start, rows, len(rows) // len(span.tokens))

    def find_sent(self, span: Span, row_bytes: int) -> bytes | None:
        """Sent rows of these positions; None if some are missing or have another size."""
        return self.sent.find(span.slot, span.start, len(span.tokens), row_bytes)
