"""Whole models of any kind on their way to a host: the same tensors and metadata in one file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spanmesh_proto.errors import InvalidModel
from stages.gguf import read_header
from stages.layers import LayerRange
from stages.weights.assembly import wrong_pieces
from stages.weights.disk_cache import StageStore
from stages.weights.fetch import fetch_stage
from stages.weights.virtual_stages import StageCache
from tests.mesh.cluster.test_membership import head
from tests.support.tiny_embedders import TinyEmbedder
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path

    from stages.gguf import GgufHeader, Value


def metadata_of(header: GgufHeader) -> dict[str, Value]:
    """Without what tells of parts, and the padding for shared blocks."""
    return {
        key: value
        for key, value in header.metadata.items()
        if not key.startswith("split.") and key != "spanmesh.padding"
    }


def bytes_of(header: GgufHeader) -> dict[str, bytes]:
    """Of each tensor."""
    files = [path.read_bytes() for path in header.paths]
    return {
        tensor.name: files[tensor.file][tensor.offset_bytes : tensor.offset_bytes + tensor.n_bytes]
        for tensor in header.tensors.values()
    }


@pytest.mark.parametrize("num_files", ["one", "several"])
async def test_it_arrives_whole_with_its_vocabulary(num_files: str, tmp_path: Path) -> None:
    if num_files == "one":
        path = TinyEmbedder("bert").write(tmp_path / "model.gguf")
    else:
        path = TinyModel("llama").write(tmp_path / "model.gguf", tensors_per_file=20)
    source = read_header(path)
    assert bool(source.other_paths) == (num_files == "several")
    store = StageStore(tmp_path / "host")
    async with head(tmp_path) as side:
        recipe = side.cache.describe_whole(path)
        assert recipe.layers == LayerRange(0, recipe.n_layers)
        fetched = await fetch_stage(store, recipe.sha256, side.source)
    assert wrong_pieces(recipe, fetched.path) == []
    arrived = read_header(fetched.path)
    assert arrived.other_paths == ()
    assert metadata_of(arrived) == metadata_of(source)
    assert "tokenizer.ggml.tokens" in arrived.metadata
    assert {name: tensor.type for name, tensor in arrived.tensors.items()} == {
        name: tensor.type for name, tensor in source.tensors.items()
    }
    assert bytes_of(arrived) == bytes_of(source)


def test_equal_models_have_equal_names_and_are_hashed_once(tmp_path: Path) -> None:
    path = TinyEmbedder("bert").write(tmp_path / "model.gguf")
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    cache = StageCache(tmp_path / "cache")
    first = cache.describe_whole(path)
    totals: list[tuple[int, int]] = []
    again = StageCache(tmp_path / "cache").describe_whole(path, progress=lambda *at: totals.append(at))
    assert first.sha256 == again.sha256 == cache.describe_whole(copy).sha256
    assert totals == []
    other = TinyEmbedder("bert", seed=2).write(tmp_path / "other.gguf")
    assert cache.describe_whole(other).sha256 != first.sha256


def read_all(cache: StageCache, sha256: str) -> None:
    stage = cache.open(sha256)
    assert stage is not None
    try:
        at = 0
        while data := stage.read(at, 2**20):
            at += len(data)
    finally:
        stage.close()


def test_a_model_that_was_changed_since_is_not_sent(tmp_path: Path) -> None:
    path = TinyEmbedder("bert").write(tmp_path / "model.gguf")
    cache = StageCache(tmp_path / "cache")
    sha256 = cache.describe_whole(path).sha256
    stage = cache.open(sha256)
    assert stage is not None
    stage.close()
    TinyEmbedder("bert", seed=2).write(path)
    with pytest.raises(InvalidModel, match="was changed since its layers were hashed"):
        read_all(cache, sha256)
    path.write_bytes(path.read_bytes() + bytes(32))
    with pytest.raises(InvalidModel, match="was changed since its layers were hashed"):
        cache.open(sha256)
