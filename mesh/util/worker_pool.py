"""Pool of isolated worker processes that do bounded jobs, fair by client.

The pool knows processes, frames and turns; what a job is, only the worker's module knows (see
`mesh.util.worker_main`). A worker has no environment but the one given, writes no file, and imports nothing
from the working directory. One thread for each worker writes its jobs and reads its answers, so that large
ones hold up no event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, Final, TypeAlias

import structlog

from mesh.util.fair_queue import FairQueue
from mesh.util.worker_answers import HEAD_BYTES
from mesh.util.worker_main import ANSWER, BEGUN, EXIT_MEMORY, EXIT_STARVED, JOB, READY, SHORT_BYTES
from spanmesh_proto.errors import WIRE, Overloaded
from stages.runtime.process_memory import ALLOCATOR

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_WAITING: Final = 64
# A job that is not wanted any more usually ends sooner by itself, and a new process costs more than it.
_GRACE_S: Final = 1.0
# No limit ends a process by these signals: what did so was no job, and it gets a new process a few times.
_FROM_OUTSIDE: Final = frozenset({-signal.SIGKILL, -signal.SIGTERM})
_MAX_KILLED: Final = 8
_KINDS: Final = {kind.__name__: kind for kind in WIRE}
_MAX_ANSWER_BYTES: Final = 2**30
_RETRY_AFTER_S: Final = 2
# As much as Linux permits without privileges.
_PIPE_BYTES: Final = 2**20
# What is larger moves at this rate from there on: at full speed its copies would slow what computes beside.
_UNPACED_BYTES: Final = 4 * 2**20
_MOST_BYTES_PER_S: Final = 64 * 2**20
_STEP_BYTES: Final = 2**18

log = structlog.get_logger()

# A client, and whether its jobs are long: its short ones do not wait behind them.
_Lane: TypeAlias = tuple[str | None, bool]


class WorkerEnded(Exception):
    """A worker ended on a job: the job took too much time or memory, or crashed it. Do not try it again.

    Args:
        exit_code: As `subprocess.Popen.returncode`; negative for a signal.
        reason: What the job did, to follow its name in a message: `took more than 5 s of computing`.
    """

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(reason)
        self.exit_code = exit_code
        self.reason = reason


@dataclass(eq=False)
class _Job:
    """A job that waits or runs."""

    header: bytes
    """First part."""
    payload: bytes | bytearray | memoryview
    """Second part, which may be large."""
    client: str | None
    """Client for whom it runs."""
    cpu_limit_s: float
    """Most seconds of computing."""
    answer: Future[bytes] = field(default_factory=Future)
    """Becomes its answer."""
    is_abandoned: bool = False
    """Whether its client left while it ran."""
    is_eager: bool = False
    """Whether it keeps its priority where others yield: it got no processor."""

    @property
    def lane(self) -> _Lane:
        """Its queue."""
        return self.client, len(self.header) + len(self.payload) > SHORT_BYTES


class WorkerPool:
    """Worker processes, started when jobs come and replaced when one ends. Thread-safe, of no event loop.

    Clients take turns, and a client's short jobs and its long ones wait apart (`FairQueue`). While there are
    several workers, one stays free of each client's jobs, so that a client's long jobs never hold up all
    others; jobs of no client may have all. Behind a long job its client has one worker less for other long
    ones, for as long as the job took: a flood of them has half of a processor for each worker that it may
    have.

    Args:
        module: Module whose function `handle` does the jobs; see `mesh.util.worker_main`.
        num_workers: Most processes.
        cpu_limit_s: Most seconds that a job may compute.
        wall_limit_s: Most seconds that a job may take by the clock, from its arrival at a worker.
        memory_bytes: Most bytes of a worker's address space; 0 for workers that each hold a model, which
            takes long to load. These have no limits but of time, and long jobs compute where processors are
            idle, or like others if they get next to nothing there; a job whose client left is done to its
            end, one during which its worker was killed is tried once more only, and a client does not pause
            behind a long job.
        is_long: Whether all jobs are long: then its processes get a smaller share of processors.
        environment: Its whole environment.
        max_waiting: Jobs that may wait, of all clients; see `FairQueue`.
    """

    def __init__(
        self,
        module: str,
        *,
        num_workers: int,
        cpu_limit_s: float,
        wall_limit_s: float,
        memory_bytes: int,
        is_long: bool = False,
        environment: Mapping[str, str] = MappingProxyType(ALLOCATOR),
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._command: Sequence[str] = (
            *(sys.executable, "-I", "-m", "mesh.util.worker_main"),
            *(module, str(memory_bytes), str(int(is_long))),
        )
        self._module = module
        self._num_workers = num_workers
        self._cpu_limit_s = cpu_limit_s
        self._wall_limit_s = wall_limit_s
        self._memory_bytes = memory_bytes
        self._holds_model = not memory_bytes
        self._max_killed = 1 if self._holds_model else _MAX_KILLED
        self._environment = dict(environment)
        # Guards everything below; notified when a job comes, and at the end.
        self._changed = threading.Condition()
        self._queue: FairQueue[_Lane, _Job] = FairQueue(max_waiting)
        # Jobs that run, and workers that come up again.
        self._num_running: Counter[str | None] = Counter()
        self._num_pausing: Counter[str | None] = Counter()
        # When pauses end, in seconds, and of whose jobs; a heap.
        self._pauses: list[tuple[float, str]] = []
        self._workers: list[_Worker] = []
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._is_closed = False

    async def run(
        self,
        header: bytes,
        payload: bytes | bytearray | memoryview = b"",
        *,
        client: str | None = None,
        cpu_limit_s: float | None = None,
    ) -> bytes:
        """The answer of a worker.

        If it is cancelled, a job that waits leaves the queue; one that runs ends, with its worker if need be,
        within a second or so, and counts for its client until then.

        Args:
            header: First part of the job.
            payload: Second part.
            client: Client for whom it runs.
            cpu_limit_s: Most seconds of computing, if not the pool's.

        Raises:
            WorkerEnded: If the job ended its worker.
            Overloaded: If too many jobs wait, of this client or of all, or something ends each worker.
        """
        job = self._submit(header, payload, client, cpu_limit_s)
        try:
            return await asyncio.wrap_future(job.answer)
        except asyncio.CancelledError:
            if not self._withdraw(job) and not self._holds_model:
                asyncio.get_running_loop().call_later(_GRACE_S, self._abandon, job)
            raise

    def run_blocking(
        self,
        header: bytes,
        payload: bytes | bytearray | memoryview = b"",
        *,
        client: str | None = None,
        cpu_limit_s: float | None = None,
    ) -> bytes:
        """`run` for callers without an event loop."""
        return self._submit(header, payload, client, cpu_limit_s).answer.result()

    def start(self) -> None:
        """Start all workers now, so that the first jobs need not wait for their processes."""
        with self._changed:
            while len(self._workers) < self._num_workers and not self._is_closed:
                self._add_worker()

    def close(self) -> None:
        """End all workers, and their jobs; also called when the interpreter ends. No job may follow."""
        with self._changed:
            self._is_closed = True
            while (job := self._queue.next()) is not None:
                job.answer.cancel()
            for worker in self._workers:
                worker.retire()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        atexit.unregister(self.close)

    def _submit(
        self,
        header: bytes,
        payload: bytes | bytearray | memoryview,
        client: str | None,
        cpu_limit_s: float | None,
    ) -> _Job:
        job = _Job(header, payload, client, self._cpu_limit_s if cpu_limit_s is None else cpu_limit_s)
        with self._changed:
            if self._is_closed:
                raise Overloaded("the server is shutting down")
            if not self._queue.has_room(job.lane):
                own = sum(waiting.client == client for waiting in self._queue)
                raise Overloaded(
                    f"{len(self._queue)} requests wait to be read, {own} of them with this API key: try again"
                    f" in {_RETRY_AFTER_S} s",
                    retry_after_s=_RETRY_AFTER_S,
                )
            self._queue.add(job.lane, job)
            if len(self._queue) > self._num_idle and len(self._workers) < self._num_workers:
                self._add_worker()
            self._changed.notify()
        return job

    def _add_worker(self) -> None:
        if not self._workers:
            atexit.register(self.close)
        worker = _Worker(self._command, self._environment, self._wall_limit_s)
        self._workers.append(worker)
        # Only a daemon lets the interpreter end as far as `close`.
        thread = threading.Thread(target=self._work, args=(worker,), name="worker-pool", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _withdraw(self, job: _Job) -> bool:
        """Take a job back; False if it is not waiting any more."""
        with self._changed:
            self._queue.discard(job.lane, job)
        return job.answer.cancelled()

    def _abandon(self, job: _Job) -> None:
        with self._changed:
            for worker in self._workers:
                if worker.job is job:
                    job.is_abandoned = True
                    worker.kill()

    def _work(self, worker: _Worker) -> None:
        """Thread of a worker."""
        self._start(worker)
        while self._take(worker):
            self._do(worker)
        worker.end()

    def _start(self, worker: _Worker) -> None:
        with suppress(OSError):  # tried again with the next job
            worker.start()
        worker.wait_until_up()

    def _take(self, worker: _Worker) -> bool:
        """Wait for a worker's next job; False at the end."""
        with self._changed:
            self._num_idle += 1
            while not self._is_closed:
                wait_s = self._end_pauses()
                job = self._queue.next(self._may_begin)
                if job is None:
                    self._changed.wait(wait_s)
                elif job.answer.set_running_or_notify_cancel():
                    self._num_idle -= 1
                    self._num_running[job.client] += 1
                    worker.job = job
                    if self._pauses:
                        # Another worker waits for their ends.
                        self._changed.notify()
                    return True
            return False

    def _may_begin(self, lane: _Lane) -> bool:
        client, is_long = lane
        num_taken = self._num_running[client] + (self._num_pausing[client] if is_long else 0)
        return client is None or num_taken < max(1, self._num_workers - 1)

    def _do(self, worker: _Worker) -> None:
        job = worker.job
        assert job is not None  # noqa: S101 - just taken
        answer, failure = b"", None
        begun_s = time.monotonic()
        try:
            answer = self._answer(worker, job)
        except Exception as error:  # noqa: BLE001 - it goes to the job's waiter
            failure = error
        with self._changed:
            worker.job = None
        if failure is None:
            self._release(job, time.monotonic() - begun_s)
            job.answer.set_result(answer)
            return
        job.answer.set_exception(self._explained(failure, job))
        worker.end()
        self._start(worker)
        # Not sooner: a new process takes a while to come up, and until then its client has no other worker.
        self._release(job, time.monotonic() - begun_s)

    def _release(self, job: _Job, took_s: float) -> None:
        with self._changed:
            _decrement(self._num_running, job.client)
            client, is_long = job.lane
            if client is not None and is_long and not self._holds_model:
                self._num_pausing[client] += 1
                heappush(self._pauses, (time.monotonic() + took_s, client))

    def _end_pauses(self) -> float | None:
        """End the pauses that are over; returns the seconds until the next one ends."""
        while self._pauses:
            wait_s = self._pauses[0][0] - time.monotonic()
            if wait_s > 0:
                return wait_s
            _decrement(self._num_pausing, heappop(self._pauses)[1])
        return None

    def _answer(self, worker: _Worker, job: _Job) -> bytes:
        num_killed = 0
        while True:
            try:
                return worker.answer(job)
            except _OutputEnded as end:
                if end.exit_code == EXIT_STARVED and not job.is_eager:
                    job.is_eager = True
                    log.info("worker_starved", module=self._module)
                elif self._is_given_up(job, end, num_killed):
                    raise
                else:
                    num_killed += 1
                    log.warning("worker_killed", module=self._module, exit_code=end.exit_code)
            worker.end()
            self._start(worker)

    def _is_given_up(self, job: _Job, end: _OutputEnded, num_killed: int) -> bool:
        is_own_doing = end.exit_code not in _FROM_OUTSIDE
        return is_own_doing or job.is_abandoned or self._is_closed or num_killed == self._max_killed

    def _explained(self, failure: Exception, job: _Job) -> Exception:
        if isinstance(failure, OSError):
            return Overloaded(
                f"no process can be started for the request ({failure.strerror}): try again in"
                f" {_RETRY_AFTER_S} s",
                retry_after_s=_RETRY_AFTER_S,
            )
        if not isinstance(failure, _OutputEnded):
            return failure
        code = failure.exit_code
        if code in _FROM_OUTSIDE and not job.is_abandoned and not self._is_closed:
            return Overloaded(
                f"something outside ended the request's process {self._max_killed + 1} times, at last by"
                f" {signal.Signals(-code).name}: try again in {_RETRY_AFTER_S} s, and see whether the head's"
                " machine has memory left",
                retry_after_s=_RETRY_AFTER_S,
            )
        if code == -signal.SIGPROF:
            reason = f"took more than {job.cpu_limit_s:g} s of computing"
        elif code == -signal.SIGALRM:
            reason = f"took longer than {self._wall_limit_s:g} s"
        elif code == EXIT_MEMORY:
            reason = f"needed more than {self._memory_bytes // 2**20} MiB of memory"
        elif code < 0:
            reason = f"ended its process ({signal.Signals(-code).name})"
        else:
            reason = f"ended its process (code {code})"
        if not job.is_abandoned and not self._is_closed:
            log.warning("worker_ended", module=self._module, exit_code=code, reason=reason)
        return WorkerEnded(code, reason)


