"""Request queue: slots, and the gate that holds requests while the ring is down."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mesh.coordinator.prefix_cache import PrefixCache
from mesh.util.fair_queue import FairQueue
from spanmesh_proto.errors import Overloaded, StageFailed
from speculative.cost_model import moved

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Sequence

    from mesh.coordinator.prefix_cache import PrefixMatch
    from spanmesh_proto.errors import MeshError
    from spanmesh_proto.image_chunk import ImageChunk

# Weight of each new time in the moving mean: about the latest dozen count.
_WEIGHT: Final = 1 / 8
# Estimate until the first slot is given back.
_UNKNOWN_S: Final = 5
_LEAST_S: Final = 1
_MOST_S: Final = 60
_RETRY_AFTER_S: Final = 5
# After recovery was given up.
_RETRY_LATER_S: Final = 10


class HoldTimes:
    """Moving means of the time for which sessions hold their slots, by the order of magnitude of their limit.

    A burst of short requests behind long ones is over sooner than any mean over all of them says.

    Args:
        num_slots: Concurrent sessions.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        # By the number of bits of the limit.
        self._means_s: dict[int, float] = {}

    def add(self, held_s: float, max_tokens: int = 1) -> None:
        """Record for how long a slot was held.

        Args:
            held_s: Seconds.
            max_tokens: Limit of the answer.
        """
        size = max_tokens.bit_length()
        self._means_s[size] = moved(self._means_s.get(size), held_s, _WEIGHT)

    def retry_after_s(self, waiting: Collection[int]) -> int:
        """Estimated time until all these requests have had a slot: whole seconds, 1 to 60.

        Args:
            waiting: Limits of the answers that wait, and of the one that asks.
        """
        if not self._means_s:
            return _UNKNOWN_S
        total_s = sum(self._expected_s(max_tokens.bit_length()) for max_tokens in waiting)
        return min(max(math.ceil(total_s / self._num_slots), _LEAST_S), _MOST_S)

    def _expected_s(self, size: int) -> float:
        nearest = min(self._means_s, key=lambda known: abs(known - size))
        # An answer of half the tokens takes about half the time; a longer one may well end by itself.
        return self._means_s[nearest] * 2.0 ** min(0, size - nearest)


@dataclass(eq=False)
class _WaitingRequest:
    """A request that waits for a slot."""

    slot: asyncio.Future[int]
    """Becomes its slot."""
    max_tokens: int
    """Limit of its answer."""


