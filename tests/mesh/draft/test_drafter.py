"""What a draft file is, what is refused, and the file that llama.cpp loads."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mesh.draft import loading
from mesh.draft.drafter import Drafter, loadable_bytes, loadable_file, own_head, read_drafter
from mesh.draft.loading import load_drafter
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import InvalidModel, ModelError, UncuttableModel
from speculative.draft.context import DraftOptions
from speculative.proposer import DrafterKind
from stages.gguf import ValueType, read_header
from stages.slicing.model_facts import read_model_facts
from stages.slicing.tensor_names import layer_of
from tests.qualification.fuzz.drafter_fuzz import write_eagle3
from tests.support.changed_drafters import write_changed
from tests.support.eagle3 import DRAFTER
from tests.support.nemotron_h_moe import write_nemotron_h_moe
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stages.slicing.model_facts import ModelFacts

pytestmark = pytest.mark.model

OPTIONS = DraftOptions(ctx_size=64)


@pytest.fixture(scope="module")
def target(smollm2_path: Path) -> ModelFacts:
    return read_model_facts(smollm2_path)


def changed(path: Path, **values: Any) -> Path:
    """The drafter with other metadata, tensors left out (None) or of another shape, or other token ids."""
    return write_changed(DRAFTER, path, values)


def test_an_eagle3_drafter_reads_three_layers(target: ModelFacts) -> None:
    drafter = read_drafter(DRAFTER, target)
    assert drafter.kind is DrafterKind.EAGLE3
    assert drafter.layers == (2, 14, 27)
    assert drafter.n_embd == 576
    assert drafter.lacks == ("token_embd.weight",)


def test_what_it_lacks_comes_from_the_target_once(target: ModelFacts, tmp_path: Path) -> None:
    drafter = read_drafter(DRAFTER, target)
    path = loadable_file(drafter, target.path, tmp_path)
    assert path.stat().st_size == loadable_bytes(drafter, target.path)
    made_ns = path.stat().st_mtime_ns
    assert loadable_file(drafter, target.path, tmp_path) == path
    assert path.stat().st_mtime_ns == made_ns
    whole, given = read_header(path), read_header(target.path)
    assert whole.tensors["token_embd.weight"].shape == given.tensors["token_embd.weight"].shape
    complete = read_drafter(path, target)
    assert complete.lacks == ()
    assert loadable_file(complete, target.path, tmp_path) == path


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target_layers": [3, 15, 30]}, "before layers 3, 15, 30, of which .* has 1 to 29"),
        ({"target_layers": [0, 15, 28]}, "before layers 0, 15, 28"),
        ({"target_layers": [3.0, 15.0, math.nan]}, "'eagle3.target_layers' lists nan, need integers"),
        ({"target_layers": [3, 15]}, "no list of three"),
        ({"target_hidden_size": 1024}, "of 1024 values, .* has 576: it was made for another model"),
        ({"block_count": 2}, "has 2 layers"),
        ({"attention.head_count": 0}, "has 0 attention heads"),
        ({"rope.dimension_count": 0}, "rotates 0 of 64 values"),
        ({"rope.dimension_count": 66}, "rotates 66 of 64 values"),
        ({"rope.dimension_count": 3}, "rotates 3 of 64 values"),
        ({"fc.weight": None}, "tensor fc.weight is missing"),
        (
            {"enc.output_norm.weight": np.zeros(1727, np.float32)},
            r"enc.output_norm.weight has shape \(1727,\), expected \(1728,\)",
        ),
        (
            {"fc.weight": np.zeros((576, 64), np.float32)},
            r"fc.weight has shape \(64, 576\), expected \(1728, 576\)",
        ),
        ({"d2t": np.zeros(16384, np.float32)}, "d2t is F32"),
        ({"d2t": np.full(16384, 49152, np.int64)}, "d2t names token ids outside .* of 49152"),
        ({"d2t": np.full(16384, -1, np.int64)}, "d2t names token ids outside"),
        ({"d2t": None}, r"tensor output.weight has shape \(576, 16384\), expected \(576, 49152\)"),
        ({"output.weight": None}, "16384 tokens of its own but no output.weight"),
    ],
)
def test_a_drafter_of_another_model_is_refused(
    target: ModelFacts, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidModel, match=message):
        read_drafter(changed(tmp_path / "drafter.gguf", **values), target)


def test_a_kind_that_cannot_run_yet_is_named(target: ModelFacts, tmp_path: Path) -> None:
    path = changed(tmp_path / "drafter.gguf", architecture="gemma4_assistant")
    with pytest.raises(
        UncuttableModel, match=r"of kind gemma4_assistant, which cannot be run yet: .* EAGLE-3"
    ):
        read_drafter(path, target)


def test_a_target_with_streams_of_hidden_states_is_refused(target: ModelFacts) -> None:
    with pytest.raises(UncuttableModel, match=r"cannot draft for .*: its hidden states have 4 streams"):
        read_drafter(DRAFTER, replace(target, n_streams=4))


def test_a_target_may_have_recurrent_layers(target: ModelFacts) -> None:
    assert read_drafter(DRAFTER, replace(target, can_trim=False)).kind is DrafterKind.EAGLE3


def test_a_small_model_is_a_draft_model(target: ModelFacts, tmp_path: Path) -> None:
    small = TinyModel("llama").write(tmp_path / "small.gguf")
    assert read_drafter(small, target).kind is DrafterKind.MODEL
    assert not read_drafter(small, target).reads_features


def test_a_damaged_file_is_refused(target: ModelFacts, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(DRAFTER.read_bytes()[:4096])
    with pytest.raises(ModelError):
        read_drafter(damaged, target)


def test_a_model_drafts_with_the_first_of_its_own_heads(tmp_path: Path) -> None:
    family = TINY_FAMILIES["glm4moe"].with_prediction_layer()
    model = family.write(tmp_path / "model.gguf")
    facts = read_model_facts(model)
    head = own_head(facts)
    assert head is not None
    assert (head.kind, head.layers, head.n_embd) == (DrafterKind.MTP, (facts.n_layers,), 64)
    path = loadable_file(head, model, tmp_path)
    cut = read_header(path)
    assert {layer_of(name) for name in cut.tensors} == {None, facts.n_layers}
    assert cut.integer("glm4moe.block_count") == facts.n_layers + 1
    # The same file as a head of its own.
    drafter = read_drafter(path, facts)
    assert (drafter.kind, drafter.layers) == (DrafterKind.MTP, (facts.n_layers,))
    assert loadable_file(drafter, model, tmp_path) == path
    with pytest.raises(InvalidModel, match=r"is the served model itself: leave out --draft"):
        read_drafter(model, facts)
    other = read_model_facts(TINY_FAMILIES["deepseek2"].write(tmp_path / "other.gguf"))
    with pytest.raises(InvalidModel, match=r"a head for models of architecture glm4moe, .* is deepseek2"):
        read_drafter(path, other)
    with pytest.raises(InvalidModel, match=r"a head for 4 layers, .* has 3"):
        read_drafter(path, replace(facts, n_layers=3))


def test_other_models_have_no_head_to_draft_with(tmp_path: Path) -> None:
    model = TINY_FAMILIES["qwen3moe"].write(tmp_path / "model.gguf")
    assert own_head(read_model_facts(model)) is None


@pytest.mark.parametrize("architecture", ["qwen3next", "nemotron_h_moe"])
def test_the_head_of_a_model_with_recurrent_layers_drafts(architecture: str, tmp_path: Path) -> None:
    """llama.cpp calls its file a hybrid one, and gives it a cache for attention only."""
    model = tmp_path / "model.gguf"
    if architecture == "qwen3next":
        TINY_FAMILIES[architecture].with_prediction_layer().write(model)
    else:
        write_nemotron_h_moe(model)
    facts = read_model_facts(model)
    head = own_head(facts)
    assert not facts.can_trim
    assert head is not None
    path = loadable_file(head, model, tmp_path)
    assert {layer_of(name) for name in read_header(path).tensors} == {None, facts.n_layers}
    drafter = read_drafter(path, facts)
    assert drafter.kind is DrafterKind.MTP
    assert ms_per_token(drafter, model, tmp_path) > 0


def ms_per_token(drafter: Drafter, target: Path, root: Path) -> float:
    """Load a drafter, and close it again."""
    with contextlib.closing(load_drafter(drafter, Tokenizer(target), OPTIONS, root=root)) as loaded:
        assert loaded.is_alive
        return loaded.draft_ms_per_token


def test_what_llama_cpp_cannot_load_ends_a_process_of_its_own(target: ModelFacts, tmp_path: Path) -> None:
    drafter = read_drafter(DRAFTER, target)
    assert ms_per_token(drafter, target.path, tmp_path) > 0
    with pytest.raises(
        InvalidModel, match=r"eagle3.gguf cannot draft: .* draft model.*; llama.cpp: .* requires ctx_other"
    ):
        ms_per_token(replace(drafter, lacks=()), target.path, tmp_path)
    headless = TINY_FAMILIES["glm4moe"].write(tmp_path / "headless.gguf", {"nextn_predict_layers": 1})
    with pytest.raises(
        InvalidModel,
        match=r"^llama.cpp aborts when it drafts with headless.gguf \(exit code -\d+\): use another drafter",
    ):
        ms_per_token(Drafter(DrafterKind.MTP, read_header(headless), (3,), 64), target.path, tmp_path)


def test_a_vocabulary_is_read_here_only_after_it_was_read_there(
    target: ModelFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp aborts on some."""
    begun: list[str] = []

    def noted(name: str, called: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            begun.append(name)
            return called(*arguments, **named)

        return call

    tokenizer = Tokenizer(target.path)
    for name in ("IsolatedContext", "Tokenizer", "num_shared_tokens"):
        monkeypatch.setattr(loading, name, noted(name, getattr(loading, name)))
    small = TinyModel("llama").write(tmp_path / "small.gguf")
    before = set(multiprocessing.active_children())
    with pytest.raises(InvalidModel, match=r"small.gguf cannot draft for .*: token \d+ is "):
        load_drafter(read_drafter(small, target), tokenizer, OPTIONS)
    assert begun == ["IsolatedContext", "Tokenizer", "num_shared_tokens"]
    assert set(multiprocessing.active_children()) <= before, "one of another vocabulary is closed"


def test_a_load_without_end_is_ended(
    target: ModelFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_eagle3(target.path, tmp_path / "eagle3.gguf", seed=1)
    drafter = read_drafter(path, target)
    assert ms_per_token(drafter, target.path, tmp_path) > 0
    key = b"eagle3.rope.dimension_count" + struct.pack("<I", ValueType.UINT32)
    data = path.read_bytes()
    assert data.count(key + struct.pack("<I", 16)) == 1
    path.write_bytes(data.replace(key + struct.pack("<I", 16), key + struct.pack("<I", 0)))
    monkeypatch.setattr(loading, "_PATIENCE_S", 2.0)
    with pytest.raises(
        InvalidModel, match=r"^llama.cpp does not finish a few tokens with eagle3.gguf in \d s: use another"
    ):
        ms_per_token(drafter, target.path, tmp_path)
    with pytest.raises(InvalidModel, match="rotates 0 of 16 values"):
        read_drafter(path, target)
