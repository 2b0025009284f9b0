"""Rows that a stage sent, kept for replays."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

# Enough for a few short sessions.
LEAST_SENT_BYTES: Final = 8 * 2**20
# For most models a row is about a fifth of its share of a stage's KV cache.
SHARE_OF_CACHE: Final = 32


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


def max_sent_bytes(cache_bytes: int) -> int:
    """Most bytes of rows that a stage keeps.

    Args:
        cache_bytes: Size of its KV cache.
    """
    return max(LEAST_SENT_BYTES, cache_bytes // SHARE_OF_CACHE)