class SlotPool:
    """A fixed number of slots and a bounded queue for them.

    A slot owns the KV cache of a whole context at every stage, so slots are the token budget as well: a
    prompt that leaves room for one token in a context fits into any slot.

    Args:
        num_slots: Concurrent sessions.
        max_waiting: Requests that may wait; see `FairQueue`.
        clock_s: Monotonic clock, seconds.
        can_trim: See `PrefixCache`.
        context_length: Positions of a slot.

    Attributes:
        prefix_cache: Content of the slots.
    """

    def __init__(
        self,
        num_slots: int,
        max_waiting: int,
        clock_s: Callable[[], float],
        *,
        can_trim: bool = True,
        context_length: int = 0,
    ) -> None:
        self.prefix_cache = PrefixCache(num_slots, can_trim=can_trim, context_length=context_length)
        self._free = set(range(num_slots))
        self._queue: FairQueue[str | None, _WaitingRequest] = FairQueue(max_waiting)
        self._hold_times = HoldTimes(num_slots)
        self._num_slots = num_slots
        self._clock_s = clock_s

    @property
    def num_busy(self) -> int:
        """Slots with a session."""
        return self._num_slots - len(self._free)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @contextlib.asynccontextmanager
    async def hold(
        self,
        prompt: Sequence[int] = (),
        client: str | None = None,
        max_tokens: int = 1,
        *,
        chunks: Sequence[ImageChunk] = (),
    ) -> AsyncIterator[PrefixMatch]:
        """A slot for the `with` block, and the cached prefix of the prompt.

        Args:
            prompt: Token ids; empty to begin without a prefix.
            client: Client of the request; clients take turns.
            max_tokens: Limit of the answer.
            chunks: See `PrefixCache.match`.

        Raises:
            Overloaded: If the queue is full.
        """
        free = await self._acquire(client, max_tokens)
        prefix_match = self.prefix_cache.match(prompt, client, free, chunks=chunks)
        self._free.discard(prefix_match.slot)
        since_s = self._clock_s()
        try:
            yield prefix_match
        finally:
            self._hold_times.add(self._clock_s() - since_s, max_tokens)
            self._release(prefix_match.slot)

    async def _acquire(self, client: str | None, max_tokens: int) -> set[int]:
        """Free slots, of which one is reserved for the caller until its next await."""
        if self._free:
            return self._free
        if not self._queue.has_room(client):
            raise self._overloaded(client, max_tokens)
        turn = _WaitingRequest(asyncio.get_running_loop().create_future(), max_tokens)
        self._queue.add(client, turn)
        try:
            return {await turn.slot}
        except asyncio.CancelledError:
            if turn.slot.done() and not turn.slot.cancelled():
                self._release(turn.slot.result())
            else:
                self._queue.discard(client, turn)
            raise

    def _release(self, slot: int) -> None:
        while (turn := self._queue.next()) is not None:
            if not turn.slot.done():
                turn.slot.set_result(slot)
                return
        self._free.add(slot)

    def _overloaded(self, client: str | None, max_tokens: int) -> Overloaded:
        waiting = [*(turn.max_tokens for turn in self._queue), max_tokens]
        retry_after_s = self._hold_times.retry_after_s(waiting)
        own = self._queue.num_of(client)
        whose = "" if client is None else f", {own} of them with this API key"
        return Overloaded(
            f"all {self._num_slots} slots are busy and {len(self._queue)} requests wait{whose}: try again in "
            f"{retry_after_s} s, or serve with a larger --parallel or --max-waiting",
            retry_after_s=retry_after_s,
        )


class RequestGate:
    """Gate for new requests: open, on hold during a recovery, or shut with an error. Begins open.

    Args:
        patience_s: Longest time that a request waits, in seconds, from its arrival or the loss of the ring.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._refusal: MeshError | None = None
        self._opening = asyncio.Event()
        self._opening.set()
        self._waits: set[asyncio.Timeout] = set()

    @property
    def is_open(self) -> bool:
        """Whether requests begin at once."""
        return self._opening.is_set()

    @property
    def refusal(self) -> StageFailed | None:
        """The error for new requests while they are refused at once."""
        if self._refusal is None:
            return None
        return StageFailed(self._refusal.message, retry_after_s=self._refusal.retry_after_s or _RETRY_LATER_S)

    def open(self) -> None:
        """Let all requests begin."""
        self._refusal = None
        self._opening.set()
        self._limit(None)

    def hold(self) -> None:
        """Hold requests for at most the patience; a gate that is shut stays shut."""
        if self.is_open:
            self._opening.clear()
            self._limit(self._patience_s)

    def shut(self, refusal: MeshError) -> None:
        """Refuse all requests, waiting ones included."""
        self._refusal = refusal
        self._opening.clear()
        self._limit(0.0)

    async def opened(self) -> None:
        """Wait until the gate is open; only within `patience`."""
        while not self.is_open:
            await self._opening.wait()

    @contextlib.asynccontextmanager
    async def patience(self) -> AsyncIterator[None]:
        """Context in which a request may wait, for the gate and for a slot.

        Raises:
            StageFailed: If the gate stays closed for too long, or is shut.
        """
        self._raise_refusal()
        try:
            async with asyncio.timeout(None if self.is_open else self._patience_s) as wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            self._raise_refusal()
            raise StageFailed(
                f"the mesh is being repaired, and the repair was not complete within {self._patience_s:g} s: "
                "try again in a moment",
                retry_after_s=_RETRY_AFTER_S,
            ) from None

    def _limit(self, in_s: float | None) -> None:
        when = None if in_s is None else asyncio.get_running_loop().time() + in_s
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(when)

    def _raise_refusal(self) -> None:
        if (refusal := self.refusal) is not None:
            raise refusal
