"""Request queue: slots, fairness among clients, and waiting while the ring is down."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from mesh.coordinator.prefix_cache import PrefixCache
from spanmesh_proto.errors import Overloaded, StageFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from mesh.coordinator.prefix_cache import PrefixMatch
    from spanmesh_proto.errors import MeshError


Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """A bounded line in which clients take turns (round robin, as in fair queueing: Nagle, RFC 970).

    Among one client's own, first come is first served. A client that begins to wait has its turn after one
    of each client that waited before, however many those have in the line.

    A client that has nobody in the line may always put one there, so no other can keep it out. Beyond that
    the line holds so many, and of those each client at most its share: the whole line while it waits alone,
    half of it while two wait. Whoever holds more when another comes loses nobody; it may add none.

    Args:
        most: Requests that may wait, as long as each client has but one of them: at least 1.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # In the order of their next turns.
        self._waiting: dict[str | None, deque[Item]] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def num_of(self, client: str | None) -> int:
        """How many of a client's wait."""
        return len(self._waiting.get(client, ()))

    def has_room(self, client: str | None) -> bool:
        """Whether one more of a client's may wait."""
        own = self.num_of(client)
        return not own or (self._num_waiting < self._most and own < self._most // len(self._waiting))

    def add(self, client: str | None, item: Item) -> None:
        """Put a request behind the client's others."""
        self._waiting.setdefault(client, deque()).append(item)
        self._num_waiting += 1

    def next(self) -> Item | None:
        """Take out whose turn it is; None if nobody waits."""
        if not self._waiting:
            return None
        client = next(iter(self._waiting))
        own = self._waiting.pop(client)
        item = own.popleft()
        if own:
            self._waiting[client] = own
        self._num_waiting -= 1
        return item

    def discard(self, client: str | None, item: Item) -> None:
        """Take out one that does not want its turn any more; nothing happens if it just had it."""
        own = self._waiting.get(client)
        if own is None or item not in own:
            return
        own.remove(item)
        self._num_waiting -= 1
        if not own:
            del self._waiting[client]


# Of each new time in the moving mean: what counts are the latest dozen or so.
_WEIGHT: Final = 1 / 8
# Until a slot was given back for the first time.
_UNKNOWN_S: Final = 5
_LEAST_S: Final = 1
_MOST_S: Final = 60


class HoldTimes:
    """A moving mean of how long sessions keep their slots.

    Args:
        num_slots: Sessions that run at once.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._mean_s: float | None = None

    def add(self, held_s: float) -> None:
        """A slot was given back after so long."""
        self._mean_s = held_s if self._mean_s is None else self._mean_s + _WEIGHT * (held_s - self._mean_s)

    def retry_after_s(self, place: int) -> int:
        """Whole seconds until whoever stands there in the line has its turn, 1 to 60.

        Args:
            place: From 1 on.
        """
        if self._mean_s is None:
            return _UNKNOWN_S
        return min(max(math.ceil(place * self._mean_s / self._num_slots), _LEAST_S), _MOST_S)


class SlotPool:
    """A fixed number of slots and a bounded line in front of them.

    A slot owns the KV cache of a whole context at every stage, so slots are the budget of tokens as well:
    a prompt that leaves room for one more token in a context fits once it has a slot.

    Args:
        num_slots: Sessions that run at once.
        max_waiting: Requests that may wait; see `FairQueue`.
        clock_s: Monotonic, seconds.
        can_trim: See `PrefixCache`.

    Attributes:
        prefix_cache: What the slots hold.
    """

    def __init__(
        self, num_slots: int, max_waiting: int, clock_s: Callable[[], float], *, can_trim: bool = True
    ) -> None:
        self.prefix_cache = PrefixCache(num_slots, can_trim=can_trim)
        self._free = set(range(num_slots))
        self._queue: FairQueue[asyncio.Future[int]] = FairQueue(max_waiting)
        self._hold_times = HoldTimes(num_slots)
        self._num_slots = num_slots
        self._clock_s = clock_s

    @property
    def num_busy(self) -> int:
        """Slots in use."""
        return self._num_slots - len(self._free)

    @property
    def num_waiting(self) -> int:
        """Requests in the line."""
        return len(self._queue)

    @contextlib.asynccontextmanager
    async def hold(self, prompt: Sequence[int] = (), client: str | None = None) -> AsyncIterator[PrefixMatch]:
        """A slot for the length of the `with` block, and what of the prompt the slots hold already.

        Args:
            prompt: Token ids; none to begin with nothing.
            client: Whose request it is; those of different clients take turns.

        Raises:
            Overloaded: If the line has no place for it.
        """
        free = await self._acquire(client)
        prefix_match = self.prefix_cache.match(prompt, client, free)
        self._free.discard(prefix_match.slot)
        since_s = self._clock_s()
        try:
            yield prefix_match
        finally:
            self._hold_times.add(self._clock_s() - since_s)
            self._release(prefix_match.slot)

    async def _acquire(self, client: str | None) -> set[int]:
        """Slots of which one may be taken, before anything else is awaited."""
        if self._free:
            return self._free
        if not self._queue.has_room(client):
            raise self._overloaded(client)
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._queue.add(client, turn)
        try:
            return {await turn}
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(turn.result())
            else:
                self._queue.discard(client, turn)
            raise

    def _release(self, slot: int) -> None:
        while (turn := self._queue.next()) is not None:
            if not turn.done():
                turn.set_result(slot)
                return
        self._free.add(slot)

    def _overloaded(self, client: str | None) -> Overloaded:
        retry_after_s = self._hold_times.retry_after_s(len(self._queue) + 1)
        own = self._queue.num_of(client)
        whose = "" if client is None else f", {own} of them with this API key"
        return Overloaded(
            f"all {self._num_slots} slots are busy and {len(self._queue)} requests wait{whose}: try again in "
            f"{retry_after_s} s, or serve with a larger --parallel or --max-waiting",
            retry_after_s=retry_after_s,
        )


_RETRY_AFTER_S: Final = 5
# Once repairing was given up.
_RETRY_LATER_S: Final = 10


class RequestGate:
    """Lets requests in, holds them up for a while, or turns them away. Begins open.

    Args:
        patience_s: How long a request waits at most, in seconds, since it came or since the ring broke.
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
        """Why requests are turned away at once, if they are; one to raise."""
        if self._refusal is None:
            return None
        return StageFailed(self._refusal.message, retry_after_s=self._refusal.retry_after_s or _RETRY_LATER_S)

    def open(self) -> None:
        """Let everybody in."""
        self._refusal = None
        self._opening.set()
        self._limit(None)

    def hold(self) -> None:
        """Let nobody in for now, and nobody wait longer than the patience allows. A shut gate stays so."""
        if self.is_open:
            self._opening.clear()
            self._limit(self._patience_s)

    def shut(self, refusal: MeshError) -> None:
        """Turn everybody away, those who wait as well."""
        self._refusal = refusal
        self._opening.clear()
        self._limit(0.0)

    async def opened(self) -> None:
        """Wait until the gate is open; within `patience` only."""
        while not self.is_open:
            await self._opening.wait()

    @contextlib.asynccontextmanager
    async def patience(self) -> AsyncIterator[None]:
        """A block in which a request waits: for the gate, and for whatever else stands before its beginning.

        Raises:
            StageFailed: If the gate is closed for too long meanwhile, or for good.
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
                f"the mesh is being repaired and was not whole again within {self._patience_s:g} s: try "
                "again in a moment",
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
