"""Copies that follow their stages: what they are told spares computing, and never changes a text."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from mesh.coordinator.coordinator import Coordinator
from mesh.coordinator.options import CoordinatorOptions
from mesh.engine import GenerationRequest
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import MeshError, ProtocolError, UncuttableModel
from stages.layers import ranges_from_cuts
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.sampling.sampler import SamplingParams
from stages.sampling.session_spec import Resumed
from stages.sampling.verifier import WindowVerifier
from stages.serving.kv_replication import pause_s
from stages.serving.sessions import SessionTable
from stages.serving.slot_replication import ReplicationCursor, SlotReplication
from stages.serving.slots import KvSlots
from stages.slicing.model_facts import read_model_facts
from stages.weights.virtual_stages import StageCache
from tests.support.fake_stage import FakeRuntime
from tests.support.repairable_ring import NUM_STAGES, RepairableRing, replication_of, serving
from tests.support.ring_harness import RunningStage, collect

OPTIONS = CoordinatorOptions(128, 4, FakeRuntime.max_rows, 64)


async def until_sent(ring: RepairableRing, num_positions: int) -> None:
    """All copies have been told so much of every session that runs, and that it is this session's."""

    def is_told(replica: RunningStage, session: int, slot: int) -> bool:
        engine = replica.service._engine
        # An earlier session may have left as many positions in the slot.
        return (
            engine.sessions._latest.get(slot) == session and engine.slots.tokens.length(slot) >= num_positions
        )

    while True:
        slots = ring.running[0].service._engine.sessions.slots.items()
        copies = [replica for replica in ring.copies if replica is not None]
        if slots and all(is_told(replica, session, slot) for replica in copies for session, slot in slots):
            return
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("lost", range(NUM_STAGES))
async def test_what_a_copy_was_told_is_not_computed_again(lost: int) -> None:
    rows = [0] * NUM_STAGES

    def count(index: int, spans: Sequence[Span]) -> None:
        rows[index] += sum(len(span.tokens) for span in spans)

    ring = RepairableRing(count, news_s=0.001)
    request = GenerationRequest(tuple(range(3, 53)), 40)
    async with serving(ring, OPTIONS) as coordinator, asyncio.timeout(60):
        undisturbed, _ = await collect(coordinator, request)
        parts = coordinator.generate(request)
        said = list((await anext(parts)).tokens)
        await until_sent(ring, len(request.prompt))
        num_before = len(said)
        before = list(rows)
        await ring.kill(lost)
        async for part in parts:
            said += part.tokens
        assert ring.num_repairs == 1
    assert said == undisturbed
    again = [after - early for after, early in zip(rows, before, strict=True)]
    # The prompt's last chunk ends where the copy's may not.
    assert max(again) <= len(undisturbed) - num_before + FakeRuntime.max_rows + 3


async def test_a_copy_goes_on_following_where_it_left_off() -> None:
    """In a ring that was made anew it is told only what it does not have."""
    ring = RepairableRing(news_s=0.001)
    request = GenerationRequest(tuple(range(3, 53)), 60)
    async with serving(ring, OPTIONS) as coordinator, asyncio.timeout(60):
        undisturbed, _ = await collect(coordinator, request)
        parts = coordinator.generate(request)
        said = list((await anext(parts)).tokens)
        await until_sent(ring, len(request.prompt))
        taken: list[tuple[int, int]] = []
        copies = [copy for copy in ring.copies if copy is not None]
        for copy in copies:
            rows = replication_of(copy).rows

            def take(update: wire.SlotRows, rows: SlotReplication = rows) -> None:
                taken.append((update.start, len(update.tokens)))
                SlotReplication.apply_update(rows, update)

            rows.apply_update = take  # type: ignore[method-assign]
        coordinator.pause("the ring is rebuilt")
        await ring.repair()
        async for part in parts:
            said += part.tokens
    assert said == undisturbed
    assert taken
    # But for what the stage may have gone back on.
    assert min(start for start, count in taken if count) >= len(request.prompt) - 32


