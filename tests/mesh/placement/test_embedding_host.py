"""The host of an embedding model: one where it fits, quick, and with memory to spare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mesh.placement.embedding_host import EmbeddingSizes, place_embeddings
from mesh.placement.host_capacity import Gpu, HostCapacity
from spanmesh_proto.errors import ModelDoesNotFit, NotEnoughHosts
from stages.embedding.model_file import BatchLimits, EmbeddingFacts

GIB = 2**30
FACTS = EmbeddingFacts(
    path=Path("small.gguf"),
    architecture="bert",
    name="Small",
    n_layers=12,
    n_vocab=30_000,
    n_ctx_train=512,
    width=384,
    pooling="cls",
    file_bytes=130 * 2**20,
    weight_bytes=128 * 2**20,
    lookup_bytes=44 * 2**20,
    packing_bytes=0,
    cache_width=0,
    state_width=0,
    row_width=8000,
    num_masks=1,
    has_logits=False,
)
SIZES = EmbeddingSizes(FACTS, BatchLimits(512, 64))
NEEDED = SIZES.memory.total_bytes


def host(name: str, memory_bytes: int = 4 * GIB, speed: float = 20.0, *gpus: Gpu) -> HostCapacity:
    return HostCapacity(name, memory_bytes, speed, gpus=gpus)


def gpu(free_bytes: int, speed: float = 500.0) -> Gpu:
    return Gpu("CUDA0", "a GPU", free_bytes, free_bytes, speed)


def chosen(*hosts: HostCapacity) -> str:
    (stage,) = place_embeddings(SIZES, hosts).stages
    assert (stage.layers.start, stage.layers.stop) == (0, 12)
    return stage.host


def test_a_clearly_faster_host_is_chosen_else_the_one_with_more_memory() -> None:
    assert chosen(host("a"), host("b", speed=40.0)) == "b"
    assert chosen(host("a"), host("b", 8 * GIB), host("c", 6 * GIB, 22.0)) == "b"
    assert chosen(host("a"), host("b")) == "a"


def test_one_where_it_does_not_fit_is_not() -> None:
    assert chosen(host("a", NEEDED - 1, 100.0), host("b", NEEDED)) == "b"


def test_a_gpu_with_room_goes_before_any_processor() -> None:
    large, small = gpu(8 * GIB), gpu(2**20)
    plan = place_embeddings(SIZES, [host("a", 9 * GIB, 90.0), host("b", 4 * GIB, 20.0, large)])
    (stage,) = plan.stages
    assert (stage.host, plan.reason) == ("b", "the CUDA0 of b holds the whole model")
    assert stage.memory.gpu_layers == (("CUDA0", 12),)
    assert chosen(host("a", 4 * GIB, 20.0, small), host("b", 4 * GIB, 40.0)) == "b"
    # Where the operator keeps layers off GPUs, it computes on the processor.
    without = replace(host("b", 4 * GIB, 20.0, large), gpu_layers=0)
    (stage,) = place_embeddings(SIZES, [without]).stages
    assert stage.memory.gpus == ()


def test_without_room_or_hosts_the_numbers_are_told() -> None:
    with pytest.raises(ModelDoesNotFit, match="Small does not fit on one host: it needs ") as refused:
        place_embeddings(SIZES, [host("attic", NEEDED - 1), host("desk", 2**20)])
    for told in (" on attic", "1.0 MiB on desk", "lower --ctx-size", "unload another model"):
        assert told in refused.value.message
    with pytest.raises(NotEnoughHosts, match="none is ready"):
        place_embeddings(SIZES, [])


def test_memory_grows_with_the_longest_text_the_vocabulary_and_a_cache() -> None:
    base = SIZES.memory

    def memory(longest: int = 512, **changes: object) -> int:
        return EmbeddingSizes(replace(FACTS, **changes), BatchLimits(longest, 64)).memory.total_bytes  # type: ignore[arg-type]

    assert base.weight_bytes == FACTS.weight_bytes
    assert base.cache_bytes == 0
    assert memory(longest=2048) > 3 * base.buffer_bytes
    # A row of logits for each token of a batch, twice where they are computed.
    assert memory(n_vocab=60_000) - base.total_bytes >= 30_000 * 512 * 4
    assert memory(has_logits=True) - base.total_bytes == 30_000 * 512 * 4
    assert memory(cache_width=1000) - base.total_bytes >= 1000 * 2 * 512
    assert memory(state_width=1000) - base.total_bytes == 1000 * 4 * 64
