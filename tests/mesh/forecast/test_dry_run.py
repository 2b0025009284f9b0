"""What `mesh plan` counts on the head's host, besides stages."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from mesh.cluster.host_facts import HostFacts, read_versions
from mesh.forecast.dry_run import DryRun, DryRunOptions, KnownHost, PlanningContext, dry_run
from mesh.forecast.hypothetical_hosts import equal_links, hosts_on_paper
from mesh.placement.host_capacity import HostCapacity
from mesh.placement.memory_estimate import StageSizes, Workload
from mesh.text.text_service import vocabulary_bytes
from spanmesh_proto.errors import ModelDoesNotFit
from stages.gguf import Value, ValueType
from stages.slicing.model_facts import read_model_facts
from stages.slicing.source_model import read_source
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path

MIB, NUM_WORKERS = 2**20, 2
WORKERS_BYTES = 256 * MIB
WORKLOAD = Workload(256, 2)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return TinyModel("llama").write(tmp_path / "tiny.gguf")


def text_bytes(path: Path, num_tokens: int) -> int:
    """Of this model with another vocabulary."""
    header = read_source(path).header
    text = (6).to_bytes(8, "little") + b"abcdef"
    tokens = Value(ValueType.STRING, num_tokens, text * num_tokens)
    grown = replace(header, metadata={**header.metadata, "tokenizer.ggml.tokens": tokens})
    return NUM_WORKERS * vocabulary_bytes(grown)


def planned(
    path: Path,
    *memory_mib: int,
    texts: int,
    num_stages: int | None = None,
    workload: Workload = WORKLOAD,
    attention_version: int = 116,
) -> DryRun:
    """A plan for hosts `a`, the head, `b` and so on."""
    hosts = [
        KnownHost(HostCapacity(name, memory * MIB, 20.0), 1)
        for name, memory in zip("abc", memory_mib, strict=False)
    ]
    facts = HostFacts(10_000 * MIB, 1, 20.0, read_versions(), attention_version=attention_version)
    options = DryRunOptions(workload, WORKERS_BYTES, texts, num_stages=num_stages, is_timed=False)
    return dry_run(
        read_source(path),
        read_model_facts(path),
        hosts_on_paper(hosts, equal_links(hosts, 1.0), facts),
        options,
    )


def test_a_larger_vocabulary_leaves_the_head_less_and_no_other_host(tiny: Path) -> None:
    small, large = (text_bytes(tiny, count) for count in (50_000, 250_000))
    assert large - small > NUM_WORKERS * 200_000 * 340
    plans = [planned(tiny, 2000, 2000, texts=texts, num_stages=2) for texts in (small, large)]
    for found, texts in zip(plans, (small, large), strict=True):
        taken = {stage.host: stage.memory.total_bytes for stage in found.plan.stages}
        assert found.free_after_bytes("a") == 2000 * MIB - WORKERS_BYTES - texts - taken["a"]
        assert found.free_after_bytes("b") == 2000 * MIB - taken["b"]
        head = {"host": "a", "worker_bytes": WORKERS_BYTES, "text_bytes": texts}
        assert found.as_dict()["head"] == {
            **head,
            "draft_bytes": 0,
            "picture_bytes": 0,
            "pictures_measured": False,
        }
    assert plans[0].plan.stages == plans[1].plan.stages


def test_a_head_on_a_small_machine_holds_nothing_that_does_not_fit(tiny: Path) -> None:
    texts = text_bytes(tiny, 250_000)
    sizes = StageSizes(read_model_facts(tiny), WORKLOAD)
    whole_mib = -(-sizes.memory(sizes.whole).total_bytes // MIB)
    enough_mib = whole_mib + -(-(WORKERS_BYTES + texts) // MIB)
    assert [stage.host for stage in planned(tiny, enough_mib, texts=texts).plan.stages] == ["a"]
    with pytest.raises(ModelDoesNotFit, match=r"on a beside .* for reading texts"):
        planned(tiny, enough_mib - 2, texts=texts)
    # Another host with as much has room for it.
    found = planned(tiny, enough_mib - 2, enough_mib - 2, texts=texts)
    assert [stage.host for stage in found.plan.stages] == ["b"]


@pytest.mark.parametrize(
    ("ctx_size", "kv_type", "attention_version"),
    [(100_000, "f16", 116), (100_000, "f16", 0), (100_000, "q8_0", 116), (256, "f16", 116)],
)
def test_large_caches_are_advised_to_be_smaller(
    tmp_path: Path, ctx_size: int, kv_type: str, attention_version: int
) -> None:
    path = TinyModel("llama", n_embd=128, head_size=32).write(tmp_path / "wide.gguf")
    workload = Workload(ctx_size, 2, kv_type)
    found = planned(path, 4000, texts=0, workload=workload, attention_version=attention_version)
    if (ctx_size, kv_type, attention_version) == (100_000, "f16", 116):
        held = sum(stage.memory.cache_bytes for stage in found.plan.stages)
        assert found.q8_0_cache_bytes == pytest.approx(held * 34 / 64, rel=0.01)
    else:
        assert found.q8_0_cache_bytes is None


def test_in_exact_mode_hosts_of_another_kind_are_left_out(tiny: Path) -> None:
    capacities = [HostCapacity(name, 2000 * MIB, 20.0, attention_version=116) for name in "ab"]
    capacities.append(HostCapacity("c", 3000 * MIB, 20.0))
    hosts = tuple(KnownHost(capacity, 1) for capacity in capacities)
    links = equal_links(hosts, 1.0)
    context = PlanningContext(hosts, "a", links, lambda _wanted: {}, "")
    options = DryRunOptions(replace(WORKLOAD, is_exact=True), 0, 0, num_stages=2, is_timed=False)
    found = dry_run(read_source(tiny), read_model_facts(tiny), context, options)
    assert {stage.host for stage in found.plan.stages} == {"a", "b"}
    assert found.left_out == {"c": "kept apart: --exact, and attention is computed by ggml there"}
