"""Models in several files: they are the same models, and files that do not belong together are told apart."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import gguf
import pytest

from mesh.requantize import requantise
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import InvalidModel
from stages.certification.certify import CertifyOptions, certify, cut_stage
from stages.gguf import model_name, part_paths, read_header
from stages.layers import LayerRange
from stages.slicing.model_facts import read_model_facts
from stages.weights.virtual_stages import StageCache
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path

MODEL = TinyModel("llama", has_rope_factors=True)
PER_FILE = 20


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """58 tensors in three files, written by gguf-py."""
    folder = tmp_path / "parts"
    folder.mkdir()
    first = MODEL.write(folder / "tiny.gguf", tensors_per_file=PER_FILE)
    assert first.name == "tiny-00001-of-00003.gguf"
    return sorted(folder.iterdir())


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return MODEL.write(tmp_path / "tiny.gguf")


def test_a_cut_of_parts_is_the_cut_of_the_whole(parts: list[Path], single: Path, tmp_path: Path) -> None:
    for start, stop in ((0, 2), (1, 5), (4, 6), (0, 6)):
        outputs = []
        for model in (single, parts[0]):
            output = tmp_path / f"{model.stem}-{start}-{stop}.stage"
            cut_stage(model, LayerRange(start, stop), output)
            outputs.append(output.read_bytes())
        assert outputs[0] == outputs[1]


def test_facts_of_parts_are_those_of_the_whole(parts: list[Path], single: Path) -> None:
    facts, whole = read_model_facts(parts[0]), read_model_facts(single)
    assert facts.layer_bytes == whole.layer_bytes
    assert facts.head_bytes == whole.head_bytes
    assert facts.file_bytes == sum(path.stat().st_size for path in parts)


def test_recipes_name_the_file_of_each_piece(parts: list[Path], tmp_path: Path) -> None:
    recipe = StageCache(tmp_path / "cache").describe(parts[0], LayerRange(0, 6))
    assert {piece.region.file for piece in recipe.pieces} == {0, 1, 2}
    for piece in recipe.pieces:
        reader = gguf.GGUFReader(parts[piece.region.file])
        (tensor,) = [each for each in reader.tensors if each.name == piece.tensor]
        assert (int(tensor.data_offset), int(tensor.n_bytes)) == (piece.file_offset, piece.num_bytes)


@pytest.mark.model
def test_llama_cpp_takes_parts_as_well(parts: list[Path], tmp_path: Path) -> None:
    report = certify(parts[0], [3], CertifyOptions(n_prompt=8, n_decode=2))
    assert report.is_exact
    assert Tokenizer(parts[0]).n_vocab == 320
    draft = tmp_path / "draft.gguf"
    requantise(parts[0], "Q4_0", draft)
    assert read_header(draft).paths == (draft,)


def test_names() -> None:
    from pathlib import Path  # noqa: PLC0415

    first = Path("a/big-Q4_K_M-00001-of-00002.gguf")
    assert model_name(first) == "big-Q4_K_M"
    assert model_name(Path("a/small.gguf")) == "small"
    assert part_paths(first) == (first, Path("a/big-Q4_K_M-00002-of-00002.gguf"))
    assert part_paths(Path("a/small.gguf")) == (Path("a/small.gguf"),)


def test_another_part_than_the_first(parts: list[Path]) -> None:
    with pytest.raises(InvalidModel, match=r"is part 2 of 3: name the first one, tiny-00001-of-00003\.gguf"):
        read_header(parts[1])


def test_a_part_is_missing(parts: list[Path]) -> None:
    parts[2].unlink()
    with pytest.raises(InvalidModel, match=r"00003-of-00003\.gguf is missing: it is part 3 of 3"):
        read_header(parts[0])


def test_a_first_part_that_was_renamed(parts: list[Path]) -> None:
    renamed = parts[0].rename(parts[0].with_name("model.gguf"))
    with pytest.raises(InvalidModel, match=r"is part 1 of 3: its name must end in -00001-of-00003\.gguf"):
        read_header(renamed)


def test_parts_in_each_other_s_place(parts: list[Path]) -> None:
    shutil.copyfile(parts[1], parts[2])
    with pytest.raises(InvalidModel, match=r"says that it is part 2 of 3, not part 3 of 3 as its name does"):
        read_header(parts[0])


def test_parts_of_different_models(parts: list[Path], tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir()
    TinyModel("qwen2").write(others / "tiny.gguf", tensors_per_file=27)
    other = others / "tiny-00002-of-00003.gguf"
    shutil.copyfile(other, parts[1])
    with pytest.raises(InvalidModel, match=r"the parts are of different models; fetch all parts of one"):
        read_header(parts[0])


def test_parts_that_do_not_add_up(parts: list[Path], tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir()
    shorter = MODEL.write(
        others / "tiny.gguf", tensors_per_file=PER_FILE, without=frozenset({"blk.5.ffn_down.weight"})
    )
    shutil.copyfile(shorter.with_name("tiny-00003-of-00003.gguf"), parts[2])
    with pytest.raises(InvalidModel, match=r"says that its 3 parts hold 58 tensors, they hold 57"):
        read_header(parts[0])


def test_a_truncated_part_is_named(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[1].read_bytes()[:-100])
    with pytest.raises(InvalidModel, match=r"00002-of-00003\.gguf is truncated"):
        read_header(parts[0])


def test_a_quantisation_that_nobody_knows(single: Path) -> None:
    data = bytearray(single.read_bytes())
    name = b"blk.0.ffn_down.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # its number of dimensions, and these
    data[at : at + 4] = (250).to_bytes(4, "little")
    single.write_bytes(data)
    with pytest.raises(
        InvalidModel, match=r"'blk\.0\.ffn_down\.weight' has type 250, .* take the model in another quant"
    ):
        read_header(single)
