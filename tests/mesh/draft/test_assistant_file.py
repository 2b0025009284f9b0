"""Which assistants of Gemma 4 fit a model, told by headers, and why others do not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mesh.draft.assistant_file import beside_tail
from mesh.draft.drafter import read_drafter
from mesh.draft.memory import drafter_bytes
from mesh.draft.pairs import drafters_beside
from mesh.placement.memory_estimate import StageSizes, Workload
from mesh.placement.planner import check_stages
from spanmesh_proto.errors import InvalidModel, MeshError, UncuttableModel
from speculative.draft.context import DraftOptions
from speculative.proposer import DrafterKind
from stages.gguf import read_header
from stages.layers import LayerRange
from stages.slicing.model_facts import read_model_facts
from tests.qualification.own_models import OWN_MODELS
from tests.support.assistant_files import write_assistant
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stages.slicing.model_facts import ModelFacts


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    folder = tmp_path_factory.mktemp("target")
    return read_model_facts(OWN_MODELS["gemma4-dense"](1).write(folder / "model.gguf"))


@pytest.mark.parametrize("kind", ["dense", "moe", "e"])
@pytest.mark.parametrize("depth", [1, 2])
def test_one_that_was_made_for_the_model_fits(kind: str, depth: int, tmp_path: Path) -> None:
    model = OWN_MODELS[f"gemma4-{kind}"](depth).write(tmp_path / "model.gguf")
    assistant = write_assistant(tmp_path / "assistant.gguf")
    facts = read_model_facts(model)
    drafter = read_drafter(assistant, facts)
    assert (drafter.kind, drafter.num_drafting_layers) == (DrafterKind.ASSISTANT, 4)
    assert drafter.is_beside_tail
    assert not drafter.reads_features
    assert drafter_bytes(drafter, model, DraftOptions(), 512) == 0


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"embedding_length_out": 96},
            "reads hidden states of 96 values, .* has 64: it was made for another",
        ),
        ({"attention.sliding_window": 32}, "layer 0 of .* with a window of 32, .* with a window of 16,"),
        ({"attention.key_length_swa": 32}, "layer 0 .* reads keys of 2 heads of 32 .* writes 2 heads of 64"),
        ({"attention.key_length": 64, "rope.dimension_count": 64}, "layer 3 .* of 1 heads of 64 .* of 128"),
        ({"attention.head_count_kv": [1, 2, 2, 1]}, "layer 0 .* reads keys of 1 heads .* writes 2 heads"),
        ({"attention.head_count_kv": [2, 2, 2, 2]}, "layer 3 .* reads keys of 2 heads .* writes 1 heads"),
        ({"attention.head_count_kv": ["2"] * 4}, "attention.head_count_kv' lists '2', need integers"),
        ({"attention.head_count_kv": 1}, "layer 0 .* reads keys of 1 heads"),
        ({"attention.head_count_kv": None}, "layer 3 .* reads keys of 2 heads"),
        ({"attention.head_count": 3}, "layer 0 .* has 3 heads for 2 of keys"),
        ({"attention.head_count": 0}, "layer 0 .* has 0 heads for 2 of keys"),
        ({"rope.freq_base": 1e6}, r"layer 3 .* rotated by base 1e\+06; .* rotated by base 10000:"),
        ({"rope.freq_base_swa": 1e4}, "layer 0 .* rotated by base 10000; .* rotated by base 1000:"),
        ({"rope.dimension_count": 64}, "layer 3 .* no window, 64 rotated .* no window, 128 rotated"),
        ({"rope.dimension_count_swa": 32}, "layer 0 .* 32 rotated .* 64 rotated"),
        ({"rope.scaling.factor": 4.0}, "layer 0 .* rotated by base 1000 and factor 4; .* by base 1000:"),
        ({"attention.sliding_window_pattern": [0, 1, 1, 0]}, "layer 0 .* reads keys of 2 heads .* no window"),
        ({"block_count": 5}, "says that it has 5 layers and drafts with 4, and has tensors of 4"),
        ({"nextn_predict_layers": 3}, "says that it has 4 layers and drafts with 3"),
        ({"nextn_predict_layers": None}, "drafts with 0"),
        ({"block_count": 2**31, "nextn_predict_layers": 2**31}, "has tensors of 4"),
        ({"embedding_length": 64}, "is as wide as .*, 64 values, which llama.cpp refuses"),
        ({"embedding_length": 96}, r"token_embd.weight has shape \(128, 320\), expected \(96, 320\)"),
        ({"feed_forward_length": 64}, r"blk.0.ffn_gate.weight has shape \(128, 128\), expected \(128, 64\)"),
        (
            {"attention.sliding_window": None},
            "attention.sliding_window' is missing or an array, need an integer",
        ),
    ],
)
def test_other_metadata_are_refused(
    target: ModelFacts, tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    path = write_assistant(tmp_path / "assistant.gguf", metadata=metadata)
    with pytest.raises(InvalidModel, match=message):
        read_drafter(path, target)


@pytest.mark.parametrize(
    "name",
    [
        "nextn.pre_projection.weight",
        "nextn.post_projection.weight",
        "rope_freqs.weight",
        "token_embd.weight",
        "blk.2.attn_q.weight",
        "blk.3.layer_output_scale.weight",
    ],
)
def test_tensors_are_all_there_in_their_shapes(target: ModelFacts, tmp_path: Path, name: str) -> None:
    path = write_assistant(tmp_path / "assistant.gguf", tensors={name: None})
    with pytest.raises(InvalidModel, match=f"tensor {name} is missing"):
        read_drafter(path, target)
    path = write_assistant(tmp_path / "other.gguf", tensors={name: np.ones((3, 32), np.float32)})
    with pytest.raises(InvalidModel, match=rf"tensor {name} has shape \(32, 3\), expected"):
        read_drafter(path, target)


def test_another_vocabulary_is_refused(target: ModelFacts, tmp_path: Path) -> None:
    path = write_assistant(tmp_path / "assistant.gguf", n_vocab=330)
    with pytest.raises(InvalidModel, match=r"has 330 tokens, .* has 320: it was made for another model"):
        read_drafter(path, target)
    path = write_assistant(tmp_path / "assistant.gguf")
    data = path.read_bytes()
    assert data.count(b"<0x41>") == 1
    path.write_bytes(data.replace(b"<0x41>", b"<0x42>"))
    with pytest.raises(InvalidModel, match=r"token 68 is '<0x42>' in the assistant, '<0x41>' in the model"):
        read_drafter(path, target)


def test_models_that_it_cannot_read_are_refused(target: ModelFacts, tmp_path: Path) -> None:
    path = write_assistant(tmp_path / "assistant.gguf")
    llama = read_model_facts(TinyModel("llama").write(tmp_path / "llama.gguf"))
    with pytest.raises(InvalidModel, match=r"is an assistant of Gemma 4, and .* is llama"):
        read_drafter(path, llama)
    with pytest.raises(InvalidModel, match="takes embeddings of tokens from the last stage"):
        read_drafter(path, replace(target, is_tied=False))
    family = OWN_MODELS["gemma4-dense"](1)
    windows = {"attention.sliding_window_pattern": [True, False, False]}
    keys = {"attention.head_count_kv": [2, 1, 1]}
    other = replace(family, metadata={**family.metadata, **windows, **keys}).write(tmp_path / "other.gguf")
    with pytest.raises(InvalidModel, match=r"which the last two layers of .* are not"):
        read_drafter(path, read_model_facts(other))


def test_beside_a_model_it_is_told_of_with_the_reason(target: ModelFacts, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(target.path.read_bytes())
    write_assistant(tmp_path / "fits.gguf")
    write_assistant(tmp_path / "other.gguf", metadata={"embedding_length_out": 96})
    found = {each.path.name: each for each in drafters_beside(read_model_facts(model))}
    assert {each.label for each in found.values()} == {"an assistant of Gemma 4"}
    assert not found["fits.gguf"].misfit
    assert "hidden states of 96 values" in found["other.gguf"].misfit


def test_a_damaged_header_fits_or_is_refused_in_one_line(target: ModelFacts, tmp_path: Path) -> None:
    path = write_assistant(tmp_path / "assistant.gguf")
    data = path.read_bytes()
    messages = []
    for number in _places(data):
        path.write_bytes(data[:number] + bytes([data[number] ^ 0x55]) + data[number + 1 :])
        try:
            read_drafter(path, target)
        except MeshError as error:
            messages.append(error.message)
    assert not any("\n" in message for message in messages)
    assert len(messages) > 100


def test_the_last_stage_holds_it_beside_both_layers_that_it_reads(target: ModelFacts, tmp_path: Path) -> None:
    header = read_header(write_assistant(tmp_path / "assistant.gguf"))
    beside = beside_tail(target, header, 4)
    assert (target.allowed_cuts, beside.allowed_cuts) == ((1, 2), (1,))
    assert beside.head_bytes > target.head_bytes + header.file_bytes
    # Weights in Q8_0 are larger once they are repacked.
    assert beside.head_packing_bytes > target.head_packing_bytes
    workload = Workload(256, 4)
    for layers in (LayerRange(1, 3), LayerRange(0, 3)):
        grown = StageSizes(beside, workload).memory(layers).total_bytes
        assert grown > StageSizes(target, workload).memory(layers).total_bytes + header.file_bytes
    first = LayerRange(0, 1)
    assert StageSizes(beside, workload).memory(first) == StageSizes(target, workload).memory(first)
    with pytest.raises(
        UncuttableModel, match=r"assistant.gguf reads the last two layers, which have to be in"
    ):
        check_stages(beside, num_stages=None, split=(2, 1))


def _places(data: bytes) -> Iterator[int]:
    begin, end = data.index(b"gemma4-assistant.block_count"), data.index(b"tokenizer.ggml.model")
    yield from range(begin, end, 3)
    yield from range(data.index(b"token_embd.weight"), data.index(b"blk.1."), 7)
