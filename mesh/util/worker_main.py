"""Process that does jobs for a `WorkerPool`: limits, frames, priority, the end of the process.

    python -I -m mesh.util.worker_main MODULE MEMORY_BYTES IS_LONG

The module's `handle` does the jobs. A job comes as a frame on the standard input: its sizes and its limits
(`JOB`), its header, its payload. To the standard output go a mark that the process is up (`READY`); then for
each job a mark that it was read (`BEGUN`), the size of its answer (`ANSWER`) and the answer.

Imports and long jobs have a lower priority, in a thread of their own: short texts of one client are read
while those of another take all processors. The kernel bounds a job whatever it computes: an alarm without a
handler ends the process when its time is over, and memory, files and core dumps have limits. What a job
prints by other means goes nowhere.

With MEMORY_BYTES 0 the process holds a model and computes with it: then only time has a limit, and long jobs
compute where processors are idle, as far as the system can do that. Linux then gives a processor to any other
thread of the session at once; beside one that is merely nice it does not, and threads that compute a token
meet hundreds of times. Many systems share processors among sessions of processes first: this one has its own,
which gets a quarter where another one wants all, and so has one whose jobs are all long. A job that gets next
to nothing ends the process, and comes again with the priority of others: to raise a thread again takes a
privilege.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import select
import signal
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

# Bytes of the header and of the payload; most seconds of computing, and most seconds by the clock; whether it
# keeps its priority.
JOB: Final = struct.Struct("<QQdd?")
READY: Final = b"\x05"
BEGUN: Final = b"\x06"
ANSWER: Final = struct.Struct("<Q")
# Exit code of a process that ran out of memory.
EXIT_MEMORY: Final = 75
# Exit code of a process whose job was left without a processor.
EXIT_STARVED: Final = 76
# Jobs of more bytes wait for what computes tokens, not the other way round.
SHORT_BYTES: Final = 2**14
_NUM_FILES: Final = 32
# What a larger job leaves in the heap is returned if no other one comes for a while: the next one would need
# it, and new pages cost time.
_LARGE_BYTES: Final = 2**18
_IDLE_S: Final = 1.0
# Shares of a processor that others want all the time: a thirtieth, and a tenth for imports, since a process
# that is replaced is one less until it is up.
_JOB_NICENESS: Final = 15
_START_NICENESS: Final = 10
_MOST_NICENESS: Final = 19
# Share of the session of a process that holds a model, or that does long jobs only: a quarter beside one with
# the usual niceness.
_SESSION_NICENESS: Final = 5
# Linux lets users change the niceness of a session ten times a second, all together.
_SESSION_TRIES: Final = 20
_SESSION_TRY_S: Final = 0.11
# How often a job that yields is looked at, and the least share of a processor that its threads have to get.
_LOOK_S: Final = 8.0
_LEAST_SHARE: Final = 0.05
# Ample for values nested as deep as is read; only what is used takes memory.
_STACK_BYTES: Final = 64 * 2**20
# Answers a job, given its header and its payload.
Handle: TypeAlias = "Callable[[bytes, bytes], bytes]"


def return_free_memory() -> None:
    """Return free memory to the system, where the C library can; takes some milliseconds.

    What a large request has left in the heap would stay there until the next one.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def serve(load: Callable[[], Handle], memory_bytes: int, *, is_long: bool = False) -> None:
    """Do jobs until the standard input ends, which it also does when the parent was killed.

    Args:
        load: Imports what does the jobs: a function that answers one, given its header and its payload. It
            encodes its own errors: one that it raises ends the process, and the job with it.
        memory_bytes: Limit of the address space; 0 for a process that holds a model.
        is_long: Whether all jobs are long.
    """
    _bound(memory_bytes)
    if is_long:
        _lower_session()
    threading.stack_size(_STACK_BYTES)
    background = ThreadPoolExecutor(1)
    jobs, answers = sys.stdin.buffer, _take_output()
    # Imports as well: clients that hang up on long jobs may cost a process each second.
    if memory_bytes:
        background.submit(_lower_priority, _START_NICENESS)
    handle = background.submit(load).result()
    eager = background
    if memory_bytes:
        background.submit(_lower_priority, _JOB_NICENESS)
    elif background.submit(_yield_processors).result():
        eager = ThreadPoolExecutor(1)
    # What is there by now stays: no need to look through it each time that garbage is collected.
    gc.freeze()
    is_large = False
    # Without a parent there is no use in an answer.
    with suppress(BrokenPipeError):
        answers.write(READY)
        answers.flush()
        while True:
            if is_large and not select.select([jobs], [], [], _IDLE_S)[0]:
                gc.collect()
                return_free_memory()
                is_large = False
            frame = jobs.read(JOB.size)
            if len(frame) < JOB.size:
                return
            header_bytes, payload_bytes, _, _, is_eager = JOB.unpack(frame)
            job = partial(_do, frame, jobs, answers, handle)
            if header_bytes + payload_bytes <= SHORT_BYTES:
                num_answer_bytes = job()
            elif is_eager or eager is background:
                num_answer_bytes = eager.submit(job).result()
            else:
                num_answer_bytes = _fed(background.submit(job))
            is_large |= header_bytes + payload_bytes + num_answer_bytes > _LARGE_BYTES


