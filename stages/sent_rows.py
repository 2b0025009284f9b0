"""What a stage sent on, kept so that it can send it again. Pure.

A stage that was lost has to compute all its sessions anew, and for that it needs what the stage before it
gave: hidden states, which no KV cache holds. Kept here, they leave a second time without a layer being
computed. So a repair costs what the lost stage computes, not what all do. Petals keeps the inputs of every
server at its clients for that (Borzunov et al. 2023); here each stage keeps its own outputs, and the
coordinator never sees hidden states.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

# Enough for a few short sessions.
LEAST_SENT_BYTES: Final = 8 * 2**20
# Of most models a row is about a fifth of what a stage's KV cache takes for it.
SHARE_OF_CACHE: Final = 32


def room_for_sent_rows(cache_bytes: int) -> int:
    """How many bytes of rows a stage keeps at most.

    Args:
        cache_bytes: Its KV cache.
    """
    return max(LEAST_SENT_BYTES, cache_bytes // SHARE_OF_CACHE)


class SentRows:
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
