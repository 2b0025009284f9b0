"""Which context a placement gets where nobody asks for one."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.placement.context_choice import (
    LEAST_CTX_SIZE,
    MOST_CTX_SIZE,
    ContextChoice,
    choose_context,
    least_context,
)
from mesh.placement.gpu_layers import GPU_PROCESS_BYTES
from mesh.placement.host_capacity import Gpu, HostCapacity
from mesh.placement.memory_estimate import StageSizes, Workload
from mesh.placement.planner import Plan, plan
from mesh.placement.replanner import can_replan, next_replica
from spanmesh_proto.errors import MeshError
from tests.mesh.placement.test_planner import MIB, OVERHEAD_BYTES, host, hosts_strategy, model, models

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.placement.replanner import Replica
    from stages.layers import LayerRange
    from stages.slicing.model_facts import ModelFacts

# 30 layers of 100 MiB, and 1 KiB a position in each: 60 KiB for a position of both sessions.
LONG = replace(model(kv_width=512), n_ctx_train=1_000_000)
POSITION_BYTES = 2 * 30 * 1024
NUM_SLOTS = 2


def sizes_of(facts: ModelFacts, ctx_size: int | None = None) -> StageSizes:
    return StageSizes(facts, Workload(ctx_size or least_context(facts.n_ctx_train), NUM_SLOTS))


def chosen(
    facts: ModelFacts, hosts: Sequence[HostCapacity], *, num_stages: int | None = None, may_move: bool = True
) -> tuple[Plan, ContextChoice]:
    sizes = sizes_of(facts)
    before = plan(facts, hosts, sizes.workload, num_stages=num_stages)
    after, choice = choose_context(sizes, before, hosts, may_move=may_move)
    assert [(stage.host, stage.layers) for stage in after.stages] == [
        (stage.host, stage.layers) for stage in before.stages
    ]
    assert after.reason == before.reason
    return after, choice


def resized(facts: ModelFacts, placed: Plan, ctx_size: int) -> Plan:
    """The placement with another context."""
    sizes = sizes_of(facts, ctx_size)
    return replace(
        placed,
        stages=tuple(replace(stage, memory=sizes.memory(stage.layers)) for stage in placed.stages),
    )


def replicated(
    facts: ModelFacts, placed: Plan, hosts: Sequence[HostCapacity], ctx_size: int
) -> set[LayerRange]:
    """Layers of which spares hold a replica."""
    found: list[Replica] = []
    sizes = sizes_of(facts, ctx_size)
    stages = resized(facts, placed, ctx_size).stages
    while (replica := next_replica(sizes, stages, hosts, found)) is not None:
        found.append(replica)
    return {replica.layers for replica in found}


def is_replaced(
    facts: ModelFacts,
    placed: Plan,
    hosts: Sequence[HostCapacity],
    lost: str,
    ctx_size: int,
    *,
    may_start_over: bool = False,
) -> bool:
    """Whether the layers of a host that is lost find another place."""
    stages = resized(facts, placed, ctx_size).stages
    indices = [index for index, stage in enumerate(stages) if stage.host == lost]
    others = [each for each in hosts if each.name != lost]
    return can_replan(sizes_of(facts, ctx_size), stages, indices, others, may_start_over=may_start_over)


def test_a_model_is_not_served_beyond_its_training() -> None:
    _, choice = chosen(replace(LONG, n_ctx_train=2048), [host("a", 90_000)])
    assert (choice.ctx_size, choice.bound) == (2048, "the model was trained for no more")
    assert choice.larger is None
    _, choice = chosen(replace(LONG, n_ctx_train=40_960), [host("a", 90_000)])
    assert choice.ctx_size == 40_960
    assert str(choice) == (
        "context: 40,960 positions for each of 2 sessions: the model was trained for no more"
    )


def test_no_more_than_a_bound_is_chosen_and_what_more_would_take_is_told() -> None:
    placed, choice = chosen(LONG, [host("a", 90_000)])
    assert (choice.ctx_size, choice.bound) == (MOST_CTX_SIZE, "no larger one is chosen by default")
    assert placed == resized(LONG, placed, MOST_CTX_SIZE)
    larger = choice.larger
    assert larger is not None
    assert larger.ctx_size == 2 * MOST_CTX_SIZE
    ((name, added_bytes),) = larger.added_bytes
    now, then = (resized(LONG, placed, size).stages[0].memory for size in (MOST_CTX_SIZE, 2 * MOST_CTX_SIZE))
    assert (name, added_bytes) == ("a", then.total_bytes - now.total_bytes)
    assert str(choice).endswith(f"; --ctx-size {2 * MOST_CTX_SIZE} would take 7.6 GiB more on a")
    assert choice.as_dict() == {
        "positions": MOST_CTX_SIZE,
        "bound": "no larger one is chosen by default",
        "larger": {"positions": 2 * MOST_CTX_SIZE, "added_bytes": {"a": added_bytes}},
    }


def test_caches_take_at_most_half_of_what_weights_leave() -> None:
    capacity = host("a", 4000)
    left_bytes = capacity.memory_bytes - 3000 * MIB
    placed, choice = chosen(LONG, [capacity])
    assert choice.bound == "KV caches take at most half of what the weights leave on a"
    assert choice.ctx_size * POSITION_BYTES <= left_bytes / 2 < (choice.ctx_size + 1024) * POSITION_BYTES
    assert placed.stages[0].memory.cache_bytes == choice.ctx_size * POSITION_BYTES
    # Of several hosts, on each.
    _, choice = chosen(LONG, [host("a", 1900), host("b", 2900)], num_stages=2, may_move=False)
    assert choice.bound == "KV caches take at most half of what the weights leave on a"


def test_the_fewest_are_served_if_more_would_be_too_much() -> None:
    capacity = host("a", 3250)
    placed, choice = chosen(LONG, [capacity])
    assert 2 * placed.stages[0].memory.cache_bytes > capacity.memory_bytes - 3000 * MIB
    assert choice.ctx_size == LEAST_CTX_SIZE
    assert choice.bound == "KV caches take at most half of what the weights leave on a"
    assert choice.larger is not None
    assert choice.larger.ctx_size == 2 * LEAST_CTX_SIZE


def test_a_spare_keeps_room_for_its_replica() -> None:
    hosts = [host("a", 3000), host("b", 3000), host("spare", 1800)]
    placed, choice = chosen(LONG, hosts)
    assert [len(stage.layers) for stage in placed.stages] == [15, 15]
    assert choice.bound.startswith("a spare keeps room for a replica of layers [")
    before = replicated(LONG, placed, hosts, LEAST_CTX_SIZE)
    assert before
    assert LEAST_CTX_SIZE < choice.ctx_size < MOST_CTX_SIZE
    assert replicated(LONG, placed, hosts, choice.ctx_size) >= before
    assert not replicated(LONG, placed, hosts, choice.ctx_size + 1024) >= before
    # A spare that could not hold one in any case changes nothing.
    _, without = chosen(LONG, hosts[:2])
    _, with_a_small_one = chosen(LONG, [*hosts[:2], host("small", 100)])
    assert with_a_small_one == without
    assert without.ctx_size > choice.ctx_size


def test_a_loss_that_can_be_repaired_stays_one() -> None:
    hosts = [host(name, 2600) for name in "abc"]
    placed, choice = chosen(LONG, hosts, num_stages=3)
    assert re.fullmatch("without [abc] its layers have to fit elsewhere", choice.bound)
    assert LEAST_CTX_SIZE < choice.ctx_size < MOST_CTX_SIZE
    assert all(is_replaced(LONG, placed, hosts, name, choice.ctx_size) for name in "abc")
    assert not all(is_replaced(LONG, placed, hosts, name, choice.ctx_size + 1024) for name in "abc")
    # Layers that are locked to their hosts are never placed elsewhere.
    _, locked = chosen(LONG, hosts, num_stages=3, may_move=False)
    assert locked.ctx_size > choice.ctx_size
    assert locked.bound.startswith("KV caches take at most half")


def test_losses_that_there_was_no_time_to_try_do_not_count() -> None:
    hosts = [host(name, 2600) for name in "abc"]
    sizes = sizes_of(LONG)
    before = plan(LONG, hosts, sizes.workload, num_stages=3)
    _, hurried = choose_context(sizes, before, hosts, is_time_up=lambda: True)
    _, locked = choose_context(sizes, before, hosts, may_move=False)
    assert hurried == locked


def test_layers_stay_on_the_gpu_where_they_are() -> None:
    sizes = sizes_of(LONG)
    beside_bytes = sizes.on_gpu.compute_bytes(sizes.whole) + GPU_PROCESS_BYTES
    gpu = Gpu("CUDA0", "a GPU", 4500 * MIB + beside_bytes, 2**40, 900.0)
    capacity = HostCapacity("a", 4000 * MIB + OVERHEAD_BYTES, 20.0, gpus=(gpu,))
    placed, choice = chosen(LONG, [capacity])
    assert choice.bound == "KV caches take at most half of what the weights leave on CUDA0 of a"
    assert LEAST_CTX_SIZE < choice.ctx_size < MOST_CTX_SIZE
    ((share,),) = [stage.memory.gpus for stage in placed.stages]
    assert share.num_layers == 30
    assert 2 * share.cache_bytes <= gpu.free_bytes - share.weight_bytes
    assert share.total_bytes <= gpu.free_bytes
    assert placed.stages[0].memory.total_bytes <= capacity.memory_bytes
    assert choice.larger is not None
    ((_, added_bytes),) = choice.larger.added_bytes
    assert added_bytes > choice.ctx_size * POSITION_BYTES


def test_recurrent_states_are_no_reason_for_a_short_context() -> None:
    # States of 400 MiB, and no KV cache.
    facts = replace(LONG, kv_widths=(0,) * 30, state_widths=(400 * MIB // 30 // 4 // NUM_SLOTS,) * 30)
    _, choice = chosen(facts, [host("a", 3700)])
    assert choice.ctx_size == MOST_CTX_SIZE


# Every second layer has a state of 10 MiB for each session, and no KV cache.
HYBRID = replace(LONG, kv_widths=(512, 0) * 15, state_widths=(0, 10 * MIB // 4) * 15)


@pytest.mark.parametrize(
    ("facts", "workload", "state_bytes"),
    [
        (LONG, Workload(LEAST_CTX_SIZE, NUM_SLOTS, "q8_0"), 0),
        (LONG, Workload(LEAST_CTX_SIZE, NUM_SLOTS, is_exact=True), 0),
        (LONG, Workload(LEAST_CTX_SIZE, NUM_SLOTS, "q4_0", is_exact=True), 0),
        (HYBRID, Workload(LEAST_CTX_SIZE, NUM_SLOTS), NUM_SLOTS * 15 * 10 * MIB),
        (HYBRID, Workload(LEAST_CTX_SIZE, NUM_SLOTS, num_checkpoints=1), 2 * NUM_SLOTS * 15 * 10 * MIB),
    ],
)
def test_half_of_what_is_left_is_meant_in_every_format(
    facts: ModelFacts, workload: Workload, state_bytes: int
) -> None:
    capacity = host("a", 4000)
    placed, choice = choose_context(
        StageSizes(facts, workload), plan(facts, [capacity], workload), [capacity], may_move=False
    )
    assert choice.bound == "KV caches take at most half of what the weights leave on a"
    (stage,) = placed.stages
    now, more = (
        StageSizes(facts, replace(workload, ctx_size=ctx_size)).memory(stage.layers)
        for ctx_size in (choice.ctx_size, choice.ctx_size + 1024)
    )
    assert stage.memory == now
    left_bytes = capacity.memory_bytes - now.weight_bytes - state_bytes
    assert 2 * (now.cache_bytes - state_bytes) <= left_bytes < 2 * (more.cache_bytes - state_bytes)


@given(models(), hosts_strategy, st.integers(64, 300_000), st.one_of(st.none(), st.integers(1, 4)))
@settings(deadline=None)
def test_every_choice_keeps_what_was_there(
    short: ModelFacts, hosts: list[HostCapacity], n_ctx_train: int, num_stages: int | None
) -> None:
    facts = replace(short, n_ctx_train=n_ctx_train)
    try:
        placed, choice = chosen(facts, hosts, num_stages=num_stages)
    except MeshError:
        return
    least = least_context(n_ctx_train)
    assert least <= choice.ctx_size <= min(n_ctx_train, MOST_CTX_SIZE)
    assert placed == resized(facts, placed, choice.ctx_size)
    assert (choice.larger is None) is (choice.ctx_size == n_ctx_train)
    for each in hosts:
        held = [stage.memory for stage in placed.stages if stage.host == each.name]
        assert sum(memory.total_bytes for memory in held) <= each.memory_bytes
        left_bytes = each.memory_bytes - sum(memory.weight_bytes for memory in held)
        is_least = choice.ctx_size == least
        assert is_least or 2 * sum(memory.cache_bytes for memory in held) <= left_bytes
        for may_start_over in (False, True) if held else ():
            before, after = (
                is_replaced(facts, placed, hosts, each.name, ctx_size, may_start_over=may_start_over)
                for ctx_size in (least, choice.ctx_size)
            )
            assert after >= before
    assert replicated(facts, placed, hosts, choice.ctx_size) >= replicated(facts, placed, hosts, least)


@pytest.mark.parametrize(("n_ctx_train", "least"), [(512, 512), (4096, 4096), (131_072, 4096)])
def test_a_placement_is_made_for_a_short_context(n_ctx_train: int, least: int) -> None:
    assert least_context(n_ctx_train) == least
