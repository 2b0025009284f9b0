"""Isolated context: the draft context in a process of its own, since llama.cpp aborts on some files.

That process computes and nothing else. Text, slots and priorities stay with the thread of
`speculative.draft.worker`, which sends it rows through a pipe. Logits come back in shared memory: a row of
them is hundreds of kilobytes.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import numpy as np

from speculative.draft.context import DraftUnusable
from speculative.draft.rows import DraftOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

    from speculative.draft.context import DraftContext

# An aborted computation ends at the next tensor.
_ABORT_PATIENCE_S: Final = 10.0
_POLL_S: Final = 1.0


Context = TypeVar("Context", bound="DraftContext", covariant=True)  # noqa: PLC0105 - named for what it is


class MakeContext(Protocol[Context]):
    """Makes a context in the process; picklable."""

    def __call__(self, *, abort_flag: Any) -> Context:
        """See `DraftContext`."""


@dataclass(frozen=True)
class ProcessSetup:
    """Needs of a context's process besides the context."""

    prepare: Callable[[], None]
    """Called first in the process; picklable."""
    complaint: Callable[[], str]
    """Latest error that llama.cpp logged there; picklable."""


@dataclass(frozen=True)
class _Loaded:
    """Facts of a context, asked for without computing."""

    end_tokens: frozenset[int]
    width: int
    feature_width: int


@dataclass(frozen=True)
class _Shared:
    """Memory of both processes."""

    abort_flag: Any
    logits: Any
    num_tokens: int

    def rows(self) -> NDArray[np.float32]:
        """Logits, float32 (sessions, num_tokens)."""
        return np.frombuffer(self.logits, np.float32).reshape(-1, self.num_tokens)


class IsolatedContext:
    """A `DraftContext` in a process of its own. For one thread at a time, except `abort`.

    Args:
        make: Makes the context there.
        setup: What else the process needs.
        num_sessions: Most sessions of one decode.
        num_tokens: Values of a row of logits.
        clock_s: Monotonic clock, seconds.

    Attributes:
        thread_id: Id of the thread that computes.
        width: Values of a row of its own state; 0 for a plain draft model.
        feature_width: Values of a row of features; 0 likewise.

    Raises:
        DraftUnusable: If the context cannot be made, or llama.cpp aborts while it is.
    """

    def __init__(
        self,
        make: MakeContext[DraftContext],
        setup: ProcessSetup,
        *,
        num_sessions: int,
        num_tokens: int,
        clock_s: Callable[[], float],
    ) -> None:
        self._clock_s = clock_s
        spawning = multiprocessing.get_context("spawn")
        shared = _Shared(
            spawning.RawArray(ctypes.c_char, 2),
            spawning.RawArray(ctypes.c_float, num_sessions * num_tokens),
            num_tokens,
        )
        self._flag = shared.abort_flag
        self._logits = shared.rows()
        self._aborted_s: float | None = None
        self._pipe, theirs = spawning.Pipe()
        self._process = spawning.Process(
            target=_serve,
            args=(theirs, make, setup, shared),
            daemon=True,
            name="spanmesh-draft",
        )
        # Ctrl-C reaches the whole process group: only this process handles it, and ends the child.
        heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, heard)
        theirs.close()
        self.thread_id = self._process.pid
        try:
            loaded: _Loaded = self._reply()
        except BaseException:
            self.close()
            raise
        self._end_tokens = loaded.end_tokens
        self.width, self.feature_width = loaded.width, loaded.feature_width

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    def decode(
        self, spans: Sequence[Any], while_computing: AbstractContextManager[None]
    ) -> list[DraftOutput | None] | None:
        """See `DraftContext.decode`.

        Raises:
            DraftUnusable: If llama.cpp fails, or the process ended.
        """
        with while_computing:
            if not self._send("decode", spans):
                raise self._ended()
            states = self._reply()
        if states is None:
            return None
        rows = iter(self._logits)
        return [None if state is None else DraftOutput(next(rows), state[0]) for state in states]

    def abort(self) -> None:
        """See `DraftContext.abort`."""
        self._flag[0] = b"\1"
        self._aborted_s = self._clock_s()

    def resume(self) -> None:
        """See `DraftContext.resume`."""
        self._flag[0] = b"\0"
        self._aborted_s = None

    def is_end(self, token: int) -> bool:
        """See `DraftContext.is_end`."""
        return token in self._end_tokens

    def copy(self, source: int, slot: int, num_tokens: int) -> None:
        """See `DraftContext.copy`."""
        self._send("copy", source, slot, num_tokens)

    def free(self, slot: int) -> None:
        """See `DraftContext.free`."""
        self._send("free", slot)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _send(self, name: str, *arguments: object) -> bool:
        """Send a call, of which only decodes are answered; returns whether the process still takes any."""
        try:
            self._pipe.send((name, arguments))
        except OSError:
            return False
        return True

    def _reply(self) -> Any:
        """Answer of the process.

        Raises:
            DraftUnusable: If it says so, or ended, or does not heed an abort.
        """
        try:
            while not self._pipe.poll(_POLL_S):
                aborted_s = self._aborted_s
                if aborted_s is not None and self._clock_s() - aborted_s > _ABORT_PATIENCE_S:
                    self._process.kill()
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if isinstance(answer, DraftUnusable):
            raise answer
        return answer

    def _ended(self) -> DraftUnusable:
        self._process.join(_POLL_S)
        return DraftUnusable(
            f"the process of the draft model ended with exit code {self._process.exitcode}: nothing is "
            "drafted until the server starts again"
        )


