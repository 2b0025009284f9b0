"""Prefix cache: what slots hold, and the longest shared prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

# Fewer tokens are computed as quickly as they are found again.
_WORTHWHILE: Final = 8


@dataclass(frozen=True)
class PrefixMatch:
    """Where a session begins.

    Attributes:
        slot: Its own.
        source_slot: The slot that holds the first tokens of its prompt.
        num_cached: How many those are.
    """

    slot: int
    source_slot: int
    num_cached: int


@dataclass(frozen=True)
class _CachedPrefix:
    client: str | None
    tokens: NDArray[np.int64]
    used: int


class PrefixCache:
    """Token ids whose positions every stage has in its KV cache, slot by slot.

    What a slot is known to hold is what a verdict has confirmed since the slot's latest `Open`: until then
    its session may be given up with nothing computed. What it is expected to hold counts as well while its
    session runs. Stages compare tokens before they use a slot: what was expected in vain costs time only.

    A client is given its own only: how long an answer takes to begin tells what is cached.

    Args:
        num_slots: Slots that there are.
        can_trim: Whether a slot can go back to fewer positions than it holds. If not, a session begins with
            what a free slot holds only if that is all of it.
    """

    def __init__(self, num_slots: int, *, can_trim: bool = True) -> None:
        self._cached: dict[int, _CachedPrefix] = {}
        self._expected: dict[int, _CachedPrefix] = {}
        self._num_slots = num_slots
        self._can_trim = can_trim
        self._num_uses = 0

    def match(self, prompt: Sequence[int], client: str | None, free: Collection[int]) -> PrefixMatch:
        """Choose a slot for a session, and what of other slots it begins with.

        The last token of the prompt is always left to compute: its row gives the first token of the answer.
        A free slot that shares most of what it holds is taken over. From any other, be it in use, the common
        part is copied into the free slot that was used least recently. The slot that is chosen holds nothing
        that is known from now on.

        Args:
            prompt: Token ids.
            client: Whose it is.
            free: Slots that no session has: at least one.
        """
        wanted = np.asarray(prompt[:-1], np.int64)
        common = {
            slot: num_common(wanted, cached.tokens)
            for slot, cached in (self._cached | self._expected).items()
            if cached.client == client
        }
        if not self._can_trim:
            common = {
                slot: num
                for slot, num in common.items()
                if slot in free and num == len(self._cached[slot].tokens)
            }
        slot = min(free, key=lambda each: (self._used(each), each))
        source = max(common, key=lambda each: (common[each], each in free), default=slot)
        num_cached = common.get(source, 0)
        if num_cached < _WORTHWHILE:
            self.forget(slot)
            return PrefixMatch(slot, slot, 0)
        if source in free and 2 * num_cached >= len(self._cached[source].tokens):
            slot = source
        self.forget(slot)
        return PrefixMatch(slot, source, num_cached)

    def expect(self, slot: int, client: str | None, tokens: Sequence[int]) -> None:
        """Note what a running session's slot will hold by the time that anything sent from now on arrives.

        Args:
            slot: The session's: counts until the next `keep` or `forget`.
            client: Whose it is.
            tokens: Ids, from position 0 on, of which everything has been sent.
        """
        self._expected[slot] = self._used_now(client, tokens)

    def keep(self, slot: int, client: str | None, tokens: Sequence[int]) -> None:
        """Note what verdicts have confirmed since the slot's latest `Open`.

        Args:
            slot: The slot.
            client: Whose it is.
            tokens: Ids that every stage has computed, from position 0 on.
        """
        self.forget(slot)
        if tokens:
            self._cached[slot] = self._used_now(client, tokens)

    def forget(self, slot: int) -> None:
        """Note that it is not known what the slot holds."""
        self._cached.pop(slot, None)
        self._expected.pop(slot, None)

    def forget_all(self) -> None:
        """Note that it is not known what any slot holds."""
        self._cached.clear()
        self._expected.clear()

    def _used_now(self, client: str | None, tokens: Sequence[int]) -> _CachedPrefix:
        self._num_uses += 1
        return _CachedPrefix(client, np.asarray(tokens, np.int64), self._num_uses)

    def _used(self, slot: int) -> int:
        cached = self._cached.get(slot)
        return 0 if cached is None else cached.used


def num_common(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Length of the longest common prefix."""
    shorter = min(len(one), len(other))
    differs = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differs[0]) if len(differs) else shorter