def _do(frame: bytes, jobs: IO[bytes], answers: IO[bytes], handle: Handle) -> int:
    """Read a job, do it, and write its answer; returns the answer's bytes.

    Raises:
        BrokenPipeError: If the parent is gone.
    """
    answer = _answer(frame, jobs, answers, handle)
    answers.write(ANSWER.pack(len(answer)))
    answers.write(answer)
    answers.flush()
    return len(answer)


def _answer(frame: bytes, jobs: IO[bytes], answers: IO[bytes], handle: Handle) -> bytes:
    """Read a job and do it within its limits, which leave out the writing of the answer: that waits."""
    header_bytes, payload_bytes, cpu_limit_s, wall_limit_s, _ = JOB.unpack(frame)
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
    limits = {resource.RLIMIT_CORE: 0}
    # Drivers of GPUs open many files, and map more than they use.
    if memory_bytes:
        limits |= {
            resource.RLIMIT_AS: memory_bytes,
            resource.RLIMIT_FSIZE: 0,
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


def _lower_priority(niceness: int) -> None:
    """Lower the priority of this thread, where threads have one of their own.

    Args:
        niceness: Of the thread, beyond that of the process.
    """
    # Elsewhere no process has the thread's number.
    with suppress(OSError):
        most = os.getpriority(os.PRIO_PROCESS, os.getpid()) + niceness
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(_MOST_NICENESS, most))


def _yield_processors() -> bool:
    """Have this thread, and those that it starts, compute on idle processors only; False if it cannot."""
    if sys.platform == "linux":
        _lower_session()
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            return True
    return False


def _lower_session() -> None:
    """Give this process a session of its own with a small share, where Linux shares processors among them.

    Source: sched(7), "The autogroup feature".
    """
    # The leader of a group of processes cannot leave its session; a kernel without the feature has no file.
    with suppress(OSError):
        os.setsid()
        for _ in range(_SESSION_TRIES):
            with suppress(BlockingIOError):
                Path("/proc/self/autogroup").write_text(str(_SESSION_NICENESS), encoding="ascii")
                return
            time.sleep(_SESSION_TRY_S)


def _fed(job: Future[int]) -> int:
    """Result of a job that yields; ends the process if it gets no processor."""
    now = _scheduled()
    while not wait([job], _LOOK_S).done:
        since, now = now, _scheduled()
        if _is_starved(since, now):
            os._exit(EXIT_STARVED)
    return job.result()


def _is_starved(since: Mapping[str, tuple[int, int]], now: Mapping[str, tuple[int, int]]) -> bool:
    """Whether threads that are there now had to wait for processors nearly all the time.

    Args:
        since: Result of `_scheduled` a while ago; threads that have ended since then do not count.
        now: The same of now.
    """
    ran = waited = 0
    for thread, (own_ran, own_waited) in now.items():
        former_ran, former_waited = since.get(thread, (0, 0))
        ran, waited = ran + own_ran - former_ran, waited + own_waited - former_waited
    return ran < _LEAST_SHARE * (ran + waited)


def _scheduled() -> dict[str, tuple[int, int]]:
    """Nanoseconds that each thread of this process computed, and that it waited for a processor.

    Source: https://docs.kernel.org/scheduler/sched-stats.html; empty where the kernel does not tell.
    """
    found = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        # A thread may end meanwhile.
        with suppress(OSError, ValueError):
            ran, waited, _ = map(int, path.read_text(encoding="ascii").split())
            found[path.parent.name] = ran, waited
    return found


def _take_output() -> IO[bytes]:
    """The pipe to the parent. What a library prints to descriptor 1 then goes where errors go."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    serve(lambda: import_module(sys.argv[1]).handle, int(sys.argv[2]), is_long=sys.argv[3] == "1")
