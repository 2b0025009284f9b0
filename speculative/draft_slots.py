"""Which sequence of a draft model's KV cache a session gets.

A closed session leaves its rows behind. A later one that begins with the same tokens, the next turn of a
conversation or another with the same system prompt, takes them over instead of computing them again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class DraftSlots:
    """The free slots and what they hold.

    Args:
        num_slots: How many there are, numbered from 0.
    """

    def __init__(self, num_slots: int) -> None:
        self._held: dict[int, list[int]] = {slot: [] for slot in range(num_slots)}

    def take(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """The free slot that holds most of how `tokens` begins, and how much; None if none is free."""
        if not self._held:
            return None
        slot = max(self._held, key=lambda slot: _num_shared(self._held[slot], tokens))
        return slot, _num_shared(self._held.pop(slot), tokens)

    def give_back(self, slot: int, tokens: Sequence[int]) -> None:
        """A slot is free again, and holds the rows of `tokens`."""
        self._held[slot] = list(tokens)


def _num_shared(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for mine, other in zip(left, right, strict=False):
        if mine != other:
            break
        count += 1
    return count
