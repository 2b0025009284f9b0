"""Spawned process for work that llama.cpp may abort: messages through a pipe, Ctrl-C for the parent only."""

from __future__ import annotations

import multiprocessing
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class ProcessSilent(Exception):
    """The process sent no message for too long."""


class ProcessEnded(Exception):
    """The process ended before its last message.

    Attributes:
        exit_code: Its exit code, negative for a signal; None if unknown.
    """

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


@contextmanager
def messages_of(
    target: Callable[..., None], *arguments: object, silence_s: float | None = None
) -> Iterator[Iterator[Any]]:
    """Messages of a spawned process, which is killed at the end of the context.

    The end of this process breaks the pipe: a target that sends then gets a BrokenPipeError.

    Args:
        target: Called there with the pipe's end to send to, then the arguments; must be picklable.
        arguments: Of the target; picklable.
        silence_s: Longest time without a message; None for no limit.

    Yields:
        What it sends. The iterator raises `ProcessEnded` if the process ends, since the user stops at the
        last message, and `ProcessSilent` if no message comes in time.
    """
    spawning = multiprocessing.get_context("spawn")
    receiver, sender = spawning.Pipe(duplex=False)
    process = spawning.Process(target=target, args=(sender, *arguments), daemon=True)
    # Ctrl-C reaches the whole process group: only this process handles it, and ends the child.
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)
    sender.close()

    def received() -> Iterator[Any]:
        try:
            while receiver.poll(silence_s):
                yield receiver.recv()
            raise ProcessSilent(f"no message for {silence_s:g} s")
        except EOFError:
            process.join()
            raise ProcessEnded(process.exitcode) from None

    try:
        yield received()
    finally:
        process.kill()
        process.join()
        receiver.close()
