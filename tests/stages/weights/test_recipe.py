"""What a stage is made of: recipes as text, stages read without being written, pieces found out once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spanmesh_proto.errors import InvalidModel
from stages.certification.certify import cut_stage
from stages.files import Region
from stages.gguf import read_header
from stages.layers import LayerRange
from stages.weights.assembly import Assembly, SentPieces
from stages.weights.piece_sources import take_from_model
from stages.weights.recipe import PIECE_BYTES, Recipe, RecipeTensor
from stages.weights.virtual_stages import StageCache
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from stages.weights.virtual_stages import VirtualStage

LAYERS = LayerRange(2, 5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return TinyModel("llama", has_rope_factors=True).write(folder / "llama.gguf")


@pytest.fixture(scope="module")
def described(model: Path) -> tuple[Recipe, VirtualStage, bytes]:
    cache = StageCache(model.parent / "cache")
    recipe = cache.describe(model, LAYERS)
    stage = cache.open(recipe.sha256)
    assert stage is not None
    output = model.parent / "stage.gguf"
    cut_stage(model, LAYERS, output)
    return recipe, stage, output.read_bytes()


def test_pieces_zeros_and_header_are_the_whole_file(described: tuple[Recipe, VirtualStage, bytes]) -> None:
    recipe, _, whole = described
    parts = [(0, len(recipe.header)), *recipe.zeros()]
    parts += [(piece.at, piece.at + piece.num_bytes) for piece in recipe.pieces]
    at = 0
    for start, stop in sorted(parts):
        assert start == at
        at = stop
    assert at == recipe.size_bytes == len(whole)
    assert whole.startswith(recipe.header)
    assert all(not any(whole[start:stop]) for start, stop in recipe.zeros())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_part_of_a_stage_is_read_without_its_file(
    described: tuple[Recipe, VirtualStage, bytes], data: st.DataObject
) -> None:
    _, stage, whole = described
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole) + 100))
    read = bytearray()
    while part := stage.read(start + len(read), stop - start - len(read)):
        read += part
    assert bytes(read) == whole[start:stop]


def test_a_recipe_survives_as_text(described: tuple[Recipe, VirtualStage, bytes]) -> None:
    recipe = described[0]
    again = Recipe.from_bytes(recipe.to_bytes(), recipe.sha256)
    assert again == recipe
    assert again.sha256 == recipe.sha256
    with pytest.raises(InvalidModel, match="fetch it again"):
        Recipe.from_bytes(recipe.to_bytes() + b" ", recipe.sha256)


@pytest.mark.parametrize(
    "said",
    [
        [],
        {},
        {"version": 2},
        {"version": 1, "model": "x", "layers": [1, 0, 2], "alignment": 32, "header": "", "tensors": []},
        {"version": 1, "model": "x", "layers": [0, 1, 2], "alignment": 0, "header": "", "tensors": []},
        {"version": 1, "model": "x", "layers": [0, 1, 2], "alignment": 32, "header": "?", "tensors": []},
        {
            "version": 1,
            "model": "x",
            "layers": [0, 1, 2],
            "alignment": 32,
            "header": "",
            "tensors": [["a", 64, [0, 0, 16, 8], ["ab"]]],
        },
        {
            "version": 1,
            "model": "x",
            "layers": [0, 1, 2],
            "alignment": 32,
            "header": "",
            "tensors": [["a", 2 * PIECE_BYTES, [0, 0], ["ab"]]],
        },
    ],
)
def test_a_recipe_that_makes_no_sense(said: object) -> None:
    import hashlib  # noqa: PLC0415

    text = json.dumps(said).encode()
    with pytest.raises(InvalidModel, match="cannot be parsed"):
        Recipe.from_bytes(text, hashlib.sha256(text).hexdigest())


def test_an_assembly_that_cannot_begin_leaves_nothing_open(
    described: tuple[Recipe, VirtualStage, bytes], tmp_path: Path
) -> None:
    (tmp_path / "stage.pieces").mkdir()
    before = {path.name for path in Path("/proc/self/fd").iterdir()}
    with pytest.raises(IsADirectoryError), Assembly(described[0], tmp_path / "stage.partial"):
        pass
    assert {path.name for path in Path("/proc/self/fd").iterdir()} == before


def test_large_tensors_have_several_pieces() -> None:
    hashes = ("aa" * 32, "bb" * 32, "cc" * 32)
    tensors = (
        RecipeTensor(40),
        RecipeTensor(2 * PIECE_BYTES + 5, "blk.3.x", Region(1, 1000, 2 * PIECE_BYTES + 5), hashes),
    )
    recipe = Recipe("x", LayerRange(3, 4), 9, 32, b"h" * 64, tensors)
    assert [(piece.at, piece.num_bytes, piece.file_offset) for piece in recipe.pieces] == [
        (128, PIECE_BYTES, 1000),
        (128 + PIECE_BYTES, PIECE_BYTES, 1000 + PIECE_BYTES),
        (128 + 2 * PIECE_BYTES, 5, 1000 + 2 * PIECE_BYTES),
    ]
    assert list(recipe.zeros()) == [(64, 128), (128 + 2 * PIECE_BYTES + 5, recipe.size_bytes)]
    assert recipe.size_bytes % 32 == 0


def test_hashes_are_found_out_once(model: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def describe(layers: LayerRange) -> Recipe:
        seen.clear()
        return StageCache(tmp_path / "cache").describe(model, layers, progress=lambda *at: seen.append(at))

    recipe = describe(LAYERS)
    assert seen[-1] == (recipe.weight_bytes, recipe.weight_bytes)
    assert describe(LAYERS) == recipe
    assert seen == []
    more = describe(LayerRange(2, 6))
    # The fourth layer and the head; what is in both was known.
    assert seen[-1][1] < 0.6 * more.weight_bytes


def test_more_bytes_than_were_asked_for(described: tuple[Recipe, VirtualStage, bytes]) -> None:
    with pytest.raises(InvalidModel, match="more bytes arrived than requested"):
        SentPieces(None, []).take(b"x")  # type: ignore[arg-type]


def test_equal_layers_of_another_model_have_other_names(model: Path, tmp_path: Path) -> None:
    other = dataclasses.replace(TinyModel("llama", has_rope_factors=True), seed=4).write(
        tmp_path / "other.gguf"
    )
    cache = StageCache(tmp_path / "cache")
    assert cache.describe(model, LAYERS).sha256 != cache.describe(other, LAYERS).sha256


@given(
    start=st.integers(0, 50),
    row_bytes=st.integers(1, 20),
    gap=st.integers(0, 20),
    rows=st.integers(1, 9),
    data=st.data(),
)
def test_bytes_that_lie_apart_are_read_as_if_they_did_not(
    start: int, row_bytes: int, gap: int, rows: int, data: st.DataObject
) -> None:
    stride = row_bytes + gap
    model = bytes(number % 251 for number in range(start + rows * stride))
    gathered = b"".join(model[start + row * stride : start + row * stride + row_bytes] for row in range(rows))
    region = Region(0, start, len(gathered), row_bytes, stride)
    offset = data.draw(st.integers(0, len(gathered) - 1))
    count = data.draw(st.integers(0, len(gathered) - offset))
    read = region.read(lambda at, length: model[at : at + length], offset, count)
    assert read == gathered[offset : offset + count]


def test_a_part_of_every_row_travels_alone(tmp_path: Path) -> None:
    model = TINY_FAMILIES["gemma4-e"].write(tmp_path / "model.gguf")
    cache = StageCache(tmp_path / "cache")
    whole = read_header(model).tensors["per_layer_token_embd.weight"].n_bytes
    layers = LayerRange(0, 4)
    recipe = cache.describe(model, layers)
    parts = [piece for piece in recipe.pieces if piece.tensor == "per_layer_token_embd.weight"]
    assert not any(piece.region.is_whole for piece in parts)
    assert 0 < sum(piece.num_bytes for piece in parts) < whole
    assert Recipe.from_bytes(recipe.to_bytes(), recipe.sha256) == recipe
    stage = cache.open(recipe.sha256)
    assert stage is not None
    read = bytearray()
    while part := stage.read(len(read), 1000):
        read += part
    stage.close()
    cut_stage(model, layers, tmp_path / "stage.gguf")
    assert bytes(read) == (tmp_path / "stage.gguf").read_bytes()
    with (tmp_path / "brought.gguf").open("wb") as file:
        file.truncate(recipe.size_bytes)
    with Assembly(recipe, tmp_path / "brought.gguf") as assembly:
        assembly.resume()
        take_from_model(assembly, cache.known_files(recipe.sha256), lambda _: None)
        assert assembly.missing == []
    assert bytes(read) == (tmp_path / "brought.gguf").read_bytes()
