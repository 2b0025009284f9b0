"""Pool of worker processes: bounds of jobs, replacement, turns of clients, cancellation, the end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest

from mesh.util import worker_main
from mesh.util.worker_pool import WorkerEnded, WorkerPool, ahead_s
from spanmesh_proto.errors import Overloaded
from stages.process_limits import num_usable
from tests.qualification.busy_processors import busy_programs
from tests.support import pool_worker

# A file, since isolated processes know no tests.
WORKER = str(Path(pool_worker.__file__))
AUTOGROUP = Path("/proc/self/autogroup")


def make_pool(
    num_workers: int = 2,
    max_waiting: int = 64,
    *,
    wall_limit_s: float = 60,
    memory_mib: int = 1024,
    is_long: bool = False,
    environment: Mapping[str, str] = MappingProxyType({"KNOWN": "yes"}),
) -> WorkerPool:
    memory_bytes = memory_mib * 2**20
    found = WorkerPool(
        "tests",
        num_workers=num_workers,
        cpu_limit_s=10,
        wall_limit_s=wall_limit_s,
        memory_bytes=memory_bytes,
        is_long=is_long,
        environment=environment,
        max_waiting=max_waiting,
    )
    module = found._command.index("tests")
    found._command = (sys.executable, "-I", WORKER, *found._command[module + 1 :])
    return found


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    found = make_pool()
    yield found
    found.close()


@pytest.fixture
def lone() -> Iterator[WorkerPool]:
    """A pool with one worker, which runs."""
    found = make_pool(num_workers=1, max_waiting=4)
    found.run_blocking(b"echo")
    yield found
    found.close()


@pytest.fixture
def holder() -> Iterator[WorkerPool]:
    """A pool with one worker, which runs and holds a model."""
    found = make_pool(num_workers=1, memory_mib=0)
    found.run_blocking(b"echo")
    yield found
    found.close()


def wait_until_up(pool: WorkerPool) -> None:
    while not all(worker._is_up for worker in pool._workers):
        time.sleep(0.01)


async def test_the_restart_of_a_process_counts_for_the_client_whose_job_ended_it(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    pool = make_pool(environment={"GATE": str(gate)})
    pool.start()
    try:
        await asyncio.to_thread(wait_until_up, pool)
        gate.unlink()
        with pytest.raises(WorkerEnded):
            await pool.run(b"end SIGABRT", client="a")
        own = asyncio.create_task(pool.run(b"echo", b"own", client="a"))
        # The other process is for others, as long as this one is not back.
        assert await pool.run(b"echo", b"other", client="b") == b"other"
        assert not own.done()
        gate.touch()
        assert await own == b"own"
    finally:
        gate.touch()
        pool.close()


async def test_behind_a_long_job_its_client_pauses(pool: WorkerPool) -> None:
    begun_s = time.monotonic()
    await pool.run(b"sleep 0.3", bytes(2**16), client="a")
    await pool.run(b"echo", bytes(2**16), client="a")
    # As long as the job took; its worker is free for others meanwhile.
    assert time.monotonic() - begun_s >= 0.6


async def test_short_jobs_pass_long_ones_that_wait(pool: WorkerPool) -> None:
    first, second = (asyncio.create_task(pool.run(b"sleep 0.5", bytes(2**16), client="b")) for _ in range(2))
    await asyncio.sleep(0)
    await pool.run(b"echo", client="b")
    # The second one still waits for the end of the pause behind the first.
    assert first.done()
    assert [not pool._num_running, len(pool._queue), second.done()] == [True, 1, False]
    await second


async def test_short_jobs_and_those_of_no_client_have_no_pause(pool: WorkerPool) -> None:
    await pool.run(b"sleep 0.3", bytes(2**16))
    await pool.run(b"sleep 0.3", client="a")
    assert not pool._pauses


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_long_jobs_have_a_lower_priority(lone: WorkerPool) -> None:
    first, large, last = (int(lone.run_blocking(b"niceness", bytes(size))) for size in (0, 2**20, 0))
    assert (large, last) == (min(19, first + 15), first)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_what_holds_a_model_yields_and_has_no_limits_but_of_time(holder: WorkerPool) -> None:
    first, large, last = (int(holder.run_blocking(b"policy 0", bytes(size))) for size in (0, 2**20, 0))
    assert [first, large, last] == [os.SCHED_OTHER, os.SCHED_IDLE, os.SCHED_OTHER]
    assert holder.run_blocking(b"zeros 314572800") == bytes(2**20 * 300)
    with pytest.raises(WorkerEnded, match=r"took more than 0\.1 s of computing"):
        holder.run_blocking(b"spin", cpu_limit_s=0.1)


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="processors are not shared among sessions")
@pytest.mark.parametrize(("memory_mib", "is_long"), [(0, False), (1024, True), (1024, False)])
def test_what_holds_a_model_or_does_long_jobs_has_a_session_with_a_smaller_share(
    memory_mib: int, *, is_long: bool
) -> None:
    pool = make_pool(num_workers=1, memory_mib=memory_mib, is_long=is_long)
    try:
        pid = json.loads(pool.run_blocking(b"look"))["pid"]
        has_own, autogroup = os.getsid(pid) == pid, Path(f"/proc/{pid}/autogroup").read_text("ascii")
    finally:
        pool.close()
    if memory_mib and not is_long:
        assert (has_own, autogroup) == (False, AUTOGROUP.read_text("ascii"))
    else:
        assert (has_own, autogroup.split()[1:]) == (True, ["nice", "5"])


def test_large_jobs_leave_processors_to_others_while_they_are_moved(lone: WorkerPool) -> None:
    begun_s = time.monotonic()
    assert lone.run_blocking(b"echo", bytes(12 * 2**20)) == bytes(12 * 2**20)
    assert time.monotonic() - begun_s >= ahead_s(11 * 2**20, 0) > 0.1
    assert ahead_s(4 * 2**20, 0) == ahead_s(12 * 2**20, 1) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="no thread computes on idle processors only")
def test_a_job_that_yields_and_gets_no_processor_is_done_like_others() -> None:
    environment = {"LOOK_S": "0.4", "SESSION_NICENESS": "19"}
    pool = make_pool(num_workers=1, memory_mib=0, environment=environment)
    try:
        pool.run_blocking(b"echo")
        with busy_programs(2 * num_usable()):
            policy = pool.run_blocking(b"policy 0.5", bytes(2**16))
        assert int(policy) == os.SCHED_OTHER
        # The next one yields again.
        assert int(pool.run_blocking(b"policy 0", bytes(2**16))) == os.SCHED_IDLE
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("since", "now", "is_starved"),
    [
        # Nanoseconds of computing and of waiting: fed, hungry, and waiting for something else.
        ({"1": (0, 0)}, {"1": (60, 940)}, False),
        ({"1": (0, 0)}, {"1": (40, 960)}, True),
        ({"1": (70, 30)}, {"1": (70, 30)}, False),
        # A thread has ended, or begun.
        ({"1": (500, 0), "2": (900, 0)}, {"1": (700, 300)}, False),
        ({"1": (500, 0)}, {"1": (500, 0), "2": (1, 99)}, True),
    ],
)
def test_threads_that_end_take_no_share_of_those_that_compute(
    since: dict[str, tuple[int, int]], now: dict[str, tuple[int, int]], *, is_starved: bool
) -> None:
    assert worker_main._is_starved(since, now) is is_starved


def test_the_end_starts_no_process_anew(tmp_path: Path) -> None:
    """Something has killed the worker of a job, which is about to be tried once more."""
    gate = tmp_path / "gate"
    gate.touch()
    pool = make_pool(num_workers=1, memory_mib=0, environment={"GATE": str(gate)})
    closing = threading.Thread(target=pool.close)
    try:
        pool.run_blocking(b"echo")
        (worker,) = pool._workers
        former = worker._process
        gate.unlink()
        job = pool._submit(b"end SIGKILL", b"", None, None)
        while worker._process in {former, None}:
            time.sleep(0.01)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
        assert isinstance(job.answer.exception(), WorkerEnded)
    finally:
        gate.touch()
        closing.join()


async def test_behind_a_long_job_for_a_model_its_client_has_no_pause(holder: WorkerPool) -> None:
    await holder.run(b"sleep 0.3", bytes(2**16), client="a")
    assert not holder._pauses


async def test_what_holds_a_model_stays_when_a_client_leaves(holder: WorkerPool) -> None:
    pid = json.loads(await holder.run(b"look"))["pid"]
    left = asyncio.create_task(holder.run(b"sleep 1.5", client="a"))
    await asyncio.sleep(0.1)
    waiting = asyncio.create_task(holder.run(b"sleep 60", client="a"))
    await asyncio.sleep(0)
    for task in (waiting, left):
        task.cancel()
    assert json.loads(await asyncio.wait_for(holder.run(b"look", client="b"), 20))["pid"] == pid


def test_a_job_that_had_what_holds_a_model_killed_is_tried_once_more(holder: WorkerPool) -> None:
    with pytest.raises(Overloaded, match=r"outside ended .* 2 times, at last by SIGKILL"):
        holder.run_blocking(b"end SIGKILL")
    assert holder.run_blocking(b"echo", b"next") == b"next"


def test_pages_of_large_jobs_are_returned_when_no_other_one_comes(lone: WorkerPool) -> None:
    process = psutil.Process(pid_of(lone))
    rest_bytes = process.memory_info().rss
    lone.run_blocking(b"echo", bytes(128 * 2**20))
    deadline_s = time.monotonic() + 30
    while process.memory_info().rss > rest_bytes + 8 * 2**20:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def pid_of(pool: WorkerPool) -> int:
    found: int = json.loads(pool.run_blocking(b"look"))["pid"]
    return found


async def test_large_jobs_come_back_whole(pool: WorkerPool) -> None:
    payload = os.urandom(2**20) * 16
    assert await pool.run(b"echo", payload) == payload


def test_it_serves_several_loops_and_callers_without_one(pool: WorkerPool) -> None:
    for _ in range(2):
        assert asyncio.run(pool.run(b"echo", b"a")) == b"a"
    assert pool.run_blocking(b"echo", b"b") == b"b"


def test_workers_have_the_given_environment_and_no_other(pool: WorkerPool) -> None:
    # The interpreter and `mesh` set some of their own.
    own = {"LC_CTYPE", "GRPC_EXPERIMENTS", "GRPC_VERBOSITY", "GOMP_SPINCOUNT"}
    environment = json.loads(pool.run_blocking(b"look"))["environment"]
    assert {name: value for name, value in environment.items() if name not in own} == {"KNOWN": "yes"}


def test_what_a_job_prints_damages_no_answer(pool: WorkerPool) -> None:
    assert pool.run_blocking(b"print") == b""
    assert pool.run_blocking(b"echo", b"whole") == b"whole"


@pytest.mark.parametrize(
    ("header", "cpu_limit_s", "code", "reason"),
    [
        (b"spin", 0.1, -signal.SIGPROF, "took more than 0.1 s of computing"),
        (b"fill", None, 75, "needed more than 1024 MiB of memory"),
        (b"end SIGSEGV", None, -signal.SIGSEGV, r"ended its process \(SIGSEGV\)"),
        (b"fail", None, 1, r"ended its process \(code 1\)"),
    ],
)
def test_a_job_that_ends_its_worker_is_reported_and_the_next_one_is_done(
    lone: WorkerPool, header: bytes, cpu_limit_s: float | None, code: int, reason: str
) -> None:
    with pytest.raises(WorkerEnded, match=reason) as failed:
        lone.run_blocking(header, cpu_limit_s=cpu_limit_s)
    assert failed.value.exit_code == code
    assert lone.run_blocking(b"echo", b"next") == b"next"


def test_a_job_has_the_time_of_the_clock_and_the_memory_of_its_pool() -> None:
    pool = make_pool(num_workers=1, wall_limit_s=0.2, memory_mib=256)
    try:
        with pytest.raises(WorkerEnded, match=r"took longer than 0\.2 s"):
            pool.run_blocking(b"sleep 30")
        with pytest.raises(WorkerEnded, match="256 MiB of memory"):
            pool.run_blocking(b"echo", bytes(300 * 2**20))
    finally:
        pool.close()


def test_a_worker_that_ended_while_idle_is_replaced_before_the_next_job(lone: WorkerPool) -> None:
    pid = pid_of(lone)
    os.kill(pid, signal.SIGKILL)
    assert pid_of(lone) != pid


def test_processes_that_are_ended_from_outside_are_not_the_jobs_doing(lone: WorkerPool) -> None:
    with pytest.raises(Overloaded, match=r"outside ended .* 9 times, at last by SIGTERM: try again in 2 s"):
        lone.run_blocking(b"end SIGTERM")
    assert lone.run_blocking(b"echo", b"next") == b"next"


async def test_one_client_leaves_a_worker_to_others(pool: WorkerPool) -> None:
    long = [asyncio.create_task(pool.run(b"sleep 30", client="ann")) for _ in range(4)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(pool.run(b"echo", b"short", client="bob"), 20) == b"short"
    for task in long:
        task.cancel()
    await asyncio.gather(*long, return_exceptions=True)
    # What runs still counts, until it has ended.
    assert await asyncio.wait_for(pool.run(b"echo", b"mine", client="ann"), 20) == b"mine"


async def test_clients_take_turns(lone: WorkerPool) -> None:
    order: list[str] = []

    async def run(client: str) -> None:
        await lone.run(b"echo", client=client)
        order.append(client)

    gate = asyncio.create_task(lone.run(b"sleep 0.2"))
    await asyncio.sleep(0)
    await asyncio.gather(gate, *(asyncio.create_task(run(client)) for client in ("ann", "ann", "bob")))
    assert order == ["ann", "bob", "ann"]


async def test_waiting_jobs_are_bounded_and_leave_the_queue_with_their_client(lone: WorkerPool) -> None:
    gate = asyncio.create_task(lone.run(b"sleep 30"))
    await asyncio.sleep(0.1)
    waiting = [asyncio.create_task(lone.run(b"echo", client="ann")) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="4 requests wait to be read, 4 of them with this API key"):
        await lone.run(b"echo", client="ann")
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    later = asyncio.create_task(lone.run(b"echo", b"later", client="ann"))
    await asyncio.sleep(0)
    gate.cancel()
    assert await asyncio.wait_for(later, 20) == b"later"


async def test_a_job_that_is_not_wanted_may_end_by_itself(lone: WorkerPool) -> None:
    pid = pid_of(lone)
    short = asyncio.create_task(lone.run(b"sleep 0.2"))
    await asyncio.sleep(0.05)
    short.cancel()
    await asyncio.sleep(0)
    assert await lone.run(b"echo", b"next") == b"next"
    assert pid_of(lone) == pid


async def test_closing_ends_processes_and_jobs(pool: WorkerPool) -> None:
    closing = make_pool(num_workers=1)
    process = psutil.Process(pid_of(closing))
    running = asyncio.create_task(closing.run(b"sleep 30"))
    await asyncio.sleep(0.1)
    waiting = asyncio.create_task(closing.run(b"echo"))
    await asyncio.sleep(0)
    closing.close()
    assert not process.is_running()
    with pytest.raises(WorkerEnded):
        await running
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(Overloaded, match="shutting down"):
        await closing.run(b"echo")


def test_workers_end_when_their_parent_is_killed() -> None:
    program = (
        "import json, os, signal, sys; from mesh.util.worker_pool import WorkerPool;"
        "pool = WorkerPool('tests', num_workers=1, cpu_limit_s=9, wall_limit_s=9, memory_bytes=2**30);"
        f"pool._command = (sys.executable, '-I', {WORKER!r}, str(2**30), '0');"
        "print(json.loads(pool.run_blocking(b'look'))['pid'], flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    parent = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False)
    assert parent.returncode == -signal.SIGKILL
    until_s = time.monotonic() + 30
    while psutil.pid_exists(int(parent.stdout)):
        assert time.monotonic() < until_s
        time.sleep(0.01)
