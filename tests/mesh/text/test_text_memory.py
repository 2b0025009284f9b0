"""What a model's texts take of the head's memory, by the header and by real processes."""

from __future__ import annotations

import asyncio
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from mesh.text.text_jobs import TextModel
from mesh.text.text_service import (
    PROCESS_BYTES,
    TextRequest,
    TextService,
    num_text_workers,
    text_bytes_of,
    vocabulary_bytes,
)
from mesh.text.tokenizer import Tokenizer
from mesh.util.worker_pool import WorkerPool
from stages.gguf import Value, ValueType, read_one_header
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from stages.gguf import GgufHeader

# A tree beside the vocabulary; two merges a token. Others are like SmolLM2's.
OTHERS = ("ggml-vocab-nomic-bert-moe.gguf", "ggml-vocab-gemma-4.gguf")


@pytest.fixture
def tiny(tmp_path: Path) -> GgufHeader:
    return read_one_header(TinyModel("llama").write(tmp_path / "tiny.gguf"))


def texts(count: int, size: int) -> Value:
    return Value(ValueType.STRING, count, (struct.pack("<Q", size) + b"x" * size) * count)


def test_tokens_merges_and_trees_add_up(tiny: GgufHeader) -> None:
    def bytes_with(num_tokens: int, num_merges: int, kind: str = "gpt2", size: int = 6) -> int:
        added = {
            "tokenizer.ggml.model": Value.of(ValueType.STRING, kind),
            "tokenizer.ggml.tokens": texts(num_tokens, size),
            "tokenizer.ggml.merges": texts(num_merges, size),
        }
        return vocabulary_bytes(replace(tiny, metadata={**tiny.metadata, **added}))

    least = bytes_with(0, 0)
    per_token, per_merge = bytes_with(1, 0) - least, bytes_with(0, 1) - least
    assert bytes_with(150_000, 140_000) == least + 150_000 * per_token + 140_000 * per_merge
    # Of SmolLM2's 49,000 tokens each takes 370 bytes at least, with a merge.
    assert per_token + per_merge > 370
    assert bytes_with(1000, 0, size=16) - bytes_with(1000, 0) == 10_000
    # Texts of 2.6 MB made a tree of 88 MB.
    assert bytes_with(1000, 0, "t5") - bytes_with(1000, 0) > 33 * 6000


def test_a_file_without_a_vocabulary_has_none(tiny: GgufHeader) -> None:
    names = [name for name in tiny.metadata if name.startswith("tokenizer.")]
    bare = replace(tiny, metadata={key: each for key, each in tiny.metadata.items() if key not in names})
    assert names
    assert 0 < vocabulary_bytes(bare) < vocabulary_bytes(tiny)


def test_each_process_has_its_own(tiny: GgufHeader) -> None:
    assert text_bytes_of(tiny.path) == num_text_workers() * vocabulary_bytes(tiny)


@pytest.mark.model
def test_a_process_that_read_and_wrote_every_token_stays_below(smollm2_path: Path) -> None:
    check_process(smollm2_path)


@pytest.mark.model
@pytest.mark.parametrize("name", OTHERS)
def test_so_it_does_with_large_vocabularies(name: str) -> None:
    path = Path(os.environ.get("SPANMESH_LLAMA_CPP", "")) / "models" / name
    if not path.is_file():
        pytest.skip("no source of llama.cpp: see SPANMESH_LLAMA_CPP")
    check_process(path)


def check_process(path: Path) -> None:
    """Compare the bound with the resident memory of a process whose answers had all tokens."""
    tokenizer = Tokenizer(path)
    pool = WorkerPool(
        "mesh.text.text_worker", num_workers=1, cpu_limit_s=60, wall_limit_s=120, memory_bytes=2**32
    )
    service = TextService(
        TextModel(str(tokenizer.path), tokenizer.stamp, tokenizer.chat_template or ""), pool
    )

    async def use() -> None:
        given = TextRequest("The quick brown fox " * 100, "prompt")
        await service.ids([given], most_tokens=10**6, client=None)
        for start in range(0, tokenizer.n_vocab, 500):
            some = range(start, min(start + 500, tokenizer.n_vocab))
            await service.text(list(some), client=None)

    try:
        asyncio.run(use())
        (worker,) = pool._workers
        assert worker._process is not None
        resident_bytes = psutil.Process(worker._process.pid).memory_info().rss
    finally:
        pool.close()
    bound_bytes = PROCESS_BYTES + vocabulary_bytes(read_one_header(path))
    assert resident_bytes <= bound_bytes <= 1.5 * resident_bytes
