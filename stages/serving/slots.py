"""KV cache by slot: token ids, rows kept for replays, copies and trims.

The three always hold the same positions, so all changes go through this module.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from spanmesh_proto.errors import MeshError, PrefixMismatch, UncuttableModel
from stages.runtime.row_positions import TOKENS_ONLY
from stages.sampling.verifier import TokenRecord
from stages.serving.sent_rows import SentHiddenStates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stages.runtime.row_positions import RowPositions
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
        positions: RowPositions = TOKENS_ONLY,
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
            positions: Positions of the session's rows.

        Raises:
            PrefixMismatch: If nothing was brought, and no slot holds these tokens and can go back to their
                end; or if llama.cpp does not take the rows.
        """
        self._note_begin(slot, len(cached))
        num_cached = len(cached)
        if brought is not None and brought.serves(cached):
            # Even if the slot holds these tokens: it may be unable to go back to their end, or hold rows that
            # were computed in another ring and are not those of the blocks' identities.
            self._put(slot, brought)
            num_kept = num_cached if self.memory.computes_alike(slot, num_cached, positions) else None
        else:
            num_kept = self._return_point(slot, cached, num_resumed, sent_row_bytes, positions)
            if num_kept is None and source != slot and self._can_begin_as(source, cached, positions):
                self._copy(source, slot, num_cached, positions)
                num_kept = num_cached
        if num_kept is None:
            raise PrefixMismatch(
                f"a session begins in slot {slot} with {num_cached} cached tokens of slot {source}, which "
                f"{self._lack(source, cached, positions)}: compute them again"
            )
        self.memory.lay_out(slot, num_kept, positions)
        self.trim(slot, num_kept)
        self._note_begin(slot, num_kept)

    def _can_begin_as(self, slot: int, cached: Sequence[int], positions: RowPositions) -> bool:
        """Whether a slot holds these first tokens, and a session can go on from their end."""
        num_cached = len(cached)
        is_held = self._num_alike(slot, cached, positions) == num_cached
        can_go_on = self.memory.can_go_back(slot, num_cached)
        return is_held and can_go_on and self.memory.computes_alike(slot, num_cached, positions)

    def _num_alike(self, slot: int, cached: Sequence[int], positions: RowPositions) -> int:
        """Number of the cached rows that a slot holds, with these positions."""
        num_same = self.tokens.num_same(slot, 0, cached)
        return min(num_same, self.memory.num_alike(slot, positions)) if num_same else 0

    def _lack(self, slot: int, cached: Sequence[int], positions: RowPositions) -> str:
        """Reason why a session cannot begin with these tokens of a slot, for a message."""
        num_same = self.tokens.num_same(slot, 0, cached)
        if num_same < len(cached):
            return f"has only the first {num_same} of them"
        if (num_alike := self._num_alike(slot, cached, positions)) < len(cached):
            return f"has rows that are no tokens elsewhere, behind the first {num_alike}"
        if not self.memory.computes_alike(slot, len(cached), positions):
            return "was brought, and behind it follow rows that sliding windows over it would round otherwise"
        if self.runtime.info.can_trim:
            return "lacks rows in sliding windows before their end"
        points = list(self.memory.return_points(slot))
        return f"can go back to positions {points} only, with recurrent state"

    def _copy(self, source: int, slot: int, num_positions: int, positions: RowPositions) -> None:
        """Replace the content of a slot by the first positions of another."""
        self.trim(slot, 0)
        try:
            self.memory.copy(source, slot, num_positions, positions)
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

    def _put(self, slot: int, brought: Prefix) -> None:
        """Replace the content of a slot by a prefix that a plug has brought."""
        self.trim(slot, 0)
        try:
            brought.put_into(self.memory, slot)
        except (MeshError, MemoryError) as error:
            raise PrefixMismatch(
                f"slot {slot} does not take {len(brought.tokens)} positions {brought.origin}, so they are "
                f"computed: {error}"
            ) from error
        self.tokens.write(slot, 0, brought.tokens.tolist())

    def _return_point(
        self,
        slot: int,
        cached: Sequence[int],
        num_resumed: int,
        sent_row_bytes: int,
        positions: RowPositions,
    ) -> int | None:
        """Number of a slot's positions that a session goes on from: as many as may be the session's.

        With recurrent state that is the latest point to which the slot can go back, and before which no row
        has to be computed: what was sent for the others has to be there. None if the slot holds other tokens
        than the cached ones, or cannot go back to a position at their end or behind it.
        """
        num_cached = len(cached)
        if self._num_alike(slot, cached, positions) < num_cached:
            return None
        num_positions = min(
            max(num_cached, num_resumed), self.tokens.length(slot), self.memory.num_alike(slot, positions)
        )
        info = self.runtime.info
        if not (info.can_trim or info.is_tail):
            num_positions = min(num_positions, max(num_cached, self.sent.num_rows(slot, sent_row_bytes)))
        found = self.memory.latest_return(slot, num_cached, num_positions)
        if found and not self.memory.computes_alike(slot, found, positions):
            return None if num_cached else 0
        return found

    def num_reusable(self, span: Span, most: int, sent_row_bytes: int) -> int:
        """Number of first rows of a resumed session's window that need not be computed.

        The slot holds them, and what was sent for them is there. They end where the slot can go back to,
        unless they are all of the window's rows: with recurrent state, or within rows that are no tokens,
        not everywhere.

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
        if num_held == len(span.tokens) or self.memory.can_go_back(slot, start + num_held):
            return num_held
        stop = self.memory.latest_return(slot, start, start + num_held)
        if stop is None:
            points = list(self.memory.return_points(slot))
            raise PrefixMismatch(
                f"slot {slot} holds {num_held} rows of a resumed session from position {start} on, and "
                "cannot compute the next: for recurrent state or rows that are no tokens "
                f"it can go back to {points} only"
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
