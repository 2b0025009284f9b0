"""Who is next: requests of several clients that wait, each client getting its turn."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Line(Generic[Item]):
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

    def has_place(self, client: str | None) -> bool:
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
