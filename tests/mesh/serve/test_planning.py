"""Plans are made outside the event loop, and hold when they are done."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from mesh.cluster.host_facts import HostFacts, Versions
from mesh.cluster.members import Member, Members
from mesh.coordinator.ring import RingLoss
from mesh.options.host import HeadOptions
from mesh.placement.memory_estimate import StageSizes, Workload
from mesh.placement.planner import StagePlacement, plan
from mesh.placement.replanner import Replan, replan
from mesh.serve.allocations import HostAllocations
from mesh.serve.pipeline import Pipeline, PipelineStage
from mesh.serve.planning import InitialPlacement, is_room_as_before, plan_in_thread, settled_plan
from mesh.serve.reconfiguration import RecoveryContext
from mesh.serve.recovery import RingRepair
from spanmesh_proto.errors import ModelDoesNotFit
from stages.layers import LayerRange
from stages.transport.hidden_codec import HiddenType
from tests.mesh.placement.test_planner import WORKLOAD, host, model
from tests.qualification.planning_time import cases, made_up_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.serve.head import Head
    from mesh.serve.preflight import Preflight
    from mesh.serve.stage_handle import StageHandle


@dataclass
class Turns:
    """Of the event loop."""

    number: int = 0

    async def count(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.number += 1


@dataclass
class Gate:
    """A planning that goes on until it is let go, in whatever thread."""

    is_open: threading.Event = field(default_factory=threading.Event)
    threads: list[int] = field(default_factory=list)
    has_begun: threading.Event = field(default_factory=threading.Event)

    def pass_through(self, is_time_up: Callable[[], bool] = lambda: False) -> None:
        self.threads.append(threading.get_ident())
        self.has_begun.set()
        while not self.is_open.wait(0.001):
            is_time_up()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110 - set by a thread
            await asyncio.sleep(0.001)


async def test_the_event_loop_goes_on_while_a_plan_is_made() -> None:
    gate, turns = Gate(), Turns()
    counting = asyncio.create_task(turns.count())
    planning = asyncio.create_task(plan_in_thread(gate.pass_through))
    await until(gate.has_begun.is_set)
    before = turns.number
    await until(lambda: turns.number > before + 100)
    gate.is_open.set()
    await planning
    counting.cancel()
    assert gate.threads != [threading.get_ident()]


async def test_the_hosts_of_an_advertised_size_are_planned_beside_the_event_loop() -> None:
    turns = Turns()
    counting = asyncio.create_task(turns.count())
    found = await plan_in_thread(
        lambda is_time_up: plan(made_up_model(), cases()["tight12"], Workload(4096, 4), is_time_up=is_time_up)
    )
    counting.cancel()
    assert len(found.stages) == 10
    assert turns.number > 1


async def test_a_plan_that_nobody_waits_for_any_more_ends() -> None:
    gate = Gate()
    planning = asyncio.create_task(plan_in_thread(gate.pass_through))
    await until(gate.has_begun.is_set)
    planning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await planning
    # Nobody has opened the gate.
    await until(lambda: gate.threads[0] not in {thread.ident for thread in threading.enumerate()})


async def test_time_is_up_by_the_clock_that_is_passed_in() -> None:
    now_s = [0.0]

    def make(is_time_up: Callable[[], bool]) -> list[bool]:
        found = [is_time_up()]
        now_s[0] = 1e6
        return [*found, is_time_up()]

    assert await plan_in_thread(make, clock_s=lambda: now_s[0]) == [False, True]


async def test_a_plan_is_made_again_until_it_holds() -> None:
    seen = iter(range(100))
    states = iter([1, 2, 2, 3, 3, 3])

    def make(state: int, _: Callable[[], bool]) -> tuple[int, int]:
        return state, next(seen)

    # 1 became 2, 2 became 3, and 3 is still 3.
    assert await settled_plan(lambda: next(states), make, lambda before, now, _: before == now) == (3, 2)


async def test_that_nothing_fits_is_only_said_of_what_there_still_is() -> None:
    states = iter([1, 2, 2, 2])

    def make(state: int, _: Callable[[], bool]) -> None:
        raise ModelDoesNotFit(f"{state} do not suffice")

    with pytest.raises(ModelDoesNotFit, match="2 do not suffice"):
        await settled_plan(lambda: next(states), make, lambda _before, _now, _result: True)


def test_room_matters_only_where_it_is_counted_on() -> None:
    a, b = host("a", 1000), host("b", 1000)
    assert is_room_as_before([a, b], [a, host("b", 10), host("c", 1)], ["a"])
    assert not is_room_as_before([a, b], [a, host("b", 10)], ["a", "b"])
    assert not is_room_as_before([a, b], [a], ["b"])
    assert not is_room_as_before([a], [a, b], ["b"])


SIZES = StageSizes(model(), WORKLOAD)
VERSIONS = Versions("1", "2", "3", "4", "5")


class Mesh:
    """Hosts and models without processes: as much as deciding looks at."""

    def __init__(self, **room_mib: int) -> None:
        self.members = Members()
        self.allocations = HostAllocations(lambda _member: False)
        for name, mib in room_mib.items():
            self.admit(name, mib)

    def admit(self, name: str, mib: int) -> None:
        facts = HostFacts(host(name, mib).memory_bytes, 1, 20.0, VERSIONS)
        self.members.admit(Member(name, "127.0.0.1", facts, f"{name}.1", is_ready=True))

    def context(self, gate: Gate, *stages: tuple[str, int, int]) -> RecoveryContext:
        """Of one model with such a ring; its decisions wait for the gate."""
        pipeline = Pipeline()
        pipeline.stages = tuple(self._stage(name, LayerRange(start, stop)) for name, start, stop in stages)
        allocation = self.allocations.open("model", pipeline)

        def gated(*arguments: Any, is_time_up: Callable[[], bool], **options: Any) -> Replan:
            gate.pass_through(is_time_up)
            return replan(*arguments, is_time_up=is_time_up, **options)

        unused: Any = None
        return RecoveryContext(
            pipeline,
            self.members,
            SIZES,
            allocation.capacity_of,
            is_there=unused,
            executor=unused,
            cutover=unused,
            coordinator=unused,
            incidents=unused,
            on_failure=unused,
            announce=unused,
            clock_s=time.monotonic,
            replan=gated,
        )

    def replica(self, name: str, layers: LayerRange) -> StageHandle:
        memory = SIZES.memory(layers)
        config = SimpleNamespace(layers=layers, memory=memory)

        async def loss(_timeout_s: float) -> None:
            """It lives."""

        member = self.members.find(name) or SimpleNamespace(name=name)
        handle = SimpleNamespace(member=member, config=config, kill=lambda: None, loss=loss)
        return cast("StageHandle", handle)

    def _stage(self, name: str, layers: LayerRange) -> PipelineStage:
        return PipelineStage(
            StagePlacement(name, layers, SIZES.memory(layers)), HiddenType.F32, self.replica(name, layers)
        )


def decide(context: RecoveryContext) -> asyncio.Task[Replan]:
    """Where lost stages go."""
    return asyncio.create_task(
        context.decide_placement(lambda: context.pipeline.lost, lambda: context.members.ready)
    )


def shown(decision: Replan) -> list[str]:
    return [f"{new.placement.host} {new.placement.layers}" for new in decision.stages if new.kept is None]


RING = (("a", 0, 10), ("b", 10, 20), ("c", 20, 30))


async def test_the_head_decides_beside_its_event_loop() -> None:
    gate, turns = Gate(), Turns()
    context = Mesh(a=2000, b=2000, c=2000, spare=2000).context(gate, *RING)
    context.pipeline.mark_lost(1)
    counting, deciding = asyncio.create_task(turns.count()), decide(context)
    await until(gate.has_begun.is_set)
    before = turns.number
    await until(lambda: turns.number > before + 100)
    gate.is_open.set()
    assert shown(await deciding) == ["spare [10, 20)"]
    assert [placement.host for placement in context.pipeline.intended] == ["spare"]
    counting.cancel()
    assert threading.get_ident() not in gate.threads


async def test_a_host_that_left_while_it_was_decided_gets_nothing() -> None:
    mesh, gate = Mesh(a=1000, b=1000, c=1000, spare=1000, other=1000), Gate()
    context = mesh.context(gate, *RING)
    context.pipeline.mark_lost(1)
    deciding = decide(context)
    await until(gate.has_begun.is_set)
    mesh.members.remove("spare")
    gate.is_open.set()
    assert shown(await deciding) == ["other [10, 20)"]
    assert len(gate.threads) == 2


async def test_one_that_left_and_does_not_matter_changes_nothing() -> None:
    mesh, gate = Mesh(a=1000, b=1000, c=1000, spare=1000, other=1000), Gate()
    context = mesh.context(gate, *RING)
    context.pipeline.mark_lost(1)
    deciding = decide(context)
    await until(gate.has_begun.is_set)
    mesh.members.remove("other")
    gate.is_open.set()
    assert shown(await deciding) == ["spare [10, 20)"]
    assert len(gate.threads) == 1


async def test_a_second_loss_while_the_first_is_decided_is_made_good_as_well() -> None:
    mesh, gate = Mesh(a=1000, b=1000, c=1000, spare=1000, other=1000), Gate()
    context = mesh.context(gate, *RING)
    context.pipeline.mark_lost(1)
    deciding = decide(context)
    await until(gate.has_begun.is_set)
    context.pipeline.mark_lost(2)
    gate.is_open.set()
    assert shown(await deciding) == ["spare [10, 20)", "other [20, 30)"]


async def test_a_copy_that_went_while_it_was_decided_is_not_counted_on() -> None:
    mesh, gate = Mesh(a=1000, b=1000, c=1000, spare=1000), Gate()
    context = mesh.context(gate, *RING)
    copy = mesh.replica("spare", LayerRange(10, 20))
    context.pipeline.replicas = [copy]
    context.pipeline.mark_lost(1)
    deciding = decide(context)
    await until(gate.has_begun.is_set)
    context.pipeline.drop_replica(copy)
    gate.is_open.set()
    decision = await deciding
    assert shown(decision) == ["spare [10, 20)"]
    assert not any(new.is_replica for new in decision.stages)


async def test_a_host_that_came_while_it_was_found_that_nothing_fits_is_used() -> None:
    mesh, gate = Mesh(a=1000, c=1000), Gate()
    context = mesh.context(gate, *RING)
    context.pipeline.mark_lost(1)
    deciding = decide(context)
    await until(gate.has_begun.is_set)
    mesh.admit("late", 1000)
    gate.is_open.set()
    assert shown(await deciding) == ["late [10, 20)"]


class NothingToWaitFor(Members):
    """Hosts that change no more."""

    async def change_within(self, timeout_s: float) -> None:
        raise AssertionError(f"there is no need to wait {timeout_s} s for hosts")


async def test_a_repair_takes_a_host_that_came_while_it_was_found_that_nothing_fits() -> None:
    mesh, gate, filled = Mesh(a=1000, c=1000), Gate(), list[Replan]()
    mesh.members.__class__ = NothingToWaitFor

    async def fill(decision: Replan, *_: Any) -> tuple[PipelineStage, ...]:
        filled.append(decision)
        return ()

    async def do(*_: Any) -> bool:
        return True

    stub = SimpleNamespace(
        load_stages=fill, cut_over=do, give_up=lambda _: None, repaired=lambda _: None, failed=lambda *_: None
    )
    context = replace(
        mesh.context(gate, *RING),
        is_there=do,
        executor=cast("Any", stub),
        cutover=cast("Any", stub),
        coordinator=cast("Any", stub),
        incidents=cast("Any", stub),
        announce=lambda _: None,
    )
    context.pipeline.mark_lost(1)
    repairing = asyncio.create_task(RingRepair(context).run(RingLoss("a test", ())))
    await until(gate.has_begun.is_set)
    mesh.admit("late", 1000)
    gate.is_open.set()
    await repairing
    assert [shown(decision) for decision in filled] == [["late [10, 20)"]]


async def test_two_models_never_count_on_the_same_room() -> None:
    mesh, gates = Mesh(a=1000, b=1000, c=1000, d=1000, e=1000, f=1000, spare=1000), (Gate(), Gate())
    rings = (RING, (("d", 0, 10), ("e", 10, 20), ("f", 20, 30)))
    contexts = [mesh.context(gate, *ring) for gate, ring in zip(gates, rings, strict=True)]
    mesh.members.remove("b")
    mesh.members.remove("e")
    for context in contexts:
        context.pipeline.mark_lost(1)
    deciding = [decide(context) for context in contexts]
    # Both look at the spare's room before either has taken it.
    for gate in gates:
        await until(gate.has_begun.is_set)
    for gate in gates:
        gate.is_open.set()
    found = await asyncio.gather(*deciding, return_exceptions=True)
    assert sorted(type(each).__name__ for each in found) == ["ModelDoesNotFit", "Replan"]
    assert [placement.host for context in contexts for placement in context.pipeline.intended] == ["spare"]


def first_placement(mesh: Mesh, ctx_size: int | None, **facts: Any) -> InitialPlacement:
    """Of a model that was trained for 100,000 positions."""
    options = HeadOptions(model=Path("model.gguf"), ctx_size=ctx_size)
    workload = replace(WORKLOAD, ctx_size=ctx_size or 4096)
    known = SimpleNamespace(model=replace(model(**facts), n_ctx_train=100_000), workload=workload)
    head = SimpleNamespace(members=mesh.members, survey=SimpleNamespace(head="a"))
    return InitialPlacement(
        options,
        cast("Preflight", known),
        cast("Head", head),
        mesh.allocations.open("model", Pipeline()),
        lambda _phase: None,
    )


async def test_a_context_is_chosen_of_what_hosts_have_left_unless_one_is_asked_for() -> None:
    planning = first_placement(Mesh(a=4000, b=4000), None, kv_width=512)
    found = await planning.make()
    assert found.context is not None
    assert 4096 < found.context.ctx_size < 100_000
    (stage,) = found.plan.stages
    assert stage.memory.cache_bytes == found.context.ctx_size * 2 * 30 * 1024
    asked = await first_placement(Mesh(a=4000, b=4000), 5000, kv_width=512).make()
    assert asked.context is None
    # In whole multiples of 256 positions.
    assert asked.plan.stages[0].memory.cache_bytes == 5120 * 2 * 30 * 1024


async def test_the_first_plan_is_made_of_the_hosts_that_are_still_there() -> None:
    mesh = Mesh(a=4000, b=4000)
    planning = first_placement(mesh, None)
    making = asyncio.create_task(planning.make())
    # It has begun; what comes of it is only heard of when this waits again.
    await asyncio.sleep(0)
    mesh.members.remove("a")
    assert [stage.host for stage in (await making).plan.stages] == ["b"]
