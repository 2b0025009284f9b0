"""Stages that fall silent or die: how that is noticed, and what becomes of requests meanwhile."""

import asyncio
import signal
import subprocess
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.coordinator import feature_plug
from mesh.coordinator.coordinator import Coordinator
from mesh.coordinator.feature_store import FeatureNeeds
from mesh.coordinator.heartbeat import LivenessMonitor
from mesh.coordinator.options import CoordinatorOptions
from mesh.coordinator.request_queue import RequestGate
from mesh.coordinator.telemetry import ActiveRing
from mesh.engine import GenerationRequest
from spanmesh_proto.errors import ModelDoesNotFit, StageFailed
from stages.sampling.sampler import Sampler, SamplingParams
from tests.support.fake_stage import FakeRuntime, fake_ring, plain_answer
from tests.support.repairable_ring import RepairableRing, serving
from tests.support.ring_harness import (
    MESH_ID,
    MESH_KEY,
    RunningStage,
    collect,
    plugs_for,
    running_services,
)
from tests.support.stage_process import stage_process

OPTIONS = CoordinatorOptions(128, 2, FakeRuntime.max_rows, 64, ping_interval_s=0.05, ping_timeout_s=0.3)
PROMPT = tuple(range(3, 30))
TEXT = plain_answer(PROMPT, 40, Sampler(SamplingParams()).sample)
REQUEST = GenerationRequest(PROMPT, 40)


@given(
    num_stages=st.integers(1, 5),
    steps=st.lists(st.tuples(st.floats(0, 10), st.sets(st.integers(0, 4))), max_size=60),
)
def test_only_time_in_which_a_stage_could_be_heard_counts(
    num_stages: int, steps: list[tuple[float, set[int]]]
) -> None:
    liveness = LivenessMonitor(num_stages, interval_s=0.5, timeout_s=2.0)
    silent_s = [0.0] * num_stages
    for elapsed_s, heard in steps:
        for stage in heard & set(range(num_stages)):
            liveness.note_reply(stage)
            silent_s[stage] = 0.0
        silent_s = [each_s + min(elapsed_s, 0.5) for each_s in silent_s]
        assert liveness.tick(elapsed_s) == tuple(
            stage for stage, each_s in enumerate(silent_s) if each_s > 2.0
        )
    liveness.note_all()
    assert liveness.tick(0.5) == ()


@dataclass
class Apart:
    """A ring whose middle stage has a process of its own."""

    process: subprocess.Popen[bytes]
    coordinator: Coordinator
    stages: list[RunningStage]


@pytest.fixture
async def apart() -> AsyncIterator[Apart]:
    first, _, tail = fake_ring()
    async with running_services([first]) as starts, running_services([tail], first_index=2) as ends:
        end = ends[0].address
        async with stage_process(1, 3, MESH_ID, MESH_KEY, end.address) as (process, middle):
            await starts[0].service.connect(middle.address)
            coordinator = Coordinator(
                [starts[0].address, middle, end],
                OPTIONS,
                plugs=plugs_for(),
                mesh_id=MESH_ID,
                mesh_key=MESH_KEY,
                make_proposers=None,
                clock_s=asyncio.get_running_loop().time,
            )
            await coordinator.start()
            yield Apart(process, coordinator, [*starts, *ends])
            await coordinator.stop()


