"""Who may use the mesh now, and who waits: sequence slots, handed out first come, first served."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING

from spanmesh_proto.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class SlotPool:
    """A fixed number of slots and a bounded line in front of them.

    Args:
        num_slots: Sessions that run at once.
        max_waiting: Requests that may wait; the next one is turned away.
    """

    def __init__(self, num_slots: int, max_waiting: int) -> None:
        self._free = deque(range(num_slots))
        self._waiting: deque[asyncio.Future[int]] = deque()
        self._max_waiting = max_waiting
        self._num_slots = num_slots

    @property
    def num_busy(self) -> int:
        """Slots in use."""
        return self._num_slots - len(self._free)

    @property
    def num_waiting(self) -> int:
        """Requests in the line."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[int]:
        """A slot for the length of the `with` block.

        Raises:
            Overloaded: If the line is full.
        """
        slot = await self._acquire()
        try:
            yield slot
        finally:
            self._release(slot)

    async def _acquire(self) -> int:
        if self._free:
            return self._free.popleft()
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(
                f"all {self._num_slots} slots are busy and {len(self._waiting)} requests wait: try again "
                "later, or serve with a larger --parallel",
                retry_after_s=5,
            )
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(turn.result())
            else:
                self._waiting.remove(turn)
            raise

    def _release(self, slot: int) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(slot)
                return
        self._free.append(slot)