def test_a_session_goes_on_in_a_slot_that_was_told_to_be_its_own() -> None:
    def resumed(session: int) -> int:
        table = SessionTable(2)
        table.adopt(0, 5)
        return table.open(6, 0, WindowVerifier(SamplingParams()), Resumed(session, 9)).num_resumed

    assert resumed(5) == 9
    assert resumed(4) == 0, "another session's"


def slots_of(num_rows: int = 0) -> KvSlots:
    runtime = FakeRuntime(0, 3)
    slots = KvSlots(runtime, 1000)  # type: ignore[arg-type]  # a fake has all that is used
    if num_rows:
        span = Span(1, 0, list(range(1, num_rows + 1)))
        runtime.decode([span])
        slots.computed(span, 0)
        slots.sent_on(span, bytes(4 * num_rows))
    return slots


def followed(stage: SlotReplication, *held: wire.HeldSlot) -> ReplicationCursor:
    cursor = ReplicationCursor(4)
    stage.attach_cursor(cursor, held)
    return cursor


def test_news_are_what_has_changed() -> None:
    stage_slots, copy_slots = slots_of(9), slots_of()
    stage, copy = SlotReplication(stage_slots), SlotReplication(copy_slots)
    cursor = followed(stage)

    def tell(session: int = 5) -> list[tuple[int, list[int], int]]:
        news = stage.updates(1, session, cursor, 4)
        for one in news:
            copy.apply_update(one)
            assert copy_slots.tokens.tokens(1)[one.start :].tolist() == list(one.tokens)
        return [(one.start, list(one.tokens), len(one.sent)) for one in news]

    assert tell() == [(0, list(range(1, 10)), 36)]
    assert tell() == []
    assert tell(session=6) == [(9, [], 0)]
    stage_slots.trim(1, 4)
    # Nothing to tell of that: whoever goes on there looks at the tokens.
    assert tell(session=6) == []
    assert tell(session=7) == [(4, [], 0)]
    assert stage.held(0) == copy.held(0) != []
    assert stage.held() == []
    assert followed(stage, *copy.held(0)).num_sent == [0, 4, 0, 0]
    other = wire.HeldSlot(slot=1, num_positions=4, tokens_sha256=bytes(32))
    assert followed(stage, other).num_sent == [0, 0, 0, 0]
    assert followed(stage, wire.HeldSlot(slot=1, num_positions=5)).num_sent == [0, 0, 0, 0]
    assert followed(stage, wire.HeldSlot(slot=9, num_positions=1)).num_sent == [0, 0, 0, 0]
    stage_slots.begin(2, 1, (1, 2, 3), 0, 4)
    assert [one.start for one in stage.updates(2, 7, cursor, 4)] == [0]


@pytest.mark.parametrize(
    "change",
    [
        {"slot": 4},
        {"start": 1},
        {"tokens": [1, 2]},
        {"tokens": []},
        {"kv": b"no rows"},
        {"kv": b""},
        {"sent": b"12345678901234"},
        {"tokens": [], "sent": b"1234"},
    ],
)
def test_news_that_cannot_be_meant_are_refused(change: dict[str, object]) -> None:
    stage, copy = SlotReplication(slots_of(3)), SlotReplication(slots_of())
    (news,) = stage.updates(1, 5, followed(stage), 4)
    changed = wire.SlotRows(
        **{"slot": 1, "session": 5, "start": 0, "tokens": news.tokens, "kv": news.kv, **change}  # type: ignore[arg-type]
    )
    if change == {"tokens": []}:
        copy.apply_update(changed)
        assert copy.held(0) == [], "only the session is another"
        return
    with pytest.raises((ProtocolError, UncuttableModel)):
        copy.apply_update(changed)
    assert copy.held(0) == []


