"""Isolated calls: work that llama.cpp may abort, in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
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


class ProcessHandle:
    """Stops, continues and ends the process of one call; from any thread, and before it starts as well.

    A process is not stopped before its first message: until then it could not have said what becomes of it
    with its parent, and would outlive that, stopped for ever.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._pid: int | None = None
        self._has_begun = False
        self._is_stopped = False
        self._is_ended = False

    @property
    def is_stopped(self) -> bool:
        """Whether the process computes nothing until `go_on`."""
        return self._is_stopped

    def stop(self) -> None:
        """Let the process compute nothing from now on."""
        with self._guard:
            self._is_stopped = True
            if self._has_begun:
                self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let a stopped process go on."""
        with self._guard:
            self._is_stopped = False
            self._send(signal.SIGCONT)

    def kill(self) -> None:
        """End the process, stopped or not."""
        with self._guard:
            self._is_ended = True
            self._send(signal.SIGKILL)

    def follow(self, pid: int | None) -> None:
        """Take the process of this id; None before the system may give its id to another."""
        with self._guard:
            self._pid = pid
            if self._is_ended:
                self._send(signal.SIGKILL)

    def begun(self) -> None:
        """Note that the process has sent something."""
        with self._guard:
            if not self._has_begun and self._is_stopped:
                self._send(signal.SIGSTOP)
            self._has_begun = True

    def _send(self, number: signal.Signals) -> None:
        # One that has ended by itself may be known to the system no more.
        with suppress(ProcessLookupError):
            if self._pid is not None:
                os.kill(self._pid, number)


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
    handle: ProcessHandle | None = None,
) -> Any:
    """Result of a function that is called in a spawned process, which is gone when this returns.

    Ctrl-C reaches the whole process group: only this process handles it, and ends the other. If this process
    ends, the other does at its next message.

    Args:
        function: Picklable; its last argument is a function that sends values to `progress`.
        arguments: Its other arguments, picklable.
        progress: Called with the values that the function sends.
        silence_s: Longest time without a message; None for no limit.
        handle: Takes the process, to stop or to end it.

    Raises:
        MeshError: As the function does.
        ProcessEnded: If the process ends without a result.
        ProcessSilent: If no message comes in time.
    """
    with _messages_of(function, arguments, silence_s, handle or ProcessHandle()) as messages:
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
    function: Callable[..., Any],
    arguments: tuple[object, ...],
    silence_s: float | None,
    handle: ProcessHandle,
) -> Iterator[Iterator[Any]]:
    spawning = multiprocessing.get_context("spawn")
    receiver, sender = spawning.Pipe(duplex=False)
    process = spawning.Process(target=_run, args=(sender, function, arguments), daemon=True)
    with not_interrupted():
        process.start()
    handle.follow(process.pid)
    sender.close()

    def received() -> Iterator[Any]:
        try:
            while receiver.poll(silence_s):
                message = receiver.recv()
                handle.begun()
                yield message
            raise ProcessSilent(f"no message for {silence_s:g} s")
        except EOFError:
            handle.follow(None)
            process.join()
            raise ProcessEnded(process.exitcode) from None

    try:
        yield received()
    finally:
        handle.follow(None)
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
