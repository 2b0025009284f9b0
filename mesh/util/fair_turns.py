"""Turns of clients at something that does a few things at a time."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from mesh.util.fair_queue import FairQueue
from spanmesh_proto.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class FairTurns:
    """Turns at something that does a few things at a time; clients wait fairly, see `FairQueue`.

    Args:
        num_at_once: Turns at the same time.
        most_waiting: Requests that may wait for one.
        what: What they wait for, for messages, such as `pictures`.
        retry_after_s: When a client that is refused may try again, in seconds.
    """

    def __init__(self, num_at_once: int, most_waiting: int, what: str, *, retry_after_s: int) -> None:
        self._num_free = num_at_once
        self._what = what
        self._retry_after_s = retry_after_s
        self._queue = FairQueue[str | None, asyncio.Future[None]](most_waiting)

    @asynccontextmanager
    async def turn(self, client: str | None) -> AsyncIterator[None]:
        """Context of one turn, which waits for it.

        Args:
            client: Client of the request.

        Raises:
            Overloaded: If too many wait, of this client or of all.
        """
        if not self._queue.has_room(client):
            raise Overloaded(
                f"{len(self._queue)} {self._what} wait, {self._queue.num_of(client)} of them with this API"
                f" key: try again in {self._retry_after_s} s",
                retry_after_s=self._retry_after_s,
            )
        begins = asyncio.get_running_loop().create_future()
        self._queue.add(client, begins)
        self._begin()
        try:
            await begins
            yield
        finally:
            if begins.done() and not begins.cancelled():
                self._num_free += 1
            else:
                self._queue.discard(client, begins)
            self._begin()

    def _begin(self) -> None:
        while self._num_free and (begins := self._queue.next()) is not None:
            if not begins.done():
                self._num_free -= 1
                begins.set_result(None)
