"""A stage that takes a place in another ring: who it listens to, who it refuses, what it lets go of."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from mesh.coordinator.coordinator import Coordinator
from mesh.coordinator.options import CoordinatorOptions
from mesh.engine import GenerationRequest
from spanmesh_proto import PROTOCOL_VERSION
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto import windows_pb2_grpc as rpc
from spanmesh_proto.errors import MeshError, ProtocolError
from stages.runtime.spans import Span
from stages.transport.channels import CLIENT_OPTIONS, key_metadata
from stages.transport.links import StageLink
from tests.support.fake_stage import FakeRuntime, fake_ring
from tests.support.repairable_ring import NUM_STAGES, RepairableRing, replication_of, serving
from tests.support.ring_harness import RunningStage, collect, running_coordinator, running_services

OPTIONS = CoordinatorOptions(128, 4, FakeRuntime.max_rows, 64)


def hello(mesh_id: str, term: int = 0) -> wire.Hello:
    return wire.Hello(protocol_version=PROTOCOL_VERSION, mesh_id=mesh_id, sender="a test", term=term)


async def greet(stage: RunningStage, mesh_id: str, mesh_key: str, term: int = 0) -> None:
    """Shake hands as the stage before would, and leave."""
    link = StageLink(stage.address.address, hello(mesh_id, term), mesh_key, lambda _error: None)
    await link.open()
    await link.close()


@pytest.fixture
async def ring() -> AsyncIterator[RepairableRing]:
    ring = RepairableRing()
    await ring.fill()
    yield ring
    await ring.close()


async def test_the_old_ring_s_peers_are_refused(ring: RepairableRing) -> None:
    stage = ring.running[1]
    await greet(stage, ring.mesh_id, ring.mesh_key)
    await stage.service.rejoin(1, "new ring", "new key", 3)
    for mesh_id, mesh_key in ((ring.mesh_id, ring.mesh_key), ("new ring", ring.mesh_key)):
        with pytest.raises(MeshError):
            await greet(stage, mesh_id, mesh_key, 3)
    with pytest.raises(ProtocolError, match=f"belongs to mesh 'new ring', not to '{ring.mesh_id}'"):
        await greet(stage, ring.mesh_id, "new key", 3)
    await greet(stage, "new ring", "new key", 3)


async def test_a_coordinator_that_was_replaced_is_refused(ring: RepairableRing) -> None:
    stage = ring.running[1]
    await stage.service.rejoin(1, "ring", "key", 3)
    async with grpc.aio.insecure_channel(stage.address.address, options=CLIENT_OPTIONS) as channel:
        control = rpc.StageStub(channel).Control(metadata=key_metadata("key"))
        await control.write(wire.ControlRequest(hello=hello("ring", term=5)))
        await control.write(wire.ControlRequest(ping=wire.Ping()))
        assert [(await control.read()).WhichOneof("kind") for _ in range(2)] == ["welcome", "pong"]
    with pytest.raises(
        ProtocolError, match="a test is of term 4, stage 1 serves term 5: another `mesh serve`"
    ):
        await greet(stage, "ring", "key", 4)
    with pytest.raises(ProtocolError, match="moves stage 1 is of term 4, stage 1 serves term 5"):
        await stage.service.rejoin(1, "ring", "key", 4)


async def test_the_higher_of_two_terms_wins_though_the_lower_was_first(ring: RepairableRing) -> None:
    stage, followed = ring.running[0], ring.running[1]
    where = (followed.address.address, followed.address.host)
    await replication_of(stage).follow(*where, ring.mesh_id, ring.mesh_key, 0)
    # The first one waits for the end of what the stage follows; meanwhile comes the second.
    first, second = await asyncio.gather(
        stage.service.rejoin(0, "third ring", "third key", 3),
        stage.service.rejoin(0, "fifth ring", "fifth key", 5),
        return_exceptions=True,
    )
    assert second is None
    assert isinstance(first, ProtocolError), first
    assert "is of term 3, stage 0 serves term 5" in first.message
    await greet(stage, "fifth ring", "fifth key", 5)


async def test_a_stage_that_was_to_follow_and_takes_a_place_meanwhile_follows_nothing(
    ring: RepairableRing,
) -> None:
    stage, one, other = ring.running
    await replication_of(stage).follow(one.address.address, "", ring.mesh_id, ring.mesh_key, 0)
    # The first order waits for the end of what the stage follows; meanwhile comes the second.
    await asyncio.gather(
        replication_of(stage).follow(other.address.address, "", ring.mesh_id, ring.mesh_key, 0),
        stage.service.rejoin(0, "third ring", "third key", 3),
    )
    assert replication_of(stage).sink is None, "its slots are those of a ring now"
    # The other way round: the stage is on its way into a ring when it is to follow.
    await replication_of(stage).follow(one.address.address, "", ring.mesh_id, ring.mesh_key, 3)
    await asyncio.gather(
        stage.service.rejoin(0, "third ring", "third key", 3),
        replication_of(stage).follow(other.address.address, "", ring.mesh_id, ring.mesh_key, 3),
    )
    assert replication_of(stage).sink is None, "its slots are those of a ring now"
    await replication_of(stage).follow(one.address.address, "", ring.mesh_id, ring.mesh_key, 3)
    await asyncio.gather(
        replication_of(stage).follow(other.address.address, "", ring.mesh_id, ring.mesh_key, 3),
        replication_of(stage).follow(one.address.address, "", "fourth ring", ring.mesh_key, 3),
    )
    follower = replication_of(stage).sink
    assert follower is not None
    assert follower.does_for(one.address.address, "fourth ring"), "the later order counts"


async def test_streams_of_the_old_ring_end(ring: RepairableRing) -> None:
    tail = ring.running[-1]
    async with grpc.aio.insecure_channel(tail.address.address, options=CLIENT_OPTIONS) as channel:
        stub, key = rpc.StageStub(channel), key_metadata(ring.mesh_key)
        link = stub.Link(metadata=key)
        await link.write(wire.Frame(hello=hello(ring.mesh_id)))
        control = stub.Control(metadata=key)
        await control.write(wire.ControlRequest(hello=hello(ring.mesh_id)))
        verdicts = stub.Verdicts(hello(ring.mesh_id), metadata=key)
        streams: list[Any] = [link, control, verdicts]
        assert isinstance(await link.read(), wire.Welcome)
        assert isinstance(await control.read(), wire.ControlReply)
        await verdicts.initial_metadata()
        await link.write(
            wire.Frame(open=wire.Open(session=1, sampling=wire.Sampling(top_p=1, repetition_penalty=1)))
        )
        async with asyncio.timeout(20):
            while tail.service.stats().num_open_sessions == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await tail.service.rejoin(2, "new ring", "new key", 0)
            assert not any([isinstance(await stream.read(), Message) for stream in streams])
    assert tail.service.stats().num_open_sessions == 0


async def test_nothing_of_the_old_ring_leaves_after_it() -> None:
    """The batch that computes when its stage is moved is waited for."""
    computes, goes_on = threading.Event(), threading.Event()

    def hold(index: int, _spans: object) -> None:
        if index == 1 and not goes_on.is_set():
            computes.set()
            assert goes_on.wait(60)

    ring = RepairableRing(hold)
    async with serving(ring, OPTIONS) as coordinator:
        answer = asyncio.create_task(collect(coordinator, GenerationRequest((1, 2, 3), 4)))
        assert await asyncio.to_thread(computes.wait, 10)
        moved = asyncio.create_task(ring.running[1].service.rejoin(1, "elsewhere", "key", 0))
        done, _ = await asyncio.wait({moved}, timeout=0.1)
        assert not done
        goes_on.set()
        async with asyncio.timeout(10):
            await moved
            await answer
    assert ring.num_repairs == 1


async def test_a_planned_move_loses_nothing() -> None:
    ring = RepairableRing()
    request = GenerationRequest(tuple(range(3, 30)), 30)
    async with serving(ring, OPTIONS) as coordinator:
        undisturbed, _ = await collect(coordinator, request)
        parts = coordinator.generate(request)
        said = list((await anext(parts)).tokens)
        for _ in range(3):
            coordinator.pause("a stage moves")
            assert not coordinator.is_ready
            assert coordinator.refusal is None
            await ring.repair()
            said += (await anext(parts)).tokens
        async for part in parts:
            said += part.tokens
    assert said == undisturbed
    assert part.stats.num_replays == 3
    assert ring.num_repairs == 3


@pytest.mark.parametrize("lost", range(NUM_STAGES))
async def test_only_the_lost_stage_computes_again(lost: int) -> None:
    rows = [0] * NUM_STAGES

    def count(index: int, spans: Sequence[Span]) -> None:
        rows[index] += sum(len(span.tokens) for span in spans)

    ring = RepairableRing(count)
    request = GenerationRequest(tuple(range(3, 53)), 30)
    async with serving(ring, OPTIONS) as coordinator:
        undisturbed, _ = await collect(coordinator, request)
        parts = coordinator.generate(request)
        said = list((await anext(parts)).tokens)
        while len(said) < 10:
            said += (await anext(parts)).tokens
        before = list(rows)
        await ring.kill(lost)
        async for part in parts:
            said += part.tokens
    assert said == undisturbed
    again = [after - early for after, early in zip(rows, before, strict=True)]
    num_left = len(undisturbed) - 10
    assert again[lost] >= len(request.prompt) + num_left
    # A few windows more were lost on the way.
    assert all(count <= num_left + 3 for index, count in enumerate(again) if index != lost)


@pytest.mark.parametrize("lost", range(NUM_STAGES))
async def test_what_sessions_have_in_common_is_computed_again_once(lost: int) -> None:
    rows = [0] * NUM_STAGES

    def count(index: int, spans: Sequence[Span]) -> None:
        rows[index] += sum(len(span.tokens) for span in spans)

    ring = RepairableRing(count)
    common, num_tokens = tuple(range(3, 43)), 30
    requests = [GenerationRequest((*common, 50 + own, 5, 6), num_tokens) for own in range(3)]
    async with serving(ring, OPTIONS) as coordinator:
        undisturbed = [(await collect(coordinator, request))[0] for request in requests]
        answers = [coordinator.generate(request) for request in requests]
        said = [list((await anext(parts)).tokens) for parts in answers]
        before = list(rows)
        await ring.kill(lost)

        async def read(index: int) -> None:
            async for part in answers[index]:
                said[index] += part.tokens

        await asyncio.gather(*map(read, range(3)))
    assert said == undisturbed
    again = [after - early for after, early in zip(rows, before, strict=True)]
    num_own = 3 * (3 + num_tokens)
    # A few windows were lost on the way.
    assert len(common) + num_own - 3 <= again[lost] <= len(common) + num_own + 9
    assert all(count <= num_own + 9 for index, count in enumerate(again) if index != lost)


async def test_windows_of_a_former_coordinator_fail_no_session_of_the_next() -> None:
    """They were on their way between two stages when the next coordinator connected."""
    request = GenerationRequest((3, 4, 5), 30)
    async with running_services(fake_ring()) as stages:

        def coordinator() -> contextlib.AbstractAsyncContextManager[Coordinator]:
            return running_coordinator(stages, context_length=64, num_slots=4, max_rows=16, n_vocab=64)

        async with coordinator() as former:
            undisturbed = (await collect(former, request))[0]
            late = wire.Window(session=next(former._session_ids) - 1, id=1, tokens=[9], verify_rows=1)
        async with coordinator() as following:
            for stage in stages:
                stage.service._engine.take(wire.WindowBundle(windows=[late]))
            parts = following.generate(request)
            said = list((await anext(parts)).tokens)
            for stage in stages:
                stage.service._engine.take(wire.WindowBundle(windows=[late]))
            async for part in parts:
                said += part.tokens
    assert said == undisturbed


async def test_a_slot_begins_with_what_its_session_had_there_and_nothing_else(ring: RepairableRing) -> None:
    stage = ring.running[0]
    runtime = stage.service._engine._worker._runtime
    assert runtime.memory.length(0) > 4, "somebody's cells are there"
    sampling = wire.Sampling(top_p=1, repetition_penalty=1)
    stage.service._engine.open(wire.Open(session=2, sampling=sampling, resumed_session=1, num_resumed=4))
    await stage.service.rejoin(0, "another ring", "key", 0)
    assert runtime.memory.length(0) == 0
    tokens = [5, 6, 7, 8, 9]
    stage.service._engine.open(wire.Open(session=3, sampling=sampling))
    window = wire.Window(session=3, tokens=tokens, verify_rows=1)
    stage.service._engine.take(wire.WindowBundle(windows=[window]))
    while stage.service.stats().num_rows < len(tokens):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await stage.service.rejoin(0, "a third ring", "key", 0)
    stage.service._engine.open(wire.Open(session=4, sampling=sampling, resumed_session=3, num_resumed=4))
    await stage.service.rejoin(0, "a fourth ring", "key", 0)
    assert runtime.memory.length(0) == 4
