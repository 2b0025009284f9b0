"""Vectors of a real model: llama.cpp's own, whatever shares their batch."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import llama_cpp
import numpy as np
import pytest

from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import InvalidModel, ProtocolError
from stages.embedding.runtime import EmbeddingRuntime
from stages.runtime.stage_runtime import RuntimeOptions
from tests.support.tiny_embedders import CLS, LAST, MEAN, TinyEmbedder, tiny_chat_model_with_pooling
from tests.support.tiny_families import TINY_FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = pytest.mark.model

TEXTS = [
    "a short text",
    "word1 word2 word3",
    "another text that is a little longer than both of the others, with a comma",
    "b",
    "word4 " * 40,
]
OPTIONS = RuntimeOptions(num_slots=8, ctx_size=128)
MODELS: dict[str, Callable[[Path], Path]] = {
    "bert cls": lambda path: TinyEmbedder("bert", CLS).write(path),
    "bert mean": lambda path: TinyEmbedder("bert", MEAN).write(path),
    "nomic-bert mean": lambda path: TinyEmbedder("nomic-bert", MEAN).write(path),
    "jina-bert-v2 mean": lambda path: TinyEmbedder("jina-bert-v2", MEAN).write(path),
    "gemma-embedding mean": lambda path: TinyEmbedder("gemma-embedding", MEAN).write(path),
    "qwen3 last": lambda path: tiny_chat_model_with_pooling(path, "qwen3", LAST),
    "gemma3 mean": lambda path: tiny_chat_model_with_pooling(path, "gemma3", MEAN),
}


@pytest.fixture(params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return MODELS[request.param](tmp_path / "tiny.gguf")


def tokens_of(path: Path) -> list[list[int]]:
    tokenizer = Tokenizer(path)
    return [tokenizer.encode(text, add_special=True, parse_special=True) for text in TEXTS]


def cosines(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
    """Of rows of length 1, pair by pair."""
    found: NDArray[np.float64] = (one.astype(np.float64) * other).sum(axis=1)
    return found


def test_they_are_those_of_llama_cpp(path: Path) -> None:
    reference = llama_cpp.Llama(
        str(path), embedding=True, n_ctx=512, n_batch=512, n_ubatch=512, n_threads=1, verbose=False
    )
    with closing(reference), closing(EmbeddingRuntime(path, OPTIONS)) as runtime:
        expected = np.array([reference.embed(text, normalize=True) for text in TEXTS], np.float32)
        rows = runtime.embed(tokens_of(path))
        assert rows.shape == expected.shape
        assert rows.dtype == np.float32
        assert runtime.width == rows.shape[1]
        assert cosines(rows, expected).min() >= 0.9999
        assert np.linalg.norm(rows, axis=1) == pytest.approx(np.ones(len(rows)), abs=1e-5)
        # Other texts have other vectors: the comparison could fail.
        assert cosines(rows, np.roll(expected, 1, axis=0)).max() < 0.999


def test_they_do_not_depend_on_what_shares_the_batch(path: Path) -> None:
    texts = tokens_of(path)
    with closing(EmbeddingRuntime(path, OPTIONS)) as runtime:
        alone = np.concatenate([runtime.embed([tokens]) for tokens in texts])
        together = runtime.embed(texts)
        backwards = runtime.embed(texts[::-1])[::-1]
        crowded = np.stack([runtime.embed([texts[4], tokens, texts[2]])[1] for tokens in texts])
        for rows in (together, backwards, crowded):
            assert cosines(rows, alone).min() >= 0.9999
        # Nor on what was computed before.
        assert np.array_equal(runtime.embed([texts[0]])[0], alone[0])


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


@pytest.mark.sweep
@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("pooling", [MEAN, LAST])
def test_models_of_other_families_keep_texts_apart(family: str, pooling: int, tmp_path: Path) -> None:
    path = TINY_FAMILIES[family].write(tmp_path / "tiny.gguf", {"pooling_type": pooling})
    texts = tokens_of(path)
    is_recurrent = family in {"mamba2", "falcon-h1", "qwen3next", "nemotron_h", "granitehybrid"}
    options = RuntimeOptions(num_slots=1 if is_recurrent else 8, ctx_size=128)
    with closing(EmbeddingRuntime(path, options)) as runtime:
        alone = np.concatenate([runtime.embed([tokens]) for tokens in texts])
        if not is_recurrent:
            assert cosines(runtime.embed(texts), alone).min() >= 0.999
        again = np.concatenate([runtime.embed([tokens]) for tokens in texts[::-1]])[::-1]
        assert cosines(again, alone).min() >= 0.9999