async def test_a_copy_of_another_ring_is_told_nothing() -> None:
    ring = RepairableRing(news_s=0.001)
    await ring.fill()
    stage, copy = ring.running[0], ring.copies[1]
    assert copy is not None
    followed = replication_of(copy).sink
    assert followed is not None
    for mesh_id, mesh_key in (("another ring", ring.mesh_key), (ring.mesh_id, "another key")):
        await replication_of(copy).follow(stage.address.address, "", mesh_id, mesh_key, 0)
        replication_sink = replication_of(copy).sink
        assert replication_sink is not None
        async with asyncio.timeout(10):
            while not replication_sink.is_over:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert followed.is_over
    await replication_of(copy).follow(stage.address.address, "", ring.mesh_id, ring.mesh_key, 3)
    with pytest.raises(ProtocolError, match="is of term 2, stage 1 serves term 3"):
        await replication_of(copy).follow(stage.address.address, "", ring.mesh_id, ring.mesh_key, 2)
    await ring.close()


async def test_a_copy_that_cannot_take_what_there_is_is_not_told_again_and_again() -> None:
    ring = RepairableRing(news_s=0.001)
    request = GenerationRequest(tuple(range(3, 53)), 60)
    async with serving(ring, OPTIONS) as coordinator, asyncio.timeout(60):
        undisturbed, _ = await collect(coordinator, request)
        copy, stage = ring.copies[1], ring.running[1]
        assert copy is not None
        num_tried = 0

        def refuse(_news: wire.SlotRows) -> None:
            nonlocal num_tried
            num_tried += 1
            raise UncuttableModel("kept in another form")

        replication_of(copy).rows.apply_update = refuse  # type: ignore[method-assign,assignment]
        answer = asyncio.create_task(collect(coordinator, request))
        replication_sink = replication_of(copy).sink
        assert replication_sink is not None
        while not replication_sink.is_over:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        await replication_of(copy).follow(stage.address.address, "", ring.mesh_id, ring.mesh_key, 0)
        assert replication_of(copy).sink is replication_sink
        assert (await answer)[0] == undisturbed
        await ring.kill(1)
        assert (await collect(coordinator, request))[0] == undisturbed
    assert num_tried == 1


def test_telling_takes_a_tenth_of_the_time_at_most() -> None:
    assert pause_s(0.0) == pause_s(0.01) == 0.5
    assert pause_s(0.2) == pytest.approx(2.0)


@pytest.fixture
async def real_ring(
    smollm2_path: Path, stage_cache_dir: Path
) -> AsyncIterator[tuple[RepairableRing, Coordinator]]:
    cache = StageCache(stage_cache_dir)
    ranges = ranges_from_cuts((10, 20), read_model_facts(smollm2_path).n_layers)
    files = [cache.cut(smollm2_path, layers).path for layers in ranges]
    runtime_options = RuntimeOptions(num_slots=4, ctx_size=512, exact=True)
    ring = RepairableRing(make_runtime=lambda index: StageRuntime(files[index], runtime_options), news_s=0.05)
    async with serving(ring, CoordinatorOptions(512, 4, 63, 49152)) as coordinator:
        yield ring, coordinator


@pytest.mark.model
async def test_real_stages_go_on_from_what_their_copies_were_told(
    real_ring: tuple[RepairableRing, Coordinator],
) -> None:
    ring, coordinator = real_ring
    requests = [
        GenerationRequest(tuple(range(100, 100 + length)), 40, sampling=SamplingParams(0.8, seed=length))
        for length in (20, 90, 150)
    ]
    undisturbed = [(await collect(coordinator, request))[0] for request in requests]

    async def read(request: GenerationRequest) -> list[int]:
        try:
            return (await collect(coordinator, request))[0]
        except MeshError as error:
            raise AssertionError(error) from error

    async with asyncio.timeout(200):
        answers = [asyncio.create_task(read(request)) for request in requests]
        for lost in (1, 0, 2):
            target = ring.furthest() + 8
            while ring.furthest() < target or not coordinator.is_ready:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            num_rows = ring.copies[lost].service.stats().num_rows  # type: ignore[union-attr]
            assert num_rows == 0, "a copy computes nothing itself"
            await ring.kill(lost)
        assert await asyncio.gather(*answers) == undisturbed
    assert ring.num_repairs == 3