def opened(
    make: MakeContext[Context],
    setup: ProcessSetup | None,
    *,
    num_sessions: int,
    num_tokens: int,
    clock_s: Callable[[], float],
) -> Context | IsolatedContext:
    """A context in a process of its own; in this one without a setup.

    Args:
        make: Makes the context.
        setup: Of the process; None for this process.
        num_sessions: Most sessions of one decode.
        num_tokens: Values of a row of logits.
        clock_s: Monotonic clock, seconds.

    Raises:
        DraftUnusable: If the context cannot be made.
    """
    if setup is None:
        return make(abort_flag=None)
    return IsolatedContext(make, setup, num_sessions=num_sessions, num_tokens=num_tokens, clock_s=clock_s)


def _serve(
    pipe: Connection,
    make: MakeContext[DraftContext],
    setup: ProcessSetup,
    shared: _Shared,
) -> None:
    """Main function of the process: makes the context, and answers until the pipe ends."""
    os.environ["GGML_NO_BACKTRACE"] = "1"  # or an abort starts a debugger
    setup.prepare()
    with suppress(EOFError, BrokenPipeError):
        try:
            context = make(abort_flag=shared.abort_flag)
        except (DraftUnusable, ImportError) as error:
            pipe.send(DraftUnusable(f"{error}; llama.cpp: {setup.complaint()}"))
            return
        widths = (getattr(context, name, 0) for name in ("width", "feature_width"))
        pipe.send(_Loaded(context.end_tokens(), *widths))
        logits = shared.rows()
        while True:
            name, arguments = pipe.recv()
            if name != "decode":
                getattr(context, name)(*arguments)
                continue
            try:
                answer: object = _decode(context, arguments[0], logits)
            except DraftUnusable as error:
                answer = error
            pipe.send(answer)


def _decode(
    context: DraftContext, spans: Sequence[Any], logits: NDArray[np.float32]
) -> list[tuple[NDArray[np.float32] | None] | None] | None:
    """The state of each span's output; None for no output. Logits go to the rows of `logits`, in order."""
    outputs = context.decode(spans, nullcontext())
    if outputs is None:
        return None
    rows = iter(logits)
    states: list[tuple[NDArray[np.float32] | None] | None] = []
    for output in outputs:
        if output is None:
            states.append(None)
        else:
            row = next(rows)
            row[: len(output.logits)] = output.logits
            row[len(output.logits) :] = -np.inf
            states.append((output.state,))
    return states