class _OutputEnded(Exception):
    """A process ended instead of an answer."""

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


class _Worker:
    """A worker's process, started when it is needed. Used by one thread, but for `kill` and `retire`.

    Args:
        command: Program and arguments.
        environment: Its environment.
        wall_limit_s: Most seconds of a job by the clock.

    Attributes:
        job: The job under way; guarded by the pool.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], wall_limit_s: float) -> None:
        self._command = command
        self._environment = environment
        self._wall_limit_s = wall_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._is_up = False
        self._is_retired = False
        self.job: _Job | None = None

    def start(self) -> None:
        """Start the process.

        Raises:
            OSError: If the system refuses one.
        """
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._environment,
        )
        self._is_up = False
        if self._is_retired:
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            _widen(pipe)

    def wait_until_up(self) -> None:
        """Wait until the process has imported what it needs, or has ended."""
        process = self._process
        if process is not None and not self._is_up:
            assert process.stdout is not None  # noqa: S101 - a pipe
            self._is_up = process.stdout.read(len(READY)) == READY

    def kill(self) -> None:
        """End the process, if it runs, and whatever it does. Of any thread."""
        process = self._process
        if process is not None:
            process.kill()

    def retire(self) -> None:
        """End the process, and each that is started later: a job may be about to be tried again."""
        self._is_retired = True
        self.kill()

    def end(self) -> None:
        """End the process, and forget it."""
        if self._process is not None:
            with self._process:
                self._process.kill()
            self._process = None

    def answer(self, job: _Job) -> bytes:
        """Have the process do a job. Blocks.

        Raises:
            OSError: If the system refuses a process.
            _OutputEnded: If the process ended instead.
        """
        if not self._begin(job):
            # It ended before it knew the job, most likely long before: that is not the job's doing.
            self.end()
            if not self._begin(job):
                raise self._output_ended()
        frame = self._read(ANSWER.size)
        (num_bytes,) = ANSWER.unpack(frame)
        if num_bytes > _MAX_ANSWER_BYTES:
            raise self._output_ended()
        return self._read(num_bytes)

    def _begin(self, job: _Job) -> bool:
        """Hand a job over; False if the process ended before it had read it."""
        try:
            self._send(job)
            return self._read(len(BEGUN)) == BEGUN
        except (BrokenPipeError, _OutputEnded):
            return False

    def _read(self, num_bytes: int) -> bytes:
        assert self._process is not None  # noqa: S101 - it was just written to
        assert self._process.stdout is not None  # noqa: S101 - a pipe
        data = self._process.stdout.read(num_bytes)
        if len(data) < num_bytes:
            raise self._output_ended()
        return data

    def _output_ended(self) -> _OutputEnded:
        assert self._process is not None  # noqa: S101 - it was just written to
        try:
            # Its output ends a moment before itself; its own exit code is to be reported.
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return _OutputEnded(code)

    def _send(self, job: _Job) -> None:
        if self._process is None:
            self.start()
        self.wait_until_up()
        assert self._process is not None  # noqa: S101 - just started
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        sizes = JOB.pack(len(job.header), len(job.payload), job.cpu_limit_s, self._wall_limit_s, job.is_eager)
        for part in (sizes + job.header, job.payload):
            begun_s = time.monotonic()
            rest = memoryview(part)
            while rest:
                # Not through the file, which would write the rest of a job once more when it is closed.
                rest = rest[os.write(self._process.stdin.fileno(), rest[:_STEP_BYTES]) :]
                time.sleep(ahead_s(len(part) - len(rest), time.monotonic() - begun_s))


def ahead_s(num_bytes: int, took_s: float) -> float:
    """Seconds to wait before more of something large is moved, since others compute meanwhile.

    Args:
        num_bytes: Bytes that were moved.
        took_s: Seconds that it took.
    """
    return max(0.0, (num_bytes - _UNPACED_BYTES) / _MOST_BYTES_PER_S - took_s)


def unpacked_answer(answer: bytes) -> tuple[dict[str, Any], memoryview]:
    """Values and bytes of an answer of `mesh.util.worker_answers`.

    Not there, since a chat enters this file in any case, and is to enter few.

    Raises:
        MeshError: If it is one.
    """
    (num_bytes,) = HEAD_BYTES.unpack_from(answer)
    start = HEAD_BYTES.size + num_bytes
    values: dict[str, Any] = json.loads(answer[HEAD_BYTES.size : start])
    if (told := values.get("error")) is not None:
        raise _KINDS[told["kind"]](told["message"], param=told["param"])
    return values, memoryview(answer)[start:]


def _decrement(counts: Counter[str | None], client: str | None) -> None:
    counts[client] -= 1
    if not counts[client]:
        del counts[client]


def _widen(pipe: IO[bytes] | None) -> None:
    """Let a pipe hold more, where the system can: each time that it is full or empty, threads take turns."""
    if sys.platform == "linux" and pipe is not None:
        # There is a limit for all pipes of a user.
        with suppress(OSError):
            fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
