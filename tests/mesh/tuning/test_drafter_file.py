"""Drafters as numbers, and files that are written of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mesh.draft.drafter import read_drafter
from mesh.draft.loading import check_drafter
from mesh.tuning.drafter_file import (
    TUNED_PREFIX,
    has_head_of,
    head_rows,
    read_weights,
    tuned_values,
    write_weights,
)
from mesh.tuning.source import Source
from mesh.tuning.vocabulary import coverage, retrimmed, token_counts
from spanmesh_proto.errors import UncuttableModel
from speculative.draft.context import DraftOptions
from stages.gguf import Value, ValueType, read_header
from stages.slicing.model_facts import read_model_facts
from tests.support.eagle3 import DRAFTER
from tests.support.tiny_eagle3 import TinyEagle3
from tests.support.tiny_models import N_VOCAB, TinyModel

if TYPE_CHECKING:
    from pathlib import Path


def tiny(folder: Path, shape: TinyEagle3 | None = None) -> Source:
    target = TinyModel("llama", is_float=True).write(folder / "target.gguf")
    return Source(target, (shape or TinyEagle3()).write(target, folder / "drafter.gguf"))


def test_a_drafter_is_written_as_it_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tiny(tmp_path, TinyEagle3(has_rope_factors=True))
    weights = source.weights
    path = tmp_path / "tuned.gguf"
    tuned = {"tokens": Value.of(ValueType.UINT64, 7)}
    write_weights(path, source.drafter, weights, tuned)
    again = Source(source.facts.path, path)
    assert again.weights.shape == weights.shape
    for name, array in weights.trained.items():
        assert again.weights.trained[name].shape == array.shape
        # Q8_0 keeps the largest of 32 values, and rounds the others to its 127th part.
        np.testing.assert_allclose(again.weights.trained[name], array, atol=np.abs(array).max() / 200)
    np.testing.assert_array_equal(again.weights.head, weights.head)
    np.testing.assert_array_equal(again.weights.token_ids, weights.token_ids)
    assert again.weights.rope_factors is not None
    assert weights.rope_factors is not None
    np.testing.assert_array_equal(again.weights.rope_factors, weights.rope_factors)
    header, before = read_header(path), source.drafter.header
    assert tuned_values(header) == tuned
    assert {key: value for key, value in header.metadata.items() if not key.startswith(TUNED_PREFIX)} == dict(
        before.metadata
    )
    assert header.tensors.keys() == before.tensors.keys()
    assert header.tensors["fc.weight"].type.name == "Q8_0"
    assert header.tensors["output_norm.weight"].type.name == "F32"
    found = check_drafter(path, source.facts.path, DraftOptions(ctx_size=64))
    assert (found.num_own_tokens, found.lacks) == (200, ("token_embd.weight",))
    # What an earlier tuning said is replaced.
    write_weights(path, read_drafter(path, source.facts), weights, {})
    assert tuned_values(read_header(path)) == {}


def test_tokens_that_are_chosen_anew_get_the_models_rows(tmp_path: Path) -> None:
    source = tiny(tmp_path)
    head = head_rows(source.header)
    assert has_head_of(source.weights, head, source.facts.n_embd)
    missing = np.setdiff1d(np.arange(N_VOCAB), source.weights.token_ids)
    counts = token_counts([missing.astype(np.int32)], N_VOCAB)
    token_ids = retrimmed(source.weights.token_ids, counts, 150)
    path = tmp_path / "tuned.gguf"
    weights = replace(source.weights, head=head.rows(token_ids), token_ids=token_ids)
    write_weights(path, source.drafter, weights, {})
    again = Source(source.facts.path, path)
    np.testing.assert_array_equal(again.weights.token_ids, token_ids)
    rows = head.rows(token_ids)
    np.testing.assert_allclose(again.weights.head, rows, atol=np.abs(rows).max() / 200)
    assert len(again.weights.head) == 150


def test_a_head_that_is_not_the_models_keeps_its_tokens(tmp_path: Path) -> None:
    source = tiny(tmp_path, TinyEagle3(num_own_tokens=N_VOCAB))
    strange = replace(source.weights, head=source.weights.head[::-1])
    assert not has_head_of(strange, head_rows(source.header), source.facts.n_embd)
    narrow = tiny(tmp_path, TinyEagle3(own_width=32, head_width=8, n_rot=8))
    assert not has_head_of(narrow.weights, head_rows(narrow.header), narrow.facts.n_embd)
    assert narrow.with_vocabulary([], None) is narrow.weights


def test_the_demo_s_drafter_has_its_models_head(smollm2_path: Path) -> None:
    source = Source(smollm2_path, DRAFTER)
    assert has_head_of(source.weights, head_rows(source.header), 576)
    assert source.weights.head.shape == (16_384, 576)
    assert source.recorded.layers == (3, 15, 28)
    assert source.known_prompts == frozenset()


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    target = TinyModel("llama", is_float=True).write(tmp_path / "target.gguf")
    facts, header = read_model_facts(target), read_header(target)
    small = TinyModel("llama").write(tmp_path / "small.gguf")
    with pytest.raises(UncuttableModel, match=r"small\.gguf is of kind .*: EAGLE-3 drafters alone"):
        read_weights(read_drafter(small, facts), header)
    scaled = TinyEagle3(scaling="yarn").write(target, tmp_path / "scaled.gguf")
    with pytest.raises(UncuttableModel, match=r"scaled\.gguf scales positions by yarn"):
        read_weights(read_drafter(scaled, facts), header)


def test_frequent_tokens_come_first_then_the_former_ones() -> None:
    former = np.array([1, 2, 3, 4, 5], np.int64)
    counts = token_counts([np.array([9, 9, 7, 2], np.int32), np.array([9, 7], np.int32)], 10)
    assert retrimmed(former, counts, 2).tolist() == [7, 9]
    assert retrimmed(former, counts, 5).tolist() == [1, 2, 3, 7, 9]
    assert retrimmed(former, counts, 99).tolist() == [1, 2, 3, 4, 5, 7, 9]
    assert coverage(counts, former) == pytest.approx(1 / 6)
    assert coverage(counts, retrimmed(former, counts, 5)) == 1.0
    assert coverage(np.zeros(10, np.int64), former) == 0.0
