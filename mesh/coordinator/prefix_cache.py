"""Prefix cache: token ids held by each slot, and the longest shared prefix of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from spanmesh_proto.image_chunk import begin_of_chunk

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from spanmesh_proto.image_chunk import ImageChunk

# Below this many, computing tokens is as quick as going on from them.
_WORTHWHILE: Final = 8
# Between separate caches llama.cpp copies all positions of a slot, used or not: about as long as one token is
# computed, it copies this many. With fewer common tokens a session computes them anew.
_COPIED_PER_TOKEN: Final = 512


@dataclass(frozen=True)
class PrefixMatch:
    """Slot of a session, and the cached prefix of its prompt."""

    slot: int
    """Slot of the session."""
    source_slot: int
    """Slot that holds the first tokens of its prompt."""
    num_cached: int
    """Number of those tokens."""
    checkpoints: tuple[int, ...] = ()
    """Positions of the checkpoints among them, in models with recurrent layers. The end of what the source
    slot holds is none: to go on there, stages need no copy of the state, and keep none."""
    fetch: int = 0
    """Id of the fetch that has read them from disk, if no slot holds them; else 0."""
    floor: int = 0
    """Fewest positions to which a slot with this prefix can go back, besides 0."""
    is_carried: bool = False
    """Whether some of its rows may have been computed in another ring, by other hosts: then they, and what is
    computed from them, are not kept on disk under the identities of this ring."""


@dataclass(frozen=True)
class _CachedPrefix:
    client: str | None
    tokens: NDArray[np.int64]
    used: int
    return_points: tuple[int, ...] = ()
    floor: int = 0
    is_carried: bool = False


class PrefixCache:
    """Token ids whose positions every stage has in its KV cache, slot by slot.

    A slot is known to hold what verdicts have confirmed since its latest `Open`: before, its session may be
    given up with nothing computed. Of a running session also counts what it is expected to hold. Stages
    compare token ids before they use a slot, so a wrong expectation costs time only.

    Prefixes are shared only within one client, because the time to the first token shows what is cached.

    Args:
        num_slots: Number of slots.
        can_trim: Whether a slot can go back to fewer positions than it holds. If not, a session goes on from
            a free slot's latest return point within the common prefix.
        context_length: Positions of a slot, all of which a copy takes; 0 if copies cost nothing.
    """

    def __init__(self, num_slots: int, *, can_trim: bool = True, context_length: int = 0) -> None:
        self._cached: dict[int, _CachedPrefix] = {}
        self._expected: dict[int, _CachedPrefix] = {}
        self._num_slots = num_slots
        self._can_trim = can_trim
        self._least_copied = max(_WORTHWHILE, context_length // _COPIED_PER_TOKEN)
        self._num_uses = 0

    def match(
        self,
        prompt: Sequence[int],
        client: str | None,
        free: Collection[int],
        *,
        chunks: Sequence[ImageChunk] = (),
    ) -> PrefixMatch:
        """Choose a slot for a session, and the cached prefix that it begins with.

        The last token of the prompt is always left to compute: its row gives the first token of the answer.
        A free slot that shares most of what it holds is reused. From any other slot, in use or free, the
        common prefix is copied into the free slot that was used least recently, if it is long enough for a
        copy of the whole slot. From now on the chosen slot counts as empty.

        Args:
            prompt: Token ids.
            client: Client of the session.
            free: Slots without a session, at least one.
            chunks: Rows of the prompt that are no tokens: no session begins within one of them.
        """
        wanted = np.asarray(prompt[:-1], np.int64)
        prefixes = self._cached | self._expected
        common = {
            slot: num_common(wanted, cached.tokens)
            for slot, cached in prefixes.items()
            if cached.client == client
        }
        if chunks:
            common = {slot: begin_of_chunk(chunks, num) for slot, num in common.items()}
        common = {slot: num for slot, num in common.items() if num >= prefixes[slot].floor}
        if not self._can_trim:
            common = {
                slot: max(
                    (
                        point
                        for point in self._cached[slot].return_points
                        if point <= num and begin_of_chunk(chunks, point) == point
                    ),
                    default=0,
                )
                for slot, num in common.items()
                if slot in free and slot in self._cached
            }
        slot = min(free, key=lambda each: (self._used(each), each))
        common = {
            source: num
            for source, num in common.items()
            # What the chosen slot itself begins with costs no copy.
            if num >= self._least_copied or source == slot or self._is_reused(source, num, free)
        }
        source = max(common, key=lambda each: (common[each], each in free), default=slot)
        num_cached = common.get(source, 0)
        if num_cached < _WORTHWHILE:
            self.forget(slot)
            return PrefixMatch(slot, slot, 0)
        points = self._cached[source].return_points if source in self._cached else ()
        end = len(prefixes[source].tokens)
        if self._is_reused(source, num_cached, free):
            slot = source
        self.forget(slot)
        return PrefixMatch(
            slot,
            source,
            num_cached,
            tuple(each for each in points if each <= num_cached and each != end),
            floor=prefixes[source].floor,
            is_carried=prefixes[source].is_carried,
        )

    def expect(
        self,
        slot: int,
        client: str | None,
        tokens: Sequence[int],
        *,
        floor: int = 0,
        is_carried: bool = False,
    ) -> None:
        """Record what a running session's slot will hold when anything sent from now on arrives.

        Args:
            slot: Slot of the session; valid until the next `keep` or `forget`.
            client: Client of the session.
            tokens: Token ids from position 0 on, all of them sent.
            floor: See `PrefixMatch`.
            is_carried: See `PrefixMatch`.
        """
        self._expected[slot] = self._used_now(client, tokens, floor=floor, is_carried=is_carried)

    def keep(
        self,
        slot: int,
        client: str | None,
        tokens: Sequence[int],
        return_points: Sequence[int] = (),
        *,
        floor: int = 0,
        is_carried: bool = False,
    ) -> None:
        """Record what verdicts have confirmed since the slot's latest `Open`.

        Args:
            slot: The slot.
            client: Client of the session.
            tokens: Token ids from position 0 on, computed by every stage.
            return_points: Numbers of those tokens to which a slot that cannot be trimmed can go back.
            floor: See `PrefixMatch`.
            is_carried: See `PrefixMatch`.
        """
        self.forget(slot)
        if tokens:
            self._cached[slot] = self._used_now(
                client, tokens, tuple(return_points), floor=floor, is_carried=is_carried
            )

    def forget(self, slot: int) -> None:
        """Record that the content of the slot is unknown."""
        self._cached.pop(slot, None)
        self._expected.pop(slot, None)

    def forget_client(self, client: str | None) -> None:
        """Record that the content of every slot with a prefix of this client is unknown."""
        for slot, cached in (*self._cached.items(), *self._expected.items()):
            if cached.client == client:
                self.forget(slot)

    def forget_all(self) -> None:
        """Record that the content of every slot is unknown."""
        self._cached.clear()
        self._expected.clear()

    def _is_reused(self, slot: int, num_shared: int, free: Collection[int]) -> bool:
        """Whether a session goes on in a slot, of whose tokens it shares so many."""
        cached = self._cached.get(slot)
        return cached is not None and slot in free and 2 * num_shared >= len(cached.tokens)

    def _used_now(
        self,
        client: str | None,
        tokens: Sequence[int],
        return_points: tuple[int, ...] = (),
        *,
        floor: int = 0,
        is_carried: bool = False,
    ) -> _CachedPrefix:
        self._num_uses += 1
        ids = np.asarray(tokens, np.int64)
        return _CachedPrefix(client, ids, self._num_uses, return_points, floor, is_carried)

    def _used(self, slot: int) -> int:
        cached = self._cached.get(slot)
        return 0 if cached is None else cached.used


def num_common(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Length of the longest common prefix."""
    shorter = min(len(one), len(other))
    differs = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differs[0]) if len(differs) else shorter
