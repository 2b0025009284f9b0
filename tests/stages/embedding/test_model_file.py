"""Which files are embedding models, how large they are, and how long their texts may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import pytest

from spanmesh_proto.errors import ClusterError, InvalidModel, UncuttableModel
from stages.embedding.model_file import BatchLimits, limits_of, read_embedding_facts
from stages.slicing.model_facts import read_model_facts
from tests.support.tiny_embedders import CLS, LAST, MEAN, RANK, TinyEmbedder, tiny_chat_model_with_pooling
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_models import N_VOCAB, TinyModel

if TYPE_CHECKING:
    from pathlib import Path

# -1 in an unsigned number, as llama.cpp's own writer puts it.
UNSPECIFIED = 2**32 - 1


@pytest.mark.parametrize(
    ("model", "pooling", "num_masks"),
    [
        (TinyEmbedder("bert", CLS), "cls", 1),
        (TinyEmbedder("nomic-bert", MEAN), "mean", 1),
        (TinyEmbedder("nomic-bert-moe", MEAN), "mean", 1),
        (TinyEmbedder("jina-bert-v2", MEAN), "mean", 1),
        (TinyEmbedder("jina-bert-v3", MEAN), "mean", 1),
        (TinyEmbedder("neo-bert", CLS), "cls", 1),
        (TinyEmbedder("eurobert", LAST), "last", 1),
        (TinyEmbedder("modern-bert", CLS), "cls", 2),
        (TinyEmbedder("gemma-embedding", LAST), "last", 2),
    ],
    ids=lambda value: getattr(value, "architecture", None),
)
def test_a_model_that_reads_a_text_at_once_has_no_cache(
    model: TinyEmbedder, pooling: str, num_masks: int, tmp_path: Path
) -> None:
    facts = read_embedding_facts(model.write(tmp_path / "tiny.gguf"))
    assert (facts.pooling, facts.num_masks) == (pooling, num_masks)
    assert (facts.n_layers, facts.width, facts.n_vocab, facts.n_ctx_train) == (2, 64, N_VOCAB, 512)
    assert (facts.cache_width, facts.state_width, facts.has_logits) == (0, 0, False)
    assert facts.lookup_bytes < facts.weight_bytes < facts.file_bytes


def test_a_causal_model_with_pooling_has_a_cache_and_logits(tmp_path: Path) -> None:
    path = tiny_chat_model_with_pooling(tmp_path / "tiny.gguf")
    facts = read_embedding_facts(path)
    assert facts.pooling == "last"
    assert facts.cache_width == sum(read_model_facts(path).kv_widths) > 0
    assert facts.has_logits


def test_a_recurrent_model_computes_a_text_at_a_time(tmp_path: Path) -> None:
    path = TINY_FAMILIES["mamba2"].write(tmp_path / "tiny.gguf", {"pooling_type": LAST})
    facts = read_embedding_facts(path)
    assert facts.state_width > 0
    assert limits_of(facts, None).most_texts == 1


@pytest.mark.parametrize(
    ("pooling", "says"),
    [
        (None, "has no bert.pooling_type"),
        (0, "has bert.pooling_type 0, which is none"),
        (UNSPECIFIED, f"has bert.pooling_type {UNSPECIFIED}, which is none"),
        (RANK, "ranks texts"),
    ],
)
def test_what_makes_no_vectors_is_refused_with_the_key(
    pooling: int | None, says: str, tmp_path: Path
) -> None:
    path = TinyEmbedder(pooling=pooling).write(tmp_path / "tiny.gguf")
    with pytest.raises(InvalidModel, match=says) as refused:
        read_embedding_facts(path)
    assert "embedding model" in refused.value.message


def test_a_stage_and_an_encoder_decoder_are_refused(tmp_path: Path) -> None:
    stage = TinyModel("llama").write(
        tmp_path / "stage.gguf", integers={"spanmesh.layer_count": 9, "llama.pooling_type": MEAN}
    )
    with pytest.raises(InvalidModel, match="is a stage of a model"):
        read_embedding_facts(stage)
    writer = gguf.GGUFWriter(tmp_path / "t5.gguf", "t5encoder")
    writer.add_uint32("t5encoder.pooling_type", MEAN)
    for name in ("token_embd.weight", "enc.blk.0.attn_q.weight"):
        writer.add_tensor(name, TinyEmbedder()._weights()["token_embd.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InvalidModel, match="has an encoder of its own"):
        read_embedding_facts(tmp_path / "t5.gguf")


def test_one_that_is_served_for_chats_is_told_how_to_load_it(tmp_path: Path) -> None:
    path = TinyEmbedder().write(tmp_path / "tiny.gguf")
    with pytest.raises(UncuttableModel, match="which `mesh load --embeddings` serves"):
        read_model_facts(path)


@pytest.mark.parametrize(
    ("n_ctx_train", "ctx_size", "longest", "most_rows"),
    [
        (512, None, 512, 512),
        (256, None, 256, 512),
        (8192, None, 2048, 2048),
        (8192, 8000, 8000, 8192),
        (8192, 16, 16, 512),
    ],
)
def test_a_batch_has_room_for_the_longest_text(
    n_ctx_train: int, ctx_size: int | None, longest: int, most_rows: int, tmp_path: Path
) -> None:
    facts = read_embedding_facts(TinyEmbedder(n_ctx=n_ctx_train).write(tmp_path / "tiny.gguf"))
    limits = limits_of(facts, ctx_size)
    assert limits == BatchLimits(longest, 64)
    assert limits.most_rows == most_rows
    assert limits.shared_rows <= limits.most_rows


def test_a_text_longer_than_any_in_training_is_refused(tmp_path: Path) -> None:
    facts = read_embedding_facts(TinyEmbedder(n_ctx=512).write(tmp_path / "tiny.gguf"))
    with pytest.raises(ClusterError, match="trained for texts of at most 512 tokens") as refused:
        limits_of(facts, 513)
    assert refused.value.param == "--ctx-size"
