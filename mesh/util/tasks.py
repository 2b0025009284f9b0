"""Task helpers: signals as cancellation, the first of several tasks, blocking context managers."""

from __future__ import annotations

import asyncio
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog
import uvloop

from stages.cancellable_work import in_own_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from contextlib import AbstractContextManager

# A closed terminal ends the command as well.
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_EXIT_INTERRUPTED: Final = 130

log = structlog.get_logger()

Value = TypeVar("Value")


class Interruption:
    """Cancels a task at the first signal; later ones have no effect, since the shutdown takes only seconds.

    SIGHUP stays ignored if this process was started so, as `nohup` does.

    Attributes:
        received: The first signal; None until one came.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._ask: Callable[[], None] | None = None
        self._is_cancelled = False
        is_hup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._signals = tuple(
            number for number in _SIGNALS if not (number is signal.SIGHUP and is_hup_ignored)
        )
        self.received: signal.Signals | None = None

    def arm(self, task: asyncio.Task[None] | None = None) -> None:
        """Handle the signals from now on. Call again after a library installed its own handlers.

        Args:
            task: Task to cancel; that of the last call unless given.
        """
        self._task = task or self._task
        loop = asyncio.get_running_loop()
        for number in self._signals:
            loop.add_signal_handler(number, self._on_signal, number)

    def soften(self, ask: Callable[[], None] | None) -> None:
        """Let the next signal only ask for an end; the one after it cancels.

        Args:
            ask: Called in the event loop; None restores cancellation.
        """
        self._ask = ask

    def _on_signal(self, number: signal.Signals) -> None:
        self.received = self.received or number
        if self._ask is not None:
            ask, self._ask = self._ask, None
            ask()
        elif not self._is_cancelled and self._task is not None:
            self._is_cancelled = True
            self._task.cancel()
            log.info("stopping", signal=number.name)


def run_interruptible(work: Callable[[Interruption], Coroutine[Any, Any, None]]) -> int:
    """Run `work` to its end or until a signal comes.

    Returns:
        Exit code: 130 after Ctrl-C; 0 if the work ended, or after SIGTERM, which is how services are stopped.
    """

    async def supervise() -> int:
        interruption = Interruption()
        task = asyncio.create_task(work(interruption))
        interruption.arm(task)
        try:
            await task
        except asyncio.CancelledError:
            if interruption.received is None:
                raise
        return _EXIT_INTERRUPTED if interruption.received is signal.SIGINT else 0

    # uvloop handles gRPC's wake-ups at a lower cost than asyncio's own loop. Ray's actors use it by
    # themselves.
    return uvloop.run(supervise())


async def first_of(*works: Coroutine[Any, Any, None]) -> None:
    """Run all until one returns or raises, and cancel the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_to_end(cleanup: Coroutine[Any, Any, None]) -> None:
    """Run a cleanup to its end; the awaiting task, if it is cancelled meanwhile, ends only afterwards."""
    task = asyncio.create_task(cleanup)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        if not task.cancelled():
            task.exception()  # retrieved: the cancellation is raised instead
        raise cancellation
    task.result()


@asynccontextmanager
async def entered_in_thread(manager: AbstractContextManager[Value]) -> AsyncIterator[Value]:
    """Enter a context manager in a thread; it is closed after the block, or at once on cancellation."""
    entering = asyncio.create_task(in_own_thread(manager.__enter__))
    try:
        value = await asyncio.shield(entering)
    except asyncio.CancelledError:
        await asyncio.wait([entering])
        if not entering.cancelled() and entering.exception() is None:
            manager.__exit__(None, None, None)
        raise
    try:
        yield value
    finally:
        manager.__exit__(None, None, None)
