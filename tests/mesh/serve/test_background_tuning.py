"""Tuning in the background: real trainings of a tiny drafter; what is chosen, left and erased."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from mesh.api.api_keys import KeyRecord, add_key, digest_of, remove_key
from mesh.cluster.host_facts import HostFacts, read_versions
from mesh.draft.loading import load_drafter
from mesh.engine import GenerationRequest
from mesh.options.host import HeadOptions
from mesh.serve.background_tuning import BackgroundTuning
from mesh.serve.group_drafter import GroupDrafter
from mesh.serve.preflight import check_model
from mesh.serve.tuning_room import tuning_room
from mesh.tuning.background import TuningBounds
from mesh.tuning.drafter_file import head_rows
from mesh.tuning.jobs import MeasureJob, Schedule, TrainingState, TuneOutcome
from mesh.tuning.tuner import measure_drafters
from spanmesh_proto.errors import InvalidRequest
from stages.gguf import read_header
from tests.support.changed_drafters import write_changed
from tests.support.recordings import foreseeable, write_recording
from tests.support.tiny_eagle3 import TinyEagle3
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mesh.serve.tuning_room import TuningRoom
    from mesh.tuning.jobs import Progress, TuneJob
    from stages.isolated import ProcessHandle

pytest.importorskip("torch", reason="torch is not installed: make environment")
pytestmark = pytest.mark.model

ALICE = KeyRecord("alice", digest_of("a"), may_record=True, group="staff")
BOB = KeyRecord("bob", digest_of("b"), may_record=True, group="staff")
CAROL = KeyRecord("carol", digest_of("c"), may_record=True)
SCHEDULE = Schedule(passes=6, num_steps=1, batch=4, rate=2e-2)
# Starts a process that gives way, and says its id.
PARENT = """
import multiprocessing, os, time
from mesh.tuning import tuner

def main():
    tuner._give_way()
    print(os.getpid(), flush=True)
    time.sleep(60)

if os.fork() == 0:
    main()
