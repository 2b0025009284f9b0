"""A bounded queue in which clients take turns."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Client = TypeVar("Client", bound=Hashable)
Item = TypeVar("Item")


class FairQueue(Generic[Client, Item]):
    """A bounded queue in which clients take turns (round robin, as in fair queueing: Nagle, RFC 970).

    Requests of one client are served in the order of arrival. A client that begins to wait has its turn after
    one request of each client that waited before, however many requests those have in the queue.

    A client with no request in the queue may always add one, so no client can keep another out. Beyond that
    the queue is bounded, and each client to its share: the whole queue while it waits alone, half of it while
    two wait. A client above its share when another one comes keeps its requests, but may not add any.

    Args:
        most: Requests that may wait, as long as each client has no more than one of them: at least 1.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # In the order of the clients' next turns.
        self._waiting: dict[Client, deque[Item]] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Item]:
        return itertools.chain.from_iterable(self._waiting.values())

    def num_of(self, client: Client) -> int:
        """Number of waiting requests of a client."""
        return len(self._waiting.get(client, ()))

    def has_room(self, client: Client) -> bool:
        """Whether a client may add a request."""
        own = self.num_of(client)
        return not own or (self._num_waiting < self._most and own < self._most // len(self._waiting))

    def add(self, client: Client, item: Item) -> None:
        """Add a request behind the client's others."""
        self._waiting.setdefault(client, deque()).append(item)
        self._num_waiting += 1

    def next(self, may_begin: Callable[[Client], bool] = lambda _client: True) -> Item | None:
        """Remove and return the next request; None if there is none.

        Args:
            may_begin: Whether a client may have a turn now; others keep their places in the order.
        """
        turns = [client for client in self._waiting if may_begin(client)]
        if not turns:
            return None
        client = turns[0]
        own = self._waiting.pop(client)
        item = own.popleft()
        if own:
            self._waiting[client] = own
        self._num_waiting -= 1
        return item

    def discard(self, client: Client, item: Item) -> None:
        """Remove a request that is not waited for any more; no effect if it has just been taken."""
        own = self._waiting.get(client)
        if own is None or item not in own:
            return
        own.remove(item)
        self._num_waiting -= 1
        if not own:
            del self._waiting[client]
