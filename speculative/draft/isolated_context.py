"""Isolated context: a drafter in a process of its own, since llama.cpp aborts on some files.

The process loads the file and drafts a few tokens, within a limit of time; then it computes and nothing else.
Text, slots and priorities stay with the thread of `speculative.draft.worker`, which sends it rows through a
pipe. Logits come back in shared memory: a row of them is hundreds of kilobytes.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from speculative.draft.context import DraftOutput, DraftUnusable, timed_ms_per_token
from speculative.draft.kinds import KINDS, load_context

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

    from speculative.draft.context import ContextSetup, DraftContext, DraftFile, SlotRows

# An aborted computation ends at the next tensor.
_ABORT_PATIENCE_S: Final = 10.0
_POLL_S: Final = 1.0


class ContextEnded(DraftUnusable):
    """The process of a context ended.

    Attributes:
        exit_code: Its exit code, negative for a signal; None if unknown.
        was_late: Whether it was killed since it did not answer in time.
    """

    def __init__(self, exit_code: int | None, *, was_late: bool) -> None:
        super().__init__(
            f"the process of the draft model ended with exit code {exit_code}: nothing is drafted until the "
            "server starts again"
        )
        self.exit_code = exit_code
        self.was_late = was_late


@dataclass(frozen=True)
class _Loaded:
    """Facts of a context, asked for without computing."""

    end_tokens: frozenset[int]
    num_tokens: int
    feature_width: int
    most_drafted: int


@dataclass(frozen=True)
class _Output:
    """An output without its values, which are in shared memory; see `DraftOutput`."""

    shape: tuple[int, ...]
    """Of its values."""
    state: NDArray[np.float32] | None
    confidences: NDArray[np.float32] | None
    num_candidates: int


@dataclass(frozen=True)
class _Shared:
    """Memory of both processes."""

    abort_flag: Any
    logits: Any
    num_tokens: int

    def rows(self) -> NDArray[np.float32]:
        """Logits, float32 (rows, num_tokens): a batch has one output a session, of one row or a block."""
        return np.frombuffer(self.logits, np.float32).reshape(-1, self.num_tokens)


class IsolatedContext:
    """A context in a process of its own; see `Context`.

    Args:
        file: The drafter.
        setup: See `ContextSetup`.
        limit_s: Longest time until it has drafted a few tokens.

    Raises:
        ContextEnded: If llama.cpp aborts meanwhile, or takes longer.
        DraftUnusable: If the file cannot serve as a drafter of its kind, or there is no memory for its KV
            cache.
    """

    def __init__(self, file: DraftFile, setup: ContextSetup, *, limit_s: float) -> None:
        self._clock_s = setup.clock_s
        spawning = multiprocessing.get_context("spawn")
        num_rows = file.options.num_sessions * min(KINDS[file.kind].most_drafted, file.options.draft_max)
        shared = _Shared(
            spawning.RawArray(ctypes.c_char, 2),
            spawning.RawArray(ctypes.c_float, num_rows * file.num_tokens),
            file.num_tokens,
        )
        self._flag = shared.abort_flag
        self._logits = shared.rows()
        # When it is killed if it has not answered; None for never.
        self._deadline_s: float | None = self._clock_s() + limit_s
        self._was_late = False
        self._pipe, theirs = spawning.Pipe()
        self._process = spawning.Process(
            target=_serve,
            args=(theirs, file, setup, shared),
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
            self._end_tokens = loaded.end_tokens
            self.num_tokens = loaded.num_tokens
            self.feature_width = loaded.feature_width
            self.most_drafted = loaded.most_drafted
            # From here, since every token takes the way through the pipe.
            span_of = KINDS[file.kind].context.timed_span
            self.ms_per_token = timed_ms_per_token(self, span_of, self._clock_s)
        except BaseException:
            self.close()
            raise
        self._deadline_s = None

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    def decode(
        self, parts: Sequence[SlotRows[Any]], while_computing: AbstractContextManager[None]
    ) -> list[DraftOutput | None] | None:
        """See `Context.decode`.

        Raises:
            DraftUnusable: If llama.cpp fails, or the process ended.
        """
        with while_computing:
            if not self._send("decode", parts):
                raise self._ended()
            states: list[_Output | None] | None = self._reply()
        if states is None:
            return None
        outputs: list[DraftOutput | None] = []
        first = 0
        for state in states:
            if state is None:
                outputs.append(None)
                continue
            num_drafted, width = state.shape
            values = self._logits[first : first + num_drafted, :width]
            outputs.append(DraftOutput(values, state.state, state.confidences, state.num_candidates))
            first += num_drafted
        return outputs

    def abort(self) -> None:
        """See `Context.abort`."""
        self._flag[0] = b"\1"
        self._deadline_s = self._clock_s() + _ABORT_PATIENCE_S

    def resume(self) -> None:
        """See `Context.resume`."""
        self._flag[0] = b"\0"
        self._deadline_s = None

    def is_end(self, token: int) -> bool:
        """See `Context.is_end`."""
        return token in self._end_tokens

    def copy(self, source: int, slot: int, num_tokens: int) -> None:
        """See `Context.copy`."""
        self._send("copy", source, slot, num_tokens)

    def free(self, slot: int) -> None:
        """See `Context.free`."""
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
            DraftUnusable: If it says so, or ended, or does not answer in time.
        """
        try:
            while not self._pipe.poll(_POLL_S):
                deadline_s = self._deadline_s  # which `abort` sets, in another thread
                if deadline_s is not None and self._clock_s() > deadline_s:
                    self._was_late = True
                    self._process.kill()
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if self._was_late:
            raise self._ended()
        if isinstance(answer, DraftUnusable):
            raise answer
        return answer

    def _ended(self) -> ContextEnded:
        self._process.join(_POLL_S)
        return ContextEnded(self._process.exitcode, was_late=self._was_late)


def _serve(pipe: Connection, file: DraftFile, setup: ContextSetup, shared: _Shared) -> None:
    """Main function of the process: loads the drafter, and answers until the pipe ends."""
    os.environ["GGML_NO_BACKTRACE"] = "1"  # or an abort starts a debugger
    setup.prepare()
    with suppress(EOFError, BrokenPipeError):
        try:
            context = load_context(file, setup, abort_flag=shared.abort_flag)
        except DraftUnusable as error:
            pipe.send(DraftUnusable(f"{error}; llama.cpp: {setup.complaint()}"))
            return
        pipe.send(
            _Loaded(context.end_tokens(), context.num_tokens, context.feature_width, context.most_drafted)
        )
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
    context: DraftContext, parts: Sequence[SlotRows[Any]], logits: NDArray[np.float32]
) -> list[_Output | None] | None:
    """Each part's output, or None. Logits go to the rows of `logits`, in order."""
    outputs = context.decode(parts, nullcontext())
    if outputs is None:
        return None
    states: list[_Output | None] = []
    first = 0
    for output in outputs:
        if output is None:
            states.append(None)
            continue
        num_drafted, width = output.values.shape
        logits[first : first + num_drafted, :width] = output.values
        states.append(_Output(output.values.shape, output.state, output.confidences, output.num_candidates))
        first += num_drafted
    return states
