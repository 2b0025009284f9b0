"""Process that does jobs for a `WorkerPool`: limits, frames, priority, the end of the process.

    python -I -m mesh.util.worker_main MODULE MEMORY_BYTES

The module's `handle` does the jobs. A job comes as a frame on the standard input: its sizes and its limits
(`JOB`), its header, its payload. To the standard output go a mark that the process is up (`READY`); then for
each job a mark that it was read (`BEGUN`), the size of its answer (`ANSWER`) and the answer.

Imports and long jobs have a lower priority, in a thread of their own: short texts of one client are read
while those of another take all processors. The kernel bounds a job whatever it computes: an alarm without a
handler ends the process when its time is over, and memory, files and core dumps have limits. What a job
prints by other means goes nowhere.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from mesh.util.heap import return_free_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    # Answers a job.
    Handle = Callable[[bytes, bytes], bytes]

# Bytes of the header and of the payload; most seconds of computing, and most seconds by the clock.
JOB: Final = struct.Struct("<QQdd")
READY: Final = b"\x05"
BEGUN: Final = b"\x06"
ANSWER: Final = struct.Struct("<Q")
# Exit code of a process that ran out of memory.
EXIT_MEMORY: Final = 75

_NUM_FILES: Final = 32
# What a larger job has left in the heap would stay there until the next one.
_LARGE_BYTES: Final = 2**18
# Jobs of more bytes wait for what computes tokens, not the other way round.
_SHORT_BYTES: Final = 2**14
_NICENESS: Final = 10
# Ample for values nested as deep as is read; only what is used takes memory.
_STACK_BYTES: Final = 64 * 2**20


def serve(load: Callable[[], Handle], memory_bytes: int) -> None:
    """Do jobs until the standard input ends, which it also does when the parent was killed.

    Args:
        load: Imports what does the jobs: a function that answers one, given its header and its payload. It
            encodes its own errors: one that it raises ends the process, and the job with it.
        memory_bytes: Limit of the address space.
    """
    _bound(memory_bytes)
    threading.stack_size(_STACK_BYTES)
    background = ThreadPoolExecutor(1, initializer=_lower_priority)
    jobs, answers = sys.stdin.buffer, _take_output()
    # A flood that is hung up may cost a process each second.
    handle = background.submit(load).result()
    # Without a parent there is no use in an answer.
    with suppress(BrokenPipeError):
        answers.write(READY)
        answers.flush()
        while len(frame := jobs.read(JOB.size)) == JOB.size:
            header_bytes, payload_bytes, _, _ = JOB.unpack(frame)
            job = partial(_do, frame, jobs, answers, handle)
            if header_bytes + payload_bytes > _SHORT_BYTES:
                background.submit(job).result()
            else:
                job()


def _do(frame: bytes, jobs: IO[bytes], answers: IO[bytes], handle: Handle) -> None:
    """Read a job, do it, and write its answer.

    Raises:
        BrokenPipeError: If the parent is gone.
    """
    answer = _answer(frame, jobs, answers, handle)
    answers.write(ANSWER.pack(len(answer)))
    answers.write(answer)
    answers.flush()
    num_bytes = sum(JOB.unpack(frame)[:2]) + len(answer)
    # Not kept until the next job.
    del answer
    if num_bytes > _LARGE_BYTES:
        gc.collect()
        return_free_memory()


def _answer(frame: bytes, jobs: IO[bytes], answers: IO[bytes], handle: Handle) -> bytes:
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
    # Where the host's memory runs out, better here than in the head.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    # Ctrl-C is handled by the parent, whose end closes our input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _lower_priority() -> None:
    """Lower the priority of this thread, where threads have one of their own."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _take_output() -> IO[bytes]:
    """The pipe to the parent. What a library prints to descriptor 1 then goes where errors go."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    serve(lambda: import_module(sys.argv[1]).handle, int(sys.argv[2]))
