"""Formats of KV caches: what they take, what they change, and which heads they suit."""

import ctypes
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from mesh.placement.memory_estimate import StageSizes, Workload
from spanmesh_proto.errors import ClusterError
from stages.runtime import llama
from stages.runtime.kv_types import KV_TYPES, check_kv_type
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.slicing.model_facts import read_model_facts
from tests.support.tiny_models import TinyModel

CTX_SIZE = 300
TOKENS = [int(token) for token in np.random.default_rng(5).integers(3, 300, 100)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kv") / "tiny.gguf"
    return TinyModel("llama", n_layers=3, head_size=32).write(path)


@contextmanager
def cache_sizes() -> Iterator[list[float]]:
    """Sizes in MiB of the KV caches that llama.cpp says it makes meanwhile."""
    sizes: list[float] = []

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
    def listen(_level: int, text: bytes, _data: Any) -> None:
        found = re.search(rb"KV buffer size = +([0-9.]+) MiB", text)
        if found:
            sizes.append(float(found[1]))

    llama.init_backend()
    llama_cpp.llama_log_set(listen, ctypes.c_void_p(0))
    try:
        yield sizes
    finally:
        llama_cpp.llama_log_set(llama._on_log, ctypes.c_void_p(0))


def last_logits(model: Path, kv_type: str) -> NDArray[np.float32]:
    """After all tokens, in a chunk and one by one."""
    with closing(StageRuntime(model, RuntimeOptions(ctx_size=CTX_SIZE, kv_type=kv_type))) as runtime:
        runtime.decode([Span(0, 0, TOKENS[:90])])
        for position in range(90, 99):
            runtime.decode([Span(0, position, TOKENS[position : position + 1])])
        outputs = runtime.decode([Span(0, 99, TOKENS[99:], None, 1)])[0]
    return outputs.reshape(-1)


def test_sizes_are_those_of_ggml() -> None:
    assert {name: each.number for name, each in KV_TYPES.items()} == {
        name: GGMLQuantizationType[name.upper()].value for name in KV_TYPES
    }
    assert {name: (each.block_width, each.block_bytes) for name, each in KV_TYPES.items()} == {
        name: GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]] for name in KV_TYPES
    }


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_every_format_computes_and_takes_what_is_accounted_for(tiny: Path, kv_type: str) -> None:
    exact = last_logits(tiny, "f32")
    with cache_sizes() as sizes:
        logits = last_logits(tiny, kv_type)
    expected = StageSizes(read_model_facts(tiny), Workload(CTX_SIZE, 1, kv_type))
    assert sizes == [pytest.approx(expected.cache_bytes(expected.whole) / 2**20, abs=0.006)]
    # Coarser formats are further off, none so far that it would be another text's logits.
    off = float(np.linalg.norm(logits - exact) / np.linalg.norm(exact))
    assert off < {"f32": 1e-6, "f16": 0.01, "bf16": 0.05, "q8_0": 0.05}.get(kv_type, 0.6)
    # Flash attention rounds f32 to f16 before it computes.
    assert (off > 0) == (kv_type not in {"f32", "f16"})


def test_windows_are_cached_in_full_so_that_a_trim_finds_all(tmp_path: Path) -> None:
    path = TinyModel("gemma3", n_layers=6, head_size=32, window=16).write(tmp_path / "windows.gguf")
    for num_slots, exact in ((1, False), (3, False), (3, True)):
        with cache_sizes() as sizes:
            StageRuntime(path, RuntimeOptions(num_slots=num_slots, ctx_size=CTX_SIZE, exact=exact)).close()
        expected = StageSizes(read_model_facts(path), Workload(CTX_SIZE, num_slots, is_exact=exact))
        assert len(sizes) == 2
        assert sum(sizes) == pytest.approx(expected.cache_bytes(expected.whole) / 2**20, abs=0.02)


def test_heads_that_are_no_whole_blocks_are_refused() -> None:
    check_kv_type("q8_0", "any", (64, 128), option="--kv-type")
    check_kv_type("bf16", "any", (80, 80), option="--kv-type")
    with pytest.raises(ClusterError) as refused:
        check_kv_type("q4_0", "Phi", (96, 80), option="--kv-type")
    assert refused.value.param == "--kv-type"
    assert refused.value.message == (
        "--kv-type q4_0 packs 32 elements together, but a head of Phi has 80: choose f32, f16 or bf16"
    )
    with pytest.raises(ClusterError, match="--draft-kv-type is f8: it must be one of f32, f16"):
        check_kv_type("f8", "any", (64, 64), option="--draft-kv-type")
