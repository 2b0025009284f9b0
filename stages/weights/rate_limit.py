"""At most so many bytes a second."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class RateLimit:
    """Shared by all who send: together they keep to it.

    Args:
        bytes_per_s: None lets everything pass at once.
        clock_s: Monotonic, seconds.
        sleep: Waits for seconds.
    """

    def __init__(
        self,
        bytes_per_s: float | None,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock_s = clock_s
        self._sleep = sleep
        self._free_at_s = clock_s()

    async def take(self, num_bytes: int) -> None:
        """Return when so many bytes may be sent. Who comes later waits for those before."""
        if self._bytes_per_s is None:
            return
        now_s = self._clock_s()
        begins_s = max(now_s, self._free_at_s)
        self._free_at_s = begins_s + num_bytes / self._bytes_per_s
        if begins_s > now_s:
            await self._sleep(begins_s - now_s)
