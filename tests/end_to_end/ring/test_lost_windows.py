"""Stages that compute nothing any more, and windows that are lost without a failure: no request waits."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from mesh.coordinator.coordinator import Coordinator
from mesh.coordinator.feature_plug import FeatureStreams
from mesh.coordinator.feature_store import FeatureNeeds
from mesh.coordinator.groups import WindowGroups
from mesh.coordinator.options import CoordinatorOptions
from mesh.coordinator.session import Session
from mesh.engine import Committed, GenerationRequest
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import StageFailed
from stages.sampling.sampler import Sampler, SamplingParams
from stages.serving.scheduler import QueueBarrier
from stages.serving.sent_rows import SentHiddenStates
from stages.serving.slots import SlotTokens
from stages.serving.stage_engine import StageEngine
from stages.transport import links
from stages.transport.links import frame_of
from tests.support.fake_stage import FakeRuntime, plain_answer
from tests.support.repairable_ring import RepairableRing, serving
from tests.support.ring_harness import collect, feature_streams, plugs_for
from tests.support.status_parts import sessions_of

# Pings are only missed by a process that stands still: here all is one process.
OPTIONS = CoordinatorOptions(
    128, 2, FakeRuntime.max_rows, 64, ping_interval_s=0.05, ping_timeout_s=30.0, still_timeout_s=0.3
)
PROMPT = tuple(range(3, 30))
TEXT = plain_answer(PROMPT, 30, Sampler(SamplingParams()).sample)
REQUEST = GenerationRequest(PROMPT, 30)
# Long beside what a repair takes, and nothing beside for ever.
PATIENCE_S = 30.0


async def answer(coordinator: Coordinator) -> list[int]:
    async with asyncio.timeout(PATIENCE_S):
        return (await collect(coordinator, REQUEST))[0]


def once(method: Callable[..., Any], error: BaseException, *, after: int = 3) -> Callable[..., Any]:
    """The method, of which one call raises the error instead."""
    calls = itertools.count()

    def called(*given: Any, **more: Any) -> Any:
        if next(calls) == after:
            raise error
        return method(*given, **more)

    return called


@pytest.mark.parametrize("index", [0, pytest.param(2, marks=pytest.mark.sweep)])
async def test_a_stage_whose_thread_fails_is_lost_at_once_and_replaced(index: int) -> None:
    ring = RepairableRing()
    async with serving(ring, OPTIONS) as coordinator:
        parts = coordinator.generate(REQUEST)
        said = list((await anext(parts)).tokens)
        engine = ring.running[index].service._engine

        def ends() -> None:
            raise SystemExit

        engine._scheduler.change(QueueBarrier(ends))
        async with asyncio.timeout(PATIENCE_S):
            while engine.failure is None:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            loss = await coordinator.broken()
            assert index in loss.suspects
            assert loss.is_crash
            # Whoever waits for what it was to do is told.
            with pytest.raises(StageFailed, match=f"stage {index} ended: SystemExit"):
                await engine.drained()
            # What the actor does about it: its process ends, and another one is started.
            await ring.kill(index)
            async for part in parts:
                said += part.tokens
    assert said == TEXT


async def test_a_stage_that_does_not_say_that_its_thread_ended_is_lost_by_its_pongs() -> None:
    ring = RepairableRing()
    async with serving(ring, OPTIONS) as coordinator:
        engine = ring.running[1].service._engine
        engine._worker._on_ended = lambda _error: None
        engine._scheduler.change(QueueBarrier(lambda: 1 / 0))
        async with asyncio.timeout(PATIENCE_S):
            loss = await coordinator.broken()
        assert 1 in loss.suspects
        assert loss.reason.endswith("computes nothing any more")
        await ring.kill(1)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (SentHiddenStates, "copy"),
        pytest.param(SlotTokens, "copy", marks=pytest.mark.sweep),
        pytest.param(SentHiddenStates, "find", marks=pytest.mark.sweep),
    ],
)
async def test_memory_that_runs_out_in_a_slot_costs_its_session_time_only(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = RepairableRing()
    async with serving(ring, OPTIONS) as coordinator:
        await answer(coordinator)
        monkeypatch.setattr(owner, name, once(getattr(owner, name), MemoryError(), after=0))
        # A part of what the other slot holds: it is copied at every stage.
        other = GenerationRequest((*PROMPT[:20], 2), 20)
        expected = plain_answer(other.prompt, 20, Sampler(SamplingParams()).sample)
        async with asyncio.timeout(PATIENCE_S):
            assert (await collect(coordinator, other))[0] == expected
        assert ring.num_repairs == 0


@pytest.mark.parametrize(
    "handler", ["_send_on", pytest.param("_pass_on", marks=pytest.mark.sweep), "_report"]
)
async def test_what_a_stage_fails_to_hand_on_is_not_waited_for(
    handler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = 0 if handler == "_pass_on" else 3
    ring = RepairableRing()
    if handler == "_report":
        monkeypatch.setattr(FakeRuntime, "check", once(FakeRuntime.check, ValueError("no"), after=after))
        after = 0
    monkeypatch.setattr(StageEngine, handler, once(getattr(StageEngine, handler), MemoryError(), after=after))
    async with serving(ring, OPTIONS) as coordinator:
        answering = asyncio.create_task(answer(coordinator))
        await end_of_stage(ring)
        assert await answering == TEXT


async def end_of_stage(ring: RepairableRing) -> None:
    """Replace a stage once it has failed, as its actor does by the end of its process."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for index, stage in enumerate(ring.stages):
                if stage is not None and stage.service._engine.failure is not None:
                    await ring.kill(index)
                    return
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("writes", ["link", pytest.param("frame", marks=pytest.mark.sweep), "control"])
async def test_a_stream_that_cannot_write_is_lost(writes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = RepairableRing()
    async with serving(ring, OPTIONS) as coordinator:
        link = ring.running[0].service._engine.next
        assert isinstance(link, links.StageLink)
        if writes == "link":
            link._call.write = once(link._call.write, MemoryError())  # type: ignore[method-assign]
        elif writes == "control":
            call = coordinator._ring._controls[1]._call
            call.write = once(call.write, MemoryError(), after=0)  # type: ignore[method-assign]
        else:
            monkeypatch.setattr(links, "frame_of", once(frame_of, MemoryError(), after=8))
        async with asyncio.timeout(PATIENCE_S):
            while not ring.num_repairs:
                assert await answer(coordinator) == TEXT
        assert ring.num_repairs == 1


async def test_windows_that_a_stage_drops_in_silence_are_sent_again() -> None:
    ring = RepairableRing()
    async with serving(ring, OPTIONS) as coordinator:
        engine = ring.running[1].service._engine
        send_on, calls = engine._worker._on_windows, itertools.count()

        def drop(bundle: wire.WindowBundle) -> None:
            if next(calls) != 5:
                send_on(bundle)

        engine._worker._on_windows = drop
        assert await answer(coordinator) == TEXT
        assert ring.num_repairs == 1


async def test_a_request_whose_windows_are_lost_again_and_again_ends_and_others_go_on() -> None:
    ring = RepairableRing()
    poison = PROMPT[-1]
    async with serving(ring, OPTIONS) as coordinator:
        engine = ring.running[1].service._engine
        send_on = engine._worker._on_windows

        def drop(bundle: wire.WindowBundle) -> None:
            if not any(poison in window.tokens for window in bundle.windows):
                send_on(bundle)

        engine._worker._on_windows = drop
        with pytest.raises(StageFailed, match="windows were lost"):
            await answer(coordinator)
        engine._worker._on_windows = send_on
        assert await answer(coordinator) == TEXT


@pytest.mark.parametrize("name", ["_report", pytest.param("_prefill", marks=pytest.mark.sweep)])
async def test_an_error_of_a_session_ends_it_and_no_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = RepairableRing()
    async with serving(ring, OPTIONS) as coordinator:
        failing_once = once(getattr(Session, name), ArithmeticError("wrong"), after=2)
        monkeypatch.setattr(Session, name, failing_once)
        answers = await asyncio.gather(answer(coordinator), answer(coordinator), return_exceptions=True)
        monkeypatch.undo()
        errors = [each for each in answers if isinstance(each, BaseException)]
        assert len(errors) == 1
        assert isinstance(errors[0], StageFailed)
        assert "wrong" in errors[0].message
        assert [each for each in answers if each not in errors] == [TEXT]
        assert sessions_of(coordinator).running == 0


async def test_an_error_in_the_report_of_the_last_tokens_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = RepairableRing()
    async with serving(ring, OPTIONS) as coordinator:
        report = Session._report

        def failing(self: Session, step: Any, *given: Any, **more: Any) -> None:
            if step.finish is not None:
                raise ArithmeticError("wrong")
            report(self, step, *given, **more)

        monkeypatch.setattr(Session, "_report", failing)
        with pytest.raises(StageFailed, match="wrong"):
            await answer(coordinator)


async def anything_of(parts: AsyncIterator[Committed]) -> None:
    async for _ in parts:
        pass


async def test_an_error_in_the_callback_of_a_proposer_ends_its_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ring = RepairableRing()
    async with serving(ring, OPTIONS) as coordinator:
        parts = coordinator.generate(REQUEST)
        await anext(parts)
        (session,) = coordinator._sessions.values()
        monkeypatch.setattr(session, "_pump", once(session._pump, ArithmeticError("wrong"), after=0))
        session._wake()
        with pytest.raises(StageFailed, match="wrong"):
            await asyncio.wait_for(anything_of(parts), PATIENCE_S)


async def test_a_failure_that_comes_late_costs_no_other_client_its_prefix() -> None:
    ring = RepairableRing()
    async with serving(ring, OPTIONS) as coordinator:
        ended = {}
        for client in ("ann", "bob"):
            async for _ in coordinator.generate(replace(REQUEST, client=client)):
                ended[client] = next(iter(coordinator._sessions))
        for session in (ended["ann"], 12345678):
            coordinator._on_failure(1, wire.Failure(session=session, code="stage_failed", message="late"))
        for client, is_known in (("ann", False), ("bob", True)):
            _, last = await collect(coordinator, replace(REQUEST, client=client))
            assert bool(last.stats.num_cached) == is_known


async def test_groups_that_fail_are_made_anew_with_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = RepairableRing()
    monkeypatch.setattr(WindowGroups, "_let_leave", once(WindowGroups._let_leave, ArithmeticError("wrong")))
    async with serving(ring, CoordinatorOptions(128, 4, 16, 64, num_groups=1)) as coordinator:
        answers = await asyncio.gather(*(answer(coordinator) for _ in range(4)))
        assert answers == [TEXT] * 4
        assert ring.num_repairs == 1


async def test_features_that_cannot_be_taken_are_off_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        FeatureStreams, "_connected", once(lambda *_: None, ArithmeticError("wrong"), after=0)
    )
    ring = RepairableRing()
    async with serving(ring, OPTIONS, plugs=plugs_for(feature_needs=FeatureNeeds((0,), 3, 1))) as coordinator:
        streams = feature_streams(coordinator)
        assert streams is not None
        assert streams.why_off is not None
        assert "wrong" in streams.why_off
        assert await answer(coordinator) == TEXT


async def test_a_ring_whose_watch_fails_is_given_up() -> None:
    ring = RepairableRing()
    async with serving(ring, OPTIONS) as coordinator:
        watched = coordinator._ring
        watched._examine = once(watched._examine, ArithmeticError("wrong"), after=0)  # type: ignore[method-assign]
        async with asyncio.timeout(PATIENCE_S):
            loss = await coordinator.broken()
        assert loss.suspects == (0, 1, 2)
        assert "wrong" in loss.reason
