"""Signals become cancellation, and tearing down is not cut short."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from mesh.util.tasks import Interruption, first_of, run_interruptible, run_to_end
from spanmesh_proto.errors import ClusterError


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_the_work_after_its_tear_down(number: signal.Signals, code: int) -> None:
    steps: list[str] = []

    async def work(_: Interruption) -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(30)
            steps.append("not interrupted")
        finally:
            # A second signal must not break into this.
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.05)
            steps.append("torn down")

    assert run_interruptible(work) == code
    assert steps == ["torn down"]


def test_a_softened_signal_asks_first_and_the_next_cancels() -> None:
    steps: list[str] = []

    async def work(interruption: Interruption) -> None:
        asked = asyncio.Event()
        interruption.soften(asked.set)
        os.kill(os.getpid(), signal.SIGINT)
        await asked.wait()
        steps.append("asked")
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(30)
        steps.append("not interrupted")

    assert run_interruptible(work) == 130
    assert steps == ["asked"]


def test_a_signal_that_is_softened_no_more_cancels() -> None:
    async def work(interruption: Interruption) -> None:
        interruption.soften(lambda: pytest.fail("it was taken back"))
        interruption.soften(None)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(30)
        pytest.fail("it was not cancelled")

    assert run_interruptible(work) == 0


def test_handlers_that_a_library_took_are_taken_back() -> None:
    async def work(interruption: Interruption) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        interruption.arm()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(30)

    assert run_interruptible(work) == 0


# Goes on at each line. Nothing but a signal ends it.
WAITING = """
import asyncio, sys
from mesh.util.tasks import run_interruptible
async def work(interruption):
    for said in ("ready", "armed again", "still there"):
        print(said, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        interruption.arm()
    await asyncio.sleep(600)
sys.exit(run_interruptible(work))
"""


def started(before: str) -> subprocess.Popen[str]:
    """The program, in the place of a shell that did something before: what a shell ignores stays ignored."""
    arguments = ["/bin/sh", "-c", f'{before}exec "$@"', "sh", sys.executable, "-c", WAITING]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("heeded_hang_ups")
def test_a_closed_terminal_ends_a_command() -> None:
    with started("") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def test_a_closed_terminal_does_not_end_a_command_that_was_started_with_nohup() -> None:
    with started("trap '' HUP; ") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for said in ("ready\n", "armed again\n", "still there\n"):
            assert process.stdout.readline() == said
            process.send_signal(signal.SIGHUP)
            process.stdin.write("\n")
            process.stdin.flush()
        process.terminate()
        assert process.wait(60) == 0


def test_work_that_ends_or_fails_by_itself_is_not_an_interruption() -> None:
    async def ends(_: Interruption) -> None:
        await asyncio.sleep(0)

    async def fails(_: Interruption) -> None:
        raise ClusterError("broken")

    assert run_interruptible(ends) == 0
    with pytest.raises(ClusterError, match="broken"):
        run_interruptible(fails)


async def test_the_first_to_end_ends_the_others() -> None:
    ended: list[str] = []

    async def short() -> None:
        await asyncio.sleep(0)

    async def long() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            ended.append("long")

    await first_of(short(), long())
    assert ended == ["long"]


async def test_the_first_to_fail_is_heard() -> None:
    async def fails() -> None:
        raise ClusterError("broken")

    async def long() -> None:
        await asyncio.sleep(30)

    with pytest.raises(ClusterError, match="broken"):
        await first_of(long(), fails())


@pytest.mark.parametrize("error", [None, ClusterError("no")])
async def test_a_cleanup_goes_on_however_often_it_is_cancelled(error: ClusterError | None) -> None:
    steps: list[str] = []

    async def cleanup() -> None:
        await asyncio.sleep(0.02)
        steps.append("cleaned up")
        if error is not None:
            raise error

    task = asyncio.create_task(run_to_end(cleanup()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == ["cleaned up"]
    if error is None:
        await run_to_end(cleanup())
    else:
        with pytest.raises(ClusterError, match="no"):
            await run_to_end(cleanup())
    assert steps == ["cleaned up"] * 2
