"""Vectors of a real model: llama.cpp's own, whatever shares their batch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest
from llama_cpp.llama import Llama

from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import InvalidModel, ProtocolError
from stages.embedding.model_file import read_embedding_facts
from stages.embedding.runtime import EmbeddingRuntime
from stages.runtime.stage_runtime import RuntimeOptions
from tests.support.tiny_embedders import (
    CLS,
    FAMILIES,
    LAST,
    MEAN,
    TinyEmbedder,
    tiny_chat_model_with_pooling,
)
from tests.support.tiny_families import TINY_FAMILIES

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = pytest.mark.model

TEXTS = [
    "a short text",
    "word1 word2 word3",
    "another text that is a little longer than both of the others, with a comma",
    "b",
    "word4 " * 14,
]
OPTIONS = RuntimeOptions(num_slots=8, ctx_size=128)
POOLINGS = {
    "bert": CLS,
    "nomic-bert": MEAN,
    "nomic-bert-moe": MEAN,
    "jina-bert-v2": MEAN,
    "jina-bert-v3": MEAN,
    "modern-bert": CLS,
    "neo-bert": CLS,
    "eurobert": MEAN,
    "gemma-embedding": MEAN,
    "qwen3": LAST,
    "gemma3": MEAN,
}


@pytest.fixture(params=POOLINGS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def written(folder: Path, family: str, *, pooling: int | None = None, is_float: bool = False) -> Path:
    path = folder / f"{family}{pooling or ''}{'-float' * is_float}.gguf"
    pooling = pooling or POOLINGS[family]
    if family in FAMILIES:
        return TinyEmbedder(family, pooling, is_float=is_float).write(path)
    return tiny_chat_model_with_pooling(path, family, pooling, is_float=is_float)


def tokens_of(path: Path) -> list[list[int]]:
    tokenizer = Tokenizer(path)
    return [tokenizer.encode(text, add_special=True, parse_special=True) for text in TEXTS]


def cosines(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
    """Of rows of length 1, pair by pair."""
    found: NDArray[np.float64] = (one.astype(np.float64) * other).sum(axis=1)
    return found


def apart(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """How far the pair that is least alike is from a cosine of 1."""
    return float(1 - cosines(one, other).min())


def of_llama_cpp(path: Path, *, flash_attn: bool = True) -> NDArray[np.float32]:
    """Vectors of llama-cpp-python, which computes a text at a time."""
    reference = Llama(
        str(path),
        embedding=True,
        n_ctx=512,
        n_batch=512,
        n_ubatch=512,
        n_threads=1,
        flash_attn=flash_attn,
        verbose=False,
    )
    with closing(reference):
        return np.array([reference.embed(text, normalize=True) for text in TEXTS], np.float32)


def each_alone(runtime: EmbeddingRuntime, texts: list[list[int]]) -> NDArray[np.float32]:
    return np.concatenate([runtime.embed([tokens]) for tokens in texts])


def in_batches(runtime: EmbeddingRuntime, texts: list[list[int]]) -> list[NDArray[np.float32]]:
    """Vectors of the texts in batches of several kinds."""
    return [
        runtime.embed(texts),
        runtime.embed(texts[::-1])[::-1],
        np.stack([runtime.embed([texts[4], tokens, texts[2]])[1] for tokens in texts]),
    ]


@pytest.mark.parametrize(
    "pooling", [None, *(pytest.param(each, marks=pytest.mark.sweep) for each in (MEAN, CLS, LAST))]
)
def test_they_are_those_of_llama_cpp(family: str, pooling: int | None, tmp_path: Path) -> None:
    path = written(tmp_path, family, pooling=pooling)
    expected = of_llama_cpp(path)
    with closing(EmbeddingRuntime(path, OPTIONS)) as runtime:
        rows = each_alone(runtime, tokens_of(path))
        assert rows.shape == expected.shape
        assert rows.dtype == np.float32
        assert runtime.width == rows.shape[1]
        # The same kernels over the same rows: the same numbers, but for the division by the length.
        assert np.abs(rows - expected).max() <= 1e-6
        assert np.linalg.norm(rows, axis=1) == pytest.approx(np.ones(len(rows)), abs=1e-5)
        if pooling != CLS or family in FAMILIES:
            # Other texts have other vectors: the comparison could fail. A causal model's first token is the
            # same for all of them.
            assert cosines(rows, np.roll(expected, 1, axis=0)).max() < 0.999


def test_they_do_not_depend_on_what_shares_the_batch(family: str, tmp_path: Path) -> None:
    # Quantised weights would hide much, see below. With float32 ones flash attention's sums in float16 are
    # left, in another order from 64 rows on: 1e-5 at most with these texts, all families and poolings.
    path = written(tmp_path, family, is_float=True)
    texts = tokens_of(path)
    with closing(EmbeddingRuntime(path, OPTIONS)) as runtime:
        alone = each_alone(runtime, texts)
        for rows in in_batches(runtime, texts):
            assert apart(rows, alone) <= 1e-4
        # Nor on what was computed before.
        assert np.array_equal(runtime.embed([texts[0]])[0], alone[0])


@pytest.mark.parametrize("family", ["bert", "nomic-bert", "gemma-embedding", "qwen3", "gemma3"])
def test_with_quantised_weights_a_batch_changes_them_as_little_as_another_kernel_of_llama_cpp(
    family: str, tmp_path: Path
) -> None:
    # llama.cpp rounds activations to 8 bits before a product with quantised weights, so the least difference
    # in a sum of attention has some rounded the other way. What that comes to depends on the model; llama.cpp
    # itself, with and without flash attention, tells. Measured: batches differ 0.4 to 1.9 times as much.
    path = written(tmp_path, family)
    texts = tokens_of(path)
    of_rounding = apart(of_llama_cpp(path, flash_attn=True), of_llama_cpp(path, flash_attn=False))
    assert 1e-5 < of_rounding < 5e-3
    with closing(EmbeddingRuntime(path, OPTIONS)) as runtime:
        alone = each_alone(runtime, texts)
        for rows in in_batches(runtime, texts):
            assert apart(rows, alone) <= 5 * of_rounding


def test_the_longest_text_and_the_fullest_batch_fit_and_no_more(tmp_path: Path) -> None:
    path = TinyEmbedder("bert", MEAN).write(tmp_path / "tiny.gguf")
    with closing(EmbeddingRuntime(path, OPTIONS)) as runtime:
        longest = [5] * 128
        assert runtime.embed([longest]).shape == (1, 64)
        assert runtime.embed([longest] * 4).shape == (4, 64)
        assert runtime.embed([[5]] * 8).shape == (8, 64)
        assert runtime.compute_us > 0
        for texts, says in (
            ([[*longest, 5]], "a text has 129 tokens; 1 to 128 fit"),
            ([longest] * 5, "a batch has 640 tokens; 512 fit"),
            ([[5]] * 9, "9 texts in a batch; 1 to 8 fit"),
            ([], "0 texts in a batch"),
            ([[5], []], "a text has 0 tokens"),
            ([[runtime.n_vocab]], "the vocabulary has"),
        ):
            with pytest.raises(ProtocolError, match=says):
                runtime.embed(texts)
        assert runtime.embed([[5]]).shape == (1, 64)


def test_a_model_without_pooling_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    path = TinyEmbedder(pooling=None).write(tmp_path / "tiny.gguf")
    with pytest.raises(InvalidModel, match=r"tiny\.gguf makes no vectors of texts"):
        EmbeddingRuntime(path, OPTIONS)


WITH_BOTH_MASKS = [
    TinyEmbedder("gemma-embedding", n_layers=6, window_pattern=None),
    TinyEmbedder("gemma-embedding", window_pattern=(False, True)),
    TinyEmbedder("modern-bert", window_pattern=None),
    TinyEmbedder("modern-bert", window_pattern=0, window=0),
]
WITH_ONE_MASK = [
    TinyEmbedder("gemma-embedding", window_pattern=None),
    TinyEmbedder("gemma-embedding", window_pattern=(True, True)),
    TinyEmbedder("gemma-embedding", window_pattern=0),
    TinyEmbedder("modern-bert", window_pattern=None, n_layers=1),
    TinyEmbedder("modern-bert", window_pattern=1),
    TinyEmbedder("modern-bert", window_pattern=(False, False)),
]


@pytest.mark.parametrize("model", WITH_BOTH_MASKS, ids=repr)
def test_models_with_a_window_are_computed(model: TinyEmbedder, tmp_path: Path) -> None:
    path = model.write(tmp_path / "tiny.gguf")
    read_embedding_facts(path)
    with closing(EmbeddingRuntime(path, OPTIONS)) as runtime:
        assert np.abs(each_alone(runtime, tokens_of(path)) - of_llama_cpp(path)).max() <= 1e-6


@pytest.mark.parametrize("model", WITH_ONE_MASK, ids=repr)
def test_what_would_end_the_process_is_refused(model: TinyEmbedder, tmp_path: Path) -> None:
    path = model.write(tmp_path / "tiny.gguf")
    with pytest.raises(
        InvalidModel, match=r"(all layers have|no layer has) a sliding window, and llama\.cpp"
    ):
        read_embedding_facts(path)


@pytest.mark.sweep
@pytest.mark.parametrize("model", WITH_ONE_MASK, ids=repr)
def test_the_refusal_is_needed(model: TinyEmbedder, tmp_path: Path) -> None:
    # Once llama.cpp computes these models, they need not be refused.
    path = model.write(tmp_path / "tiny.gguf")
    program = (
        "import sys; from pathlib import Path; from stages.embedding.runtime import EmbeddingRuntime; "
        "from stages.runtime.stage_runtime import RuntimeOptions; "
        "EmbeddingRuntime(Path(sys.argv[1]), RuntimeOptions(num_slots=8, ctx_size=128))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert "GGML_ASSERT" in done.stderr


@pytest.mark.sweep
@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("pooling", [MEAN, LAST])
def test_models_of_other_families_keep_texts_apart(family: str, pooling: int, tmp_path: Path) -> None:
    path = TINY_FAMILIES[family].write(tmp_path / "tiny.gguf", {"pooling_type": pooling}, is_float=True)
    texts = tokens_of(path)
    is_recurrent = family in {"mamba2", "falcon-h1", "qwen3next", "nemotron_h", "granitehybrid"}
    options = RuntimeOptions(num_slots=1 if is_recurrent else 8, ctx_size=128)
    with closing(EmbeddingRuntime(path, options)) as runtime:
        alone = np.concatenate([runtime.embed([tokens]) for tokens in texts])
        if not is_recurrent:
            assert apart(runtime.embed(texts), alone) <= 1e-4
        again = np.concatenate([runtime.embed([tokens]) for tokens in texts[::-1]])[::-1]
        assert np.array_equal(again, alone)
