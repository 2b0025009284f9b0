"""Main loop of a process that does jobs for a `WorkerPool`: limits, frames, the end of the process.

A job comes as a frame on the standard input: its sizes and its limits (`JOB`), its header, its payload. To
the standard output go a mark that it was read (`BEGUN`), the size of its answer (`ANSWER`) and the answer.
The kernel bounds a job whatever it computes: an alarm without a handler ends the process when its time is
over, and memory, files and core dumps have limits. What a job prints by other means goes nowhere.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import struct
import sys
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

# Bytes of the header and of the payload; most seconds of computing, and most seconds by the clock.
JOB: Final = struct.Struct("<QQdd")
BEGUN: Final = b"\x06"
ANSWER: Final = struct.Struct("<Q")
# Exit code of a process that ran out of memory.
EXIT_MEMORY: Final = 75

_NUM_FILES: Final = 32
# What a larger job has left in the heap would stay there until the next one.
_LARGE_BYTES: Final = 2**18


def serve(handle: Callable[[bytes, bytes], bytes]) -> None:
    """Do jobs until the standard input ends, which it also does when the parent was killed.

    The first argument of the command line is the limit of the address space in bytes.

    Args:
        handle: Answers a job, given its header and its payload. It encodes its own errors: one that it
            raises ends the process, and the job with it.
    """
    _bound(int(sys.argv[1]))
    jobs, answers = sys.stdin.buffer, _take_output()
    # Without a parent there is no use in an answer.
    with suppress(BrokenPipeError):
        while len(frame := jobs.read(JOB.size)) == JOB.size:
            answer = _answer(frame, jobs, answers, handle)
            answers.write(ANSWER.pack(len(answer)))
            answers.write(answer)
            answers.flush()
            num_bytes = sum(JOB.unpack(frame)[:2]) + len(answer)
            # Not kept until the next job.
            del answer
            if num_bytes > _LARGE_BYTES:
                _give_back()


def _answer(
    frame: bytes,
    jobs: IO[bytes],
    answers: IO[bytes],
    handle: Callable[[bytes, bytes], bytes],
) -> bytes:
    """Read a job and do it within its limits, which leave out the writing of the answer: that waits."""
    header_bytes, payload_bytes, cpu_limit_s, wall_limit_s = JOB.unpack(frame)
    signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
    signal.setitimer(signal.ITIMER_REAL, wall_limit_s)
    try:
        header, payload = jobs.read(header_bytes), jobs.read(payload_bytes)
        answers.write(BEGUN)
        answers.flush()
        return handle(header, payload)
    except MemoryError:
        os._exit(EXIT_MEMORY)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _bound(memory_bytes: int) -> None:
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _NUM_FILES,
    }
    for which, limit in limits.items():
        # Not every system has all of these limits.
        with suppress(ValueError, OSError):
            resource.setrlimit(which, (limit, limit))
    # Ctrl-C is handled by the parent, whose end closes our input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _give_back() -> None:
    """Return free memory to the system, where the C library can."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _take_output() -> IO[bytes]:
    """The pipe to the parent. What a library prints to descriptor 1 then goes where errors go."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers
