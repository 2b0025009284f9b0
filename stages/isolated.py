"""Isolated calls: work that llama.cpp may abort, in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection


class ProcessSilent(Exception):
    """The process sent no message for too long."""


class ProcessEnded(Exception):
    """The process ended before its result.

    Attributes:
        exit_code: Its exit code, negative for a signal; None if unknown.
    """

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


@dataclass(frozen=True)
class _Progress:
    values: tuple[Any, ...]


@dataclass(frozen=True)
class _Result:
    value: Any


def call(
    function: Callable[..., Any],
    *arguments: object,
    progress: Callable[..., None] | None = None,
    silence_s: float | None = None,
) -> Any:
    """Result of a function that is called in a spawned process, which is gone when this returns.

    Ctrl-C reaches the whole process group: only this process handles it, and ends the other. If this process
    ends, the other does at its next message.

    Args:
        function: Picklable; its last argument is a function that sends values to `progress`.
        arguments: Its other arguments, picklable.
        progress: Called with the values that the function sends.
        silence_s: Longest time without a message; None for no limit.

    Raises:
        MeshError: As the function does.
        ProcessEnded: If the process ends without a result.
        ProcessSilent: If no message comes in time.
    """
    with _messages_of(function, arguments, silence_s) as messages:
        for message in messages:
            match message:
                case _Progress(values):
                    if progress is not None:
                        progress(*values)
                case MeshError() as error:
                    raise error
                case _:
                    break
    return message.value


@contextmanager
def _messages_of(
    function: Callable[..., Any], arguments: tuple[object, ...], silence_s: float | None
) -> Iterator[Iterator[Any]]:
    spawning = multiprocessing.get_context("spawn")
    receiver, sender = spawning.Pipe(duplex=False)
    process = spawning.Process(target=_run, args=(sender, function, arguments), daemon=True)
    with not_interrupted():
        process.start()
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


@contextmanager
def not_interrupted() -> Iterator[None]:
    """Processes that are started in this context do not hear Ctrl-C."""
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)


def _run(sender: Connection, function: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    """Entry point of the process."""
    os.environ["GGML_NO_BACKTRACE"] = "1"  # or an abort starts a debugger

    def report(*values: object) -> None:
        try:
            sender.send(_Progress(values))
        except BrokenPipeError:
            # Also out of a callback of llama.cpp, which takes no exception.
            os._exit(1)

    try:
        message: object = _Result(function(*arguments, report))
    except MeshError as error:
        message = error
    with suppress(BrokenPipeError):
        sender.send(message)
