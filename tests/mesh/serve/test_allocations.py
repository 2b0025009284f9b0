"""What models hold of hosts beside one another: memory, threads, copies that give way, and how it is told."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from mesh.cluster.host_facts import HostFacts, Versions
from mesh.cluster.members import Member
from mesh.placement.host_capacity import Gpu
from mesh.placement.planner import StagePlacement
from mesh.placement.replanner import NewStage, Replan
from mesh.serve.allocations import HostAllocations
from mesh.serve.pipeline import Pipeline, PipelineStage
from stages.layers import LayerRange
from stages.runtime.process_memory import GpuShare, StageMemory
from stages.transport.hidden_codec import HiddenType

if TYPE_CHECKING:
    from mesh.serve.stage_handle import StageHandle

VERSIONS = Versions("1", "2", "3", "4", "5")


def member(name: str, memory_bytes: int = 1000, gpus: tuple[Gpu, ...] = ()) -> Member:
    facts = HostFacts(memory_bytes, 8, 20.0, VERSIONS, gpus=gpus)
    return Member(name, "127.0.0.1", facts, f"{name}.1", is_ready=True)


A, B = member("a"), member("b")


def placement(host: Member, layers: LayerRange, num_bytes: int, on_gpu: int = 0) -> StagePlacement:
    gpus = (GpuShare("CUDA0", 1, on_gpu, 0, 0),) if on_gpu else ()
    return StagePlacement(host.name, layers, StageMemory(num_bytes + on_gpu, 0, 0, 0, gpus))


def stage(host: Member, layers: LayerRange, num_bytes: int, threads: int = 2) -> StageHandle:
    """As far as a ledger looks at it."""
    memory = placement(host, layers, num_bytes).memory
    config = SimpleNamespace(layers=layers, memory=memory, options=SimpleNamespace(num_threads=threads))
    return cast("StageHandle", SimpleNamespace(member=host, config=config))


def pipeline_stage(host: Member, layers: LayerRange, num_bytes: int, threads: int = 2) -> PipelineStage:
    return PipelineStage(
        placement(host, layers, num_bytes), HiddenType.F32, stage(host, layers, num_bytes, threads)
    )


FIRST, SECOND = LayerRange(0, 10), LayerRange(10, 20)


def allocations(*pipelines: Pipeline, **draft: Any) -> tuple[HostAllocations, list[Any]]:
    """Accounts `one`, `two` and so on; `a` is the head."""
    found = HostAllocations(lambda host: host.name == "a")
    names = ("one", "two", "three")
    return found, [
        found.open(name, pipeline, **(draft if name == "two" else {}))
        for name, pipeline in zip(names, pipelines, strict=False)
    ]


def test_a_further_model_has_what_is_left_once_others_are_gone() -> None:
    ones, twos = Pipeline(), Pipeline()
    ones.stages = (pipeline_stage(A, FIRST, 300), pipeline_stage(B, SECOND, 100))
    twos.intended = (placement(A, FIRST, 200),)
    twos.replicas = [stage(B, FIRST, 50)]
    found, _ = allocations(ones, twos, draft_bytes=30)
    # Copies give way; a draft model is on the head only, and that of the further one, too.
    for gone, on_a, on_b in (
        ((), 1000 - 300 - 200 - 30 - 7, 900),
        (("two",), 1000 - 300 - 7, 900),
        (("one",), 1000 - 200 - 30 - 7, 1000),
        (("one", "two"), 993, 1000),
    ):
        left = [found.capacity_without(host, gone, draft_bytes=7).memory_bytes for host in (A, B)]
        assert left == [on_a, on_b], gone
    assert found.held_bytes(A) == 530
    assert found.held_bytes(A, without=("two",)) == 300
    assert found.held_bytes(B, without=("one",)) == 50


def test_a_model_in_exact_mode_keeps_to_hosts_that_compute_attention_alike() -> None:
    _, (one, two) = allocations(Pipeline(), Pipeline())
    other = replace(B, facts=replace(B.facts, attention_version=116))
    assert [one.capacity_of(host).memory_bytes for host in (A, other)] == [1000, 1000]
    one.attention_version = 116
    assert [one.capacity_of(host).memory_bytes for host in (A, other)] == [0, 1000]
    assert [one.capacity_for_replicas(host).is_apart for host in (A, other)] == [True, False]
    assert two.capacity_of(A).memory_bytes == 1000


def test_each_model_adds_its_vocabulary_to_processes_that_count_once() -> None:
    found = HostAllocations(lambda host: host.name == "a", worker_bytes=100)
    one = found.open("one", Pipeline(), request_bytes=20)
    assert one.capacity_of(A).memory_bytes == 1000 - 100 - 20
    two = found.open("two", Pipeline(), request_bytes=7, draft_bytes=5)
    left = one.capacity_of(A)
    assert (left.memory_bytes, left.request_bytes, left.others_bytes) == (1000 - 100 - 20 - 7 - 5, 120, 12)
    assert two.capacity_of(A).memory_bytes == left.memory_bytes
    assert found.held_bytes(A) == 132
    assert found.held_bytes(A, without=("one",)) == 112
    further = found.capacity_without(A, ("two",), request_bytes=3)
    assert further.memory_bytes == 1000 - 100 - 20 - 3
    # Texts are read on the head's machine.
    assert (
        one.capacity_of(B).memory_bytes == found.capacity_without(B, (), request_bytes=3).memory_bytes == 1000
    )
    assert found.held_bytes(B) == 0


def test_replicas_give_way_where_vocabularies_leave_no_room() -> None:
    others = Pipeline()
    others.replicas = [stage(A, SECOND, 300), stage(B, SECOND, 300)]
    for request_bytes, num_going in ((100, 0), (101, 1)):
        found = HostAllocations(lambda host: host.name == "a", worker_bytes=100)
        mine = Pipeline()
        mine.intended = (placement(A, FIRST, 500), placement(B, FIRST, 500))
        one = found.open("one", mine, request_bytes=request_bytes)
        found.open("two", others)
        assert len(one.evictable_replicas(A)) == num_going
        assert one.evictable_replicas(B) == ()


def test_alone_a_model_has_all_that_hosts_give() -> None:
    pipeline = Pipeline()
    _, (one,) = allocations(pipeline)
    before = one.capacity_of(A)
    pipeline.stages = (pipeline_stage(A, FIRST, 400),)
    pipeline.replicas = [stage(A, SECOND, 100)]
    assert one.capacity_of(A) == one.capacity_for_replicas(A) == before
    assert one.threads_of(A) == 8
    assert one.evictable_replicas(A) == ()


def test_stages_of_others_and_what_they_intend_are_taken_and_copies_give_way() -> None:
    theirs = Pipeline()
    theirs.stages = (
        pipeline_stage(A, FIRST, 300, threads=5),
        PipelineStage(placement(B, SECOND, 300), HiddenType.F32),
    )
    theirs.intended = (placement(A, SECOND, 200),)
    theirs.replicas = [stage(A, FIRST, 100)]
    theirs.loading_replicas = [stage(A, SECOND, 50)]
    _, (one, _two) = allocations(Pipeline(), theirs, draft_bytes=30)
    left = one.capacity_of(A)
    assert (left.memory_bytes, left.others_bytes) == (1000 - 300 - 200 - 30, 530)
    # Three models' stages would want its memory's bandwidth.
    assert left.speed_gb_per_s == pytest.approx(20 / 3)
    assert one.capacity_for_replicas(A).memory_bytes == 1000 - 300 - 200 - 30 - 150
    assert "470" in str(left)
    assert "beside 530" in str(left)
    # Drafts are on the head; a stage that is lost holds nothing.
    assert one.capacity_of(B).memory_bytes == 1000
    assert one.threads_of(A) == 3
    assert one.threads_of(B) == 8


def test_nobody_has_less_than_nothing() -> None:
    theirs = Pipeline()
    theirs.stages = (pipeline_stage(A, FIRST, 5000, threads=8),)
    _, (one, _two) = allocations(Pipeline(), theirs)
    assert one.capacity_of(A).memory_bytes == 0
    assert one.threads_of(A) == 1


def test_what_is_on_a_gpu_is_taken_there() -> None:
    theirs, gpu = Pipeline(), Gpu("CUDA0", "", 2000, 2000, 200.0, shares_host_memory=False)
    host = member("c", gpus=(gpu,))
    theirs.intended = (placement(host, FIRST, 100, on_gpu=700),)
    _, (one, _two) = allocations(Pipeline(), theirs)
    left = one.capacity_of(host)
    assert (left.memory_bytes, left.gpus[0].free_bytes) == (900, 1300)


def test_an_intention_holds_until_the_ring_is_there() -> None:
    pipeline = Pipeline()
    _, (_one, two) = allocations(pipeline, Pipeline())
    new = NewStage(placement(A, FIRST, 600))
    pipeline.intend(Replan((new, NewStage(placement(B, SECOND, 600), kept=0)), (), ""))
    assert two.capacity_of(A).memory_bytes == 400
    assert two.capacity_of(B).memory_bytes == 1000


def test_only_as_many_copies_of_others_go_as_must() -> None:
    mine, theirs = Pipeline(), Pipeline()
    small, large, coming = stage(A, FIRST, 100), stage(A, SECOND, 500), stage(A, FIRST, 350)
    theirs.replicas, theirs.loading_replicas = [small, large, stage(B, FIRST, 999)], [coming]
    _, (one, _two) = allocations(mine, theirs)
    mine.intended = (placement(A, FIRST, 500),)
    assert [way.replica for way in one.evictable_replicas(A)] == [large]
    # One's own copies are the planner's business: they stay, unless one becomes the stage.
    mine.replicas = [stage(A, SECOND, 300)]
    assert [way.replica for way in one.evictable_replicas(A)] == [large, coming]
    mine.replicas = [stage(A, FIRST, 500)]
    assert [way.replica for way in one.evictable_replicas(A)] == [large]
    theirs.release(coming)
    assert theirs.loading_replicas == []


def test_threads_may_be_said() -> None:
    found = HostAllocations(lambda _host: False)
    assert found.open("one", Pipeline(), most_threads=3).threads_of(A) == 3
    assert found.open("two", Pipeline(), most_threads=30).threads_of(A) == 8


def test_hosts_are_told_by_the_models_names_but_for_the_first() -> None:
    first, other = Pipeline(), Pipeline()
    first.replicas, other.replicas = [stage(B, FIRST, 10)], [stage(B, SECOND, 20)]
    other.stages = (pipeline_stage(B, FIRST, 100),)
    found, (one, two) = allocations(first, other, draft_bytes=7)
    one.noted = (placement(A, FIRST, 1), placement(A, SECOND, 1))
    two.noted = (placement(A, FIRST, 1), placement(B, SECOND, 1))
    assert found.layers_on("a") == "[0, 10), [10, 20); two [0, 10)"
    assert found.layers_on("b") == "two [10, 20)"
    assert found.replicas_on("b") == ["[0, 10)", "two [10, 20)"]
    assert (found.held_bytes(A), found.held_bytes(B)) == (7, 130)
    found.close(two)
    found.close(two)
    assert found.layers_on("b") == ""
    assert found.held_bytes(A) == 0


def test_what_computes_at_times_leaves_threads_and_speed_to_models() -> None:
    found, theirs = HostAllocations(lambda _member: False), Pipeline()
    model = found.open("model", Pipeline())
    encoder = found.open("pictures", theirs, most_threads=30, computes_at_times=True)
    theirs.stages = (pipeline_stage(A, FIRST, 300, threads=8),)
    assert (model.threads_of(A), encoder.threads_of(A)) == (8, 8)
    left, alone = model.capacity_of(A), A.facts.capacity(A.name)
    assert (left.memory_bytes, left.speed_gb_per_s) == (1000 - 300, alone.speed_gb_per_s)