@pytest.mark.parametrize("blow", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_frozen_and_a_killed_stage_are_found_and_replaced(apart: Apart, blow: signal.Signals) -> None:
    coordinator, (first, tail) = apart.coordinator, apart.stages
    parts = coordinator.generate(REQUEST)
    said = list((await anext(parts)).tokens)
    apart.process.send_signal(blow)
    async with asyncio.timeout(20):
        loss = await coordinator.broken()
    assert 1 in loss.suspects
    assert loss.is_crash == (blow is signal.SIGKILL)
    assert bool(loss.silent) == (blow is signal.SIGSTOP)
    if blow is signal.SIGSTOP:
        assert loss.suspects == loss.silent == (1,)
        assert loss.reason.endswith("has not answered for 0.3 s")
    async with running_services([fake_ring()[1]], first_index=1) as (middle,):
        for index, stage in ((0, first), (1, middle), (2, tail)):
            await stage.service.rejoin(index, "again", "other key", 0)
        await first.service.connect(middle.address.address)
        await middle.service.connect(tail.address.address)
        addresses = [first.address, middle.address, tail.address]
        await coordinator.reconnect(addresses, "again", "other key")
        # Whoever wakes up later finds nobody who listens.
        apart.process.send_signal(signal.SIGCONT)
        async for part in parts:
            said += part.tokens
        assert coordinator.is_ready
        await coordinator.stop()
    assert said == TEXT


async def test_a_coordinator_that_was_late_itself_blames_nobody() -> None:
    ring = RepairableRing()
    async with serving(ring, OPTIONS) as coordinator:
        parts = coordinator.generate(REQUEST)
        said = list((await anext(parts)).tokens)
        for _ in range(3):
            signal.sigtimedwait([], 0.5)  # the whole event loop stands still
            await asyncio.sleep(0)
        async for part in parts:
            said += part.tokens
    assert said == TEXT
    assert ring.num_repairs == 0


async def test_a_request_during_a_repair_waits_for_it() -> None:
    ring = RepairableRing()
    async with serving(ring, replace(OPTIONS, repair_wait_s=30.0)) as coordinator:
        coordinator.pause("a test")
        waiting = [asyncio.create_task(collect(coordinator, REQUEST)) for _ in range(4)]
        done, _ = await asyncio.wait(waiting, timeout=0.1)
        assert not done
        await ring.repair()
        assert [(await answer)[0] for answer in waiting] == [TEXT] * 4


async def test_a_repair_that_takes_too_long_turns_requests_away_and_keeps_those_that_run() -> None:
    ring = RepairableRing()
    async with serving(ring, replace(OPTIONS, num_slots=1, repair_wait_s=0.05)) as coordinator:
        parts = coordinator.generate(REQUEST)
        said = list((await anext(parts)).tokens)
        in_line = asyncio.create_task(collect(coordinator, REQUEST))
        await asyncio.sleep(0)
        coordinator.pause("a test")
        with pytest.raises(StageFailed, match=r"not complete within 0\.05 s") as refusal:
            await in_line
        assert refusal.value.retry_after_s == 5
        with pytest.raises(StageFailed, match="being repaired"):
            await collect(coordinator, REQUEST)
        await ring.repair()
        async for part in parts:
            said += part.tokens
        assert said == TEXT
        assert (await collect(coordinator, REQUEST))[0] == TEXT


async def test_a_mesh_that_was_given_up_says_why_and_serves_again() -> None:
    ring = RepairableRing()
    async with serving(ring, OPTIONS) as coordinator:
        running = asyncio.create_task(collect(coordinator, REQUEST))
        coordinator.pause("a test")
        waiting = asyncio.create_task(collect(coordinator, REQUEST))
        await asyncio.sleep(0)
        coordinator.give_up(ModelDoesNotFit("layers [1, 2) need 3 GB, 2 GB are free: join a host"))
        assert coordinator.refusal is not None
        late = asyncio.create_task(collect(coordinator, REQUEST))
        for answer in (running, waiting, late):
            with pytest.raises(StageFailed, match=r"layers \[1, 2\) need 3 GB") as refusal:
                await answer
            assert refusal.value.retry_after_s == 10
        await ring.repair()
        assert (await collect(coordinator, REQUEST))[0] == TEXT


async def test_a_ring_that_cannot_be_opened_leaves_sessions_waiting() -> None:
    ring = RepairableRing()
    async with serving(ring, replace(OPTIONS, repair_wait_s=30.0)) as coordinator:
        answer = asyncio.create_task(collect(coordinator, REQUEST))
        coordinator.pause("a test")
        with pytest.raises(StageFailed):
            await coordinator.reconnect([stage.address for stage in ring.running], "wrong", "wrong")
        assert not coordinator.is_ready
        await ring.repair()
        assert (await answer)[0] == TEXT


@dataclass
class AwaitedFeatures:
    """A first stage that gives its features only when it may: until then an opened ring waits for them."""

    ring: RepairableRing
    may_give: threading.Event

    def hold(self) -> None:
        """Keep the stage's thread, and with it the answer to whoever asks for features."""
        self.ring.running[0].service._engine.in_worker(lambda: self.may_give.wait(30))

    async def lose_the_tail(self, active_ring: ActiveRing) -> None:
        """Lose another stage once all are connected, then give features."""
        # Connected stages are pinged.
        while active_ring.ring._watch is None:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        await self.ring.kill(2)
        while active_ring.ring.loss is None:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        self.may_give.set()


@pytest.fixture
def awaited_features(monkeypatch: pytest.MonkeyPatch) -> AwaitedFeatures:
    monkeypatch.setattr(feature_plug, "_CONNECT_PATIENCE_S", 30.0)
    return AwaitedFeatures(RepairableRing(), threading.Event())


NEEDS = FeatureNeeds((0,), 3, 1)
PATIENT = replace(OPTIONS, repair_wait_s=30.0, ping_timeout_s=30.0)


async def test_a_ring_that_loses_a_stage_while_it_waits_for_features_does_not_start(
    awaited_features: AwaitedFeatures,
) -> None:
    ring = awaited_features.ring
    coordinator = Coordinator(
        await ring.fill(),
        PATIENT,
        plugs=plugs_for(feature_needs=NEEDS),
        mesh_id=ring.mesh_id,
        mesh_key=ring.mesh_key,
        make_proposers=None,
        clock_s=asyncio.get_running_loop().time,
    )
    awaited_features.hold()
    async with asyncio.timeout(20):
        starting = asyncio.create_task(coordinator.start())
        await awaited_features.lose_the_tail(coordinator._active_ring)
        with pytest.raises(StageFailed):
            await starting
        assert not coordinator.is_ready
        await coordinator.stop()
        await ring.close()


async def test_a_new_ring_that_loses_a_stage_while_it_waits_for_features_is_repaired(
    awaited_features: AwaitedFeatures,
) -> None:
    ring = awaited_features.ring
    plugs = plugs_for(feature_needs=NEEDS)
    async with asyncio.timeout(40), serving(ring, PATIENT, plugs=plugs) as coordinator:
        parts = coordinator.generate(REQUEST)
        said = list((await anext(parts)).tokens)
        opened: list[ActiveRing] = []
        open_ring = coordinator._open_ring

        def noted(*args: object, **more: object) -> ActiveRing:
            opened.append(open_ring(*args, **more))  # type: ignore[arg-type]
            return opened[-1]

        coordinator._open_ring = noted  # type: ignore[method-assign]
        coordinator.pause("stages move")
        addresses = await ring.fill()
        awaited_features.hold()
        moving = asyncio.create_task(coordinator.reconnect(addresses, ring.mesh_id, ring.mesh_key))
        while not opened:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        await awaited_features.lose_the_tail(opened[0])
        with pytest.raises(StageFailed):
            await moving
        assert not coordinator.is_ready
        await ring.repair()
        async for part in parts:
            said += part.tokens
    assert said == TEXT


async def test_nobody_waits_at_a_gate_that_is_open() -> None:
    request_gate = RequestGate(0.0)
    async with request_gate.patience():
        await request_gate.opened()
    request_gate.hold()
    with pytest.raises(StageFailed, match="being repaired"):
        async with request_gate.patience():
            await request_gate.opened()
    request_gate.open()
    async with request_gate.patience():
        await request_gate.opened()