time.sleep(60)
"""
BOUNDS = TuningBounds(idle_s=0.0, least_tokens=1000, schedule=SCHEDULE)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("files")
    target = TinyModel("llama", is_float=True).write(folder / "target.gguf")
    return target, TinyEagle3(num_own_tokens=300).write(target, folder / "drafter.gguf")


@pytest.fixture
def room(files: tuple[Path, Path], tmp_path: Path) -> TuningRoom:
    target, drafter = files
    head = head_rows(read_header(target)).rows()
    # Those of Bob are few, and Carol is of no group.
    keys = [(BOB if number < 4 else ALICE if number < 76 else CAROL) for number in range(80)]
    texts = [foreseeable(number, head) for number in range(80)]
    write_recording(
        tmp_path / "of",
        target,
        [
            replace(text, info=replace(text.info, key_digest=key.digest.hex()))
            for text, key in zip(texts, keys, strict=True)
        ],
    )
    for key in (ALICE, BOB, CAROL):
        add_key(tmp_path / "keys", key)
    options = HeadOptions(
        model=target,
        draft_path=drafter,
        ctx_size=64,
        parallel=2,
        record_path=tmp_path / "of",
        tune_group="staff",
        api_key_path=tmp_path / "keys",
    )
    known = check_model(options, lambda: HostFacts(1 << 34, 1, 20.0, read_versions()))
    found = tuning_room(options, known)
    assert found is not None
    return found


@contextmanager
def tuning(
    room: TuningRoom, bounds: TuningBounds = BOUNDS
) -> Iterator[tuple[BackgroundTuning, GroupDrafter]]:
    limits = room.options.draft_options(room.known.draft_ctx_size)
    base = load_drafter(room.base, room.known.tokenizer, limits, root=room.recording)
    group = GroupDrafter(base, room.is_member)
    found = BackgroundTuning(room, group, bounds)
    found.came()
    try:
        yield found, group
    finally:
        found.close()
        group.close()
        base.close()


def pid_of_training(running: BackgroundTuning) -> int:
    assert running._run is not None
    pid = running._run._handle._pid
    assert pid is not None
    return pid


def until(is_so: Callable[[], object], within_s: float = 60.0) -> None:
    end_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def names(room: TuningRoom) -> list[str]:
    """Of all that is there of tuned drafters."""
    return sorted(path.name for path in room.tuned.path.iterdir())


def asked_by(key: KeyRecord) -> GenerationRequest:
    return GenerationRequest((1, 2, 3), 4, client=key.digest.hex())


def serves(room: TuningRoom, group: GroupDrafter, number: int) -> None:
    """Check that the group, and it alone, is served with the drafter of a number."""
    assert group.number == number
    assert room.is_member(asked_by(ALICE))
    assert not room.is_member(asked_by(CAROL))
    assert not room.is_member(GenerationRequest((1, 2, 3), 4))
    proposer = group.open(lambda _logits, _position, _tokens: 5, ALICE.digest.hex())
    assert proposer is not None
    assert proposer.name == f"eagle3/{number}"
    proposer.close()


def tuned(room: TuningRoom, bounds: TuningBounds = BOUNDS) -> None:
    """Have a drafter tuned and chosen."""
    with tuning(room, bounds) as (running, group):
        until(lambda: running.status().chosen)
        serves(room, group, 1)


def test_a_better_drafter_is_chosen_and_goes_with_a_key(room: TuningRoom) -> None:
    with tuning(room) as (running, group):
        serves(room, group, 0)
        until(lambda: running.status().chosen or running.status().refused)
        status = running.status()
        assert status.chosen == 1, status
        assert status.drafter == "0001.gguf"
        assert status.gain is not None
        assert status.gain > 0.2
        # Of 76 prompts 12 are held out and 7 watched; Carol's four are not learned.
        assert (status.learned_prompts, status.learned_tokens) == (57, 57 * 36)
        assert names(room) == ["0001.gguf", "0001.json", "0001.loaded", "tried.json"]
        serves(room, group, 1)
        (found,) = room.tuned.drafters()
        assert set(found.keys) == {ALICE.digest.hex(), BOB.digest.hex()}
        until(lambda: running.status().state == "waiting for answers")
        assert running.status().new_tokens == 0
        # A session that runs goes on with no drafts.
        session = group.open(lambda _logits, _position, _tokens: 5, ALICE.digest.hex())
        assert session is not None
        assert room.options.api_key_path is not None
        remove_key(room.options.api_key_path, "bob")
        until(lambda: running.status().gone_back)
        serves(room, group, 0)
        assert names(room) == ["tried.json"]
        session.extend([1, 2, 3])
        assert session.propose(2).tokens == ()
        session.close()
        assert "of the group no more" in (running.status().latest or "")


@pytest.mark.sweep
def test_it_is_taken_again_after_a_restart_and_left_when_an_operator_wants_it(room: TuningRoom) -> None:
    tuned(room)
    with tuning(room) as (running, group):
        until(lambda: group.number)
        serves(room, group, 1)
        # The client of another one went away, which ends nothing.
        gone: Future[None] = Future()
        gone.cancel()
        running._wanted_back.put(gone)
        asyncio.run(asyncio.wait_for(running.go_back(), 60.0))
        serves(room, group, 0)
        with pytest.raises(InvalidRequest, match="that tuning began with: there is none before it"):
            asyncio.run(running.go_back())
        assert names(room) == ["tried.json"]
    with tuning(room) as (running, group):
        time.sleep(1.0)
        serves(room, group, 0)


@pytest.mark.sweep
def test_it_is_left_when_it_is_served_worse_than_the_one_before(room: TuningRoom) -> None:
    bounds = replace(BOUNDS, least_windows=50)
    with tuning(room, bounds) as (running, group):
        for _ in range(50):
            running.drafted("eagle3/0", is_accepted=True)
        until(lambda: running.status().chosen)
        for index in range(50):
            running.drafted("eagle3/1", is_accepted=index < 45)
            running.drafted("eagle3", is_accepted=False)
        time.sleep(1.2)
        serves(room, group, 1)
        running.drafted("eagle3/1", is_accepted=False)
        until(lambda: running.status().gone_back)
        serves(room, group, 0)
        assert "right less often than the drafter before" in (running.status().latest or "")


@pytest.mark.sweep
def test_a_worse_candidate_is_never_served(room: TuningRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real file with noise for weights, measured and judged as all are."""

    def spoil(job: TuneJob, progress: Progress, _handle: ProcessHandle) -> TuneOutcome:
        run = job.output.with_name(job.output.name + ".run")
        run.mkdir()
        noise = np.random.default_rng(1).standard_normal((64, 3 * 64)).astype(np.float32)
        spoilt = write_changed(job.drafter, run / "candidate.gguf", {"fc.weight": noise})
        files = (room.file(better), spoilt)
        (found,) = measure_drafters(MeasureJob(job.folders, job.target, files, job.device), progress)
        assert len(found.drafters[0].answers) > 8
        state = TrainingState(stopped_by="passes")
        before, after = found.drafters
        return TuneOutcome(spoilt, before, after, 1, 1, 0, 1, state, 1, is_retrimmed=False)

    tuned(room)
    better = 1
    (room.tuned.path / "tried.json").unlink()
    monkeypatch.setattr("mesh.tuning.background_run.tune", spoil)
    with tuning(room, replace(BOUNDS, least_prompts=1)) as (running, group):
        until(lambda: running.status().refused)
        status = running.status()
        serves(room, group, 1)
        assert "0002 was refused: its gain is not sure: -" in (status.latest or "")
        assert status.chosen == 0
        assert names(room) == ["0001.gguf", "0001.json", "0001.loaded", "tried.json"]


@pytest.mark.sweep
def test_a_training_stands_still_while_requests_run_and_goes_on_after_a_restart(room: TuningRoom) -> None:
    bounds = replace(BOUNDS, idle_s=0.3, schedule=replace(SCHEDULE, passes=2000))
    with tuning(room, bounds) as (running, _group):
        until(lambda: (running.status().step or "").startswith("learning"))
        running.came()
        running.began("session")
        assert running.status().state == "paused"
        step = running.status().step
        time.sleep(1.5)
        assert running.status().step == step
        running.ended("session")
        until(lambda: running.status().state == "tuning")
        until(lambda: running.status().step != step)
        # A checkpoint is written after a minute, or where it ends.
        assert (room.tuned.path / "0001.gguf.run" / "best.npz").exists()
    assert names(room) == ["0001.gguf.run", "0001.json"]
    with tuning(room, bounds) as (running, _group):
        until(lambda: (running.status().step or "").startswith("learning"))
        assert running._run is not None
        assert running._run.is_resumed
        os.kill(pid_of_training(running), signal.SIGKILL)
        # What cannot go on begins anew, once.
        until(lambda: names(room) == ["0002.gguf.run", "0002.json"])
        until(lambda: (running.status().step or "").startswith("learning"))
        os.kill(pid_of_training(running), signal.SIGKILL)
        until(lambda: running.status().refused)
        assert "ended with exit code -9" in (running.status().latest or "")
        assert names(room) == ["tried.json"]


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system hangs up on the process")
def test_a_stopped_training_does_not_outlive_its_parent() -> None:
    """Its parent is killed, as a head may be."""
    parent = subprocess.Popen([sys.executable, "-P", "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.Process(pid).nice() >= 15
    os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.communicate()
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 10.0)
