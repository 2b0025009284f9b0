"""Which tokens each slot of a stage holds, and how much of that others have been told. Pure."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from stages.sampling.verifier import TokenRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class SlotTokens:
    """Token ids by slot and position, as the KV cache has them. Follows every change of the cache.

    Args:
        num_slots: Slots that there are.
    """

    def __init__(self, num_slots: int) -> None:
        self._records = [TokenRecord() for _ in range(num_slots)]
        self._marks: list[Marks] = []

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

    def follow(self, marks: Marks) -> None:
        """Keep the marks of somebody who is told of every slot, until `unfollow`."""
        self._marks.append(marks)

    def unfollow(self, marks: Marks) -> None:
        """Keep them no more."""
        self._marks.remove(marks)

    def _lower(self, slot: int, start: int) -> None:
        for marks in self._marks:
            marks.told[slot] = min(marks.told[slot], start)


class Marks:
    """What somebody has been told of the slots.

    Args:
        num_slots: Slots that there are.

    Attributes:
        told: By slot, how many of its first positions, as they are now.
        sessions: By slot, which session's they were; 0 for none.
    """

    def __init__(self, num_slots: int) -> None:
        self.told = [0] * num_slots
        self.sessions = [0] * num_slots
