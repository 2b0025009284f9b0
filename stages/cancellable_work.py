"""Blocking work in a thread of its own, which ends when the awaiting task is cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Abandoned(Exception):
    """Raised in a working thread to unwind it."""


class CancellableWork:
    """Work in threads for one task. The work calls `check` wherever it can stop.

    The event loop's shared threads, which `asyncio.to_thread` uses, are not taken: they are few, and what
    clients send may keep all of them busy, for minutes.

    Args:
        executor: Executor of the threads; None for a new thread for each `run`, which ends with it.
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
        """Run work in a thread; a cancellation waits until the work has ended."""
        own = None if self._executor is not None else ThreadPoolExecutor(1, "work")
        in_context = functools.partial(contextvars.copy_context().run, work)
        thread = asyncio.get_running_loop().run_in_executor(self._executor or own, in_context)
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            self._is_abandoned.set()
            await asyncio.wait([thread])
            if not thread.cancelled():
                thread.exception()  # retrieved: the task was cancelled, so nothing else reads it
            raise
        finally:
            if own is not None:
                own.shutdown(wait=False)


async def in_own_thread(
    work: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs
) -> Result:
    """Run a short blocking function in a thread of its own; see `CancellableWork`."""
    return await CancellableWork().run(functools.partial(work, *args, **options))
