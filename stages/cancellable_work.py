"""Blocking work in a thread that ends when the awaiting task is cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

Result = TypeVar("Result")


class Abandoned(Exception):
    """Raised in a working thread to unwind it."""


class CancellableWork:
    """Work in threads for one task. The work calls `check` wherever it can stop.

    Args:
        executor: Executor of the threads; None for the event loop's shared one.
    """

    def __init__(self, executor: Executor | None = None) -> None:
        self._executor = executor
        self._is_abandoned = threading.Event()

    def check(self) -> None:
        """Return, unless the waiting task was cancelled.

        Raises:
            Abandoned: If the waiting task was cancelled.
        """
        if self._is_abandoned.is_set():
            raise Abandoned

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run work in a thread; a cancellation waits until the thread has ended."""
        in_context = functools.partial(contextvars.copy_context().run, work)
        thread = asyncio.get_running_loop().run_in_executor(self._executor, in_context)
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            self._is_abandoned.set()
            await asyncio.wait([thread])
            if not thread.cancelled():
                thread.exception()  # retrieved: the task was cancelled, so nothing else reads it
            raise
