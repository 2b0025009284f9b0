"""Budget of the bytes of request bodies that the server holds at a time, by client and in total."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from typing import TYPE_CHECKING, Final

from mesh.api.auth import client_of
from mesh.util.fair_queue import FairQueue
from mesh.util.worker_main import return_free_memory
from spanmesh_proto.errors import Overloaded

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

# Of the largest context.
MOST_BODY_BYTES: Final = 16 * 2**20
# Two of the largest bodies of one key, eight in all.
CLIENT_BYTES: Final = 2 * MOST_BODY_BYTES
TOTAL_BYTES: Final = 8 * MOST_BODY_BYTES
_MAX_WAITING: Final = 256
# Such a body is freed at once, not when the collector looks for garbage the next time.
_LARGE_BYTES: Final = 2**20
# From the end of large bodies until their memory is returned to the system.
_RETURN_S: Final = 1.0
# Less than the time within which a request must arrive.
_MAX_WAIT_S: Final = 30.0
_RETRY_AFTER_S: Final = 5
_HOLD: Final = "spanmesh.body_hold"


class BodyBudget:
    """Bytes of bodies that requests hold; further requests wait, and clients take turns (`FairQueue`).

    A body is admitted while its client has room for one of the largest, and the server likewise, so that none
    waits for ever behind smaller ones.

    Args:
        client_bytes: Most bytes of one client.
        total_bytes: Most bytes of all, and of requests without a client.
        body_bytes: Most bytes of one body.
        max_wait_s: Longest wait, seconds.
    """

    def __init__(
        self,
        *,
        client_bytes: int = CLIENT_BYTES,
        total_bytes: int = TOTAL_BYTES,
        body_bytes: int = MOST_BODY_BYTES,
        max_wait_s: float = _MAX_WAIT_S,
    ) -> None:
        self._most_of_client = client_bytes - body_bytes
        self._most_in_all = total_bytes - body_bytes
        self._max_wait_s = max_wait_s
        self._held: Counter[str | None] = Counter()
        self._queue: FairQueue[str | None, asyncio.Future[None]] = FairQueue(_MAX_WAITING)
        self._wanted: dict[asyncio.Future[None], tuple[str | None, int]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all."""
        return self._held.total()

    @property
    def is_wanted(self) -> bool:
        """Whether a request waits for bytes that others hold."""
        return len(self._queue) > 0

    async def take(self, client: str | None, num_bytes: int) -> None:
        """Wait for room, and take it.

        Args:
            client: Client of the request.
            num_bytes: Size of its body.

        Raises:
            Overloaded: If too many requests wait, or there is no room for too long.
        """
        if not self.is_wanted and self._may_begin(client):
            self._held[client] += num_bytes
            return
        if not self._queue.has_room(client):
            raise self._overloaded()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.add(client, turn)
        self._wanted[turn] = (client, num_bytes)
        # Others may wait for what this one needs not.
        self._admit()
        try:
            async with asyncio.timeout(self._max_wait_s):
                await turn
        except BaseException as error:
            self._queue.discard(client, turn)
            if self._wanted.pop(turn, None) is None:
                self.give_back(client, num_bytes)
            if isinstance(error, TimeoutError):
                raise self._overloaded() from None
            raise

    def give_back(self, client: str | None, num_bytes: int) -> None:
        """Return bytes, and admit those that wait for them."""
        self._held[client] -= num_bytes
        if not self._held[client]:
            del self._held[client]
        self._admit()

    def _may_begin(self, client: str | None) -> bool:
        return self._held.total() <= self._most_in_all and (
            client is None or self._held[client] <= self._most_of_client
        )

    def _admit(self) -> None:
        while (turn := self._queue.next(self._may_begin)) is not None:
            client, num_bytes = self._wanted.pop(turn)
            self._held[client] += num_bytes
            if turn.done():  # cancelled, and about to give the bytes back
                continue
            turn.set_result(None)

    def _overloaded(self) -> Overloaded:
        return Overloaded(
            f"bodies of other requests take all of the memory for bodies, and {len(self._queue)} requests"
            f" wait for it: try again in {_RETRY_AFTER_S} s",
            retry_after_s=_RETRY_AFTER_S,
        )


class BodyHold:
    """Bytes that one request holds.

    Args:
        budget: The server's.
        client: Client of the request.
    """

    def __init__(self, budget: BodyBudget, client: str | None) -> None:
        self._budget = budget
        self._client = client
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds."""
        return self._num_bytes

    @property
    def is_wanted(self) -> bool:
        """Whether another request waits for bytes."""
        return self._budget.is_wanted

    async def take(self, num_bytes: int) -> None:
        """Wait for room for the body.

        Raises:
            Overloaded: See `BodyBudget.take`.
        """
        await self._budget.take(self._client, num_bytes)
        self._num_bytes += num_bytes

    def keep(self, num_bytes: int) -> None:
        """Give back all but so many bytes."""
        spare = max(0, self._num_bytes - num_bytes)
        self._num_bytes -= spare
        if spare:
            self._budget.give_back(self._client, spare)


class BoundedBodies:
    """Middleware behind the key gate that frees what the body of a request took, however the request ends.

    Args:
        app: Next ASGI app.
        budget: Budget of all requests.
    """

    def __init__(self, app: ASGIApp, budget: BodyBudget) -> None:
        self._app = app
        self._budget = budget
        self._is_return_due = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, then free."""
        scope[_HOLD] = hold = BodyHold(self._budget, client_of(scope))
        try:
            await self._app(scope, receive, send)
        finally:
            is_large = hold.num_bytes >= _LARGE_BYTES
            hold.keep(0)
            if is_large:
                loop = asyncio.get_running_loop()
                # The traceback of a refusal and its frames refer to each other, and to the body. Only young
                # objects are looked at, which are few.
                loop.call_soon(gc.collect, 1)
                if not self._is_return_due:
                    self._is_return_due = True
                    loop.call_later(_RETURN_S, self._return_memory)

    def _return_memory(self) -> None:
        loop = asyncio.get_running_loop()
        if self._budget.num_bytes >= _LARGE_BYTES:
            loop.call_later(_RETURN_S, self._return_memory)
            return
        self._is_return_due = False
        # Frames that were there before others ended are not young any more.
        gc.collect()
        loop.run_in_executor(None, return_free_memory)


def hold_of(scope: Scope) -> BodyHold:
    """The hold of a request that passed `BoundedBodies`."""
    hold: BodyHold = scope[_HOLD]
    return hold
