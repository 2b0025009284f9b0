"""Blocking work in threads that ends soon after the task that waits for it was cancelled."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")


class Abandoned(Exception):
    """Raised in a working thread to unwind it."""


class CancellableWork:
    """What one task has done in threads. The work calls `check` whenever it can stop."""

    def __init__(self) -> None:
        self._is_abandoned = threading.Event()

    def check(self) -> None:
        """Go on, unless nobody waits any more.

        Raises:
            Abandoned: If the waiting task was cancelled.
        """
        if self._is_abandoned.is_set():
            raise Abandoned

    async def run(self, work: Callable[[], Result]) -> Result:
        """Wait for work in a thread; when cancelled, until that thread is done with what it uses."""
        thread = asyncio.create_task(asyncio.to_thread(work))
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            self._is_abandoned.set()
            await asyncio.wait([thread])
            if not thread.cancelled():
                thread.exception()  # seen: whatever it was, nobody waits for it
            raise
