"""A projector at work: parts of pictures by their sizes, rows by their pixels, and what is refused."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import ClusterError, InvalidModel, InvalidRequest
from spanmesh_proto.image_chunk import ImageChunk
from stages.runtime.llama_libraries import library_folder
from stages.vision.picture import Picture
from stages.vision.projector import MOST_ROWS, Projector, ProjectorOptions, _chunk_of
from tests.support import tiny_projectors
from tests.support.tiny_projectors import N_EMBD, ColourWords, embeddings_of, text_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

KINDS = {"llava": "llama", "idefics3": "llama", "gemma3": "gemma3", "qwen2vl": "qwen2vl"}
SIZES = [(56, 56), (300, 200), (1, 100), (1600, 16), (640, 480)]


@pytest.fixture(scope="module")
def options_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ProjectorOptions]:
    folder = tmp_path_factory.mktemp("projectors")

    def options(kind: str) -> ProjectorOptions:
        model, path = folder / f"{KINDS[kind]}.gguf", folder / f"mmproj-{kind}.gguf"
        if not model.exists():
            text_model(model, KINDS[kind])
        if not path.exists():
            getattr(tiny_projectors, kind)(path)
        return ProjectorOptions(str(path), str(model), num_threads=1)

    return options


@pytest.fixture(scope="module")
def projector(options_of: Callable[[str], ProjectorOptions]) -> Iterator[Callable[[str], Projector]]:
    loaded: dict[str, Projector] = {}

    def get(kind: str) -> Projector:
        if kind not in loaded:
            loaded[kind] = Projector(options_of(kind))
        return loaded[kind]

    yield get
    for each in loaded.values():
        each.close()


def noise(width: int, height: int, seed: int = 1) -> Picture:
    return Picture(width, height, np.random.default_rng(seed).bytes(width * height * 3))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_as_many_as_the_size_alone_says(projector: Callable[[str], Projector], kind: str) -> None:
    for width, height in SIZES:
        parts = projector(kind).parts(width, height)
        rows = projector(kind).encode(noise(width, height))
        assert [each.shape for each in rows] == [(chunk.num_rows, N_EMBD) for chunk in parts.chunks]
        assert {each.dtype for each in rows} == {np.dtype(np.float32)}
        place = 0
        for part in parts.parts:
            if isinstance(part, ImageChunk):
                assert part.first_row == place
                place = part.stop
            else:
                place += len(part)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_any_size_has_as_many_rows_as_it_says(projector: Callable[[str], Projector], kind: str) -> None:
    chance = random.Random(56)
    for _ in range(200):
        width = chance.choice((1, 2, 13, 14, 27, 28, 29, chance.randrange(1, 2000)))
        height = chance.randrange(-(-width // 100), min(2000, 100 * width))
        parts = projector(kind).parts(width, height)
        rows = projector(kind).encode(noise(width, height))
        assert [len(each) for each in rows] == [chunk.num_rows for chunk in parts.chunks]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_pixels_make_equal_rows_whatever_the_threads(
    options_of: Callable[[str], ProjectorOptions], projector: Callable[[str], Projector], kind: str
) -> None:
    other = Projector(replace(options_of(kind), num_threads=2))
    try:
        assert other.facts == projector(kind).facts
        once, again, changed = (each.encode(noise(90, 70, seed)) for each, seed in (
            (projector(kind), 1), (other, 1), (other, 2)
        ))  # fmt: skip
    finally:
        other.close()
    assert all(map(np.array_equal, once, again))
    assert not any(map(np.array_equal, once, changed))


def test_rows_of_a_grid(projector: Callable[[str], Projector]) -> None:
    found = projector("qwen2vl")
    assert found.parts(300, 200).chunks == (ImageChunk(1, 77, 11),)
    # Three times as high as wide.
    assert found.parts(56, 168).chunks == (ImageChunk(1, 12, 2),)


def test_rows_that_see_each_other(projector: Callable[[str], Projector]) -> None:
    assert projector("gemma3").parts(90, 70).chunks == (ImageChunk(1, 16, sees_all=True),)
    assert not projector("llava").parts(90, 70).chunks[0].sees_all
    # What stages need room for, at once.
    assert {kind: projector(kind).facts.most_at_once for kind in KINDS} == {
        "llava": 0,
        "idefics3": 0,
        "gemma3": 16,
        "qwen2vl": 0,
    }


def test_no_chunk_is_larger_than_what_stages_have_room_for(tmp_path: Path) -> None:
    """Of a projector that takes any size, and whose rows all see each other."""
    path, model = tiny_projectors.gemma4(tmp_path / "mmproj.gguf"), text_model(tmp_path / "model.gguf")
    found = Projector(ProjectorOptions(str(path), str(model), num_threads=1, most_tokens=200))
    try:
        most = found.facts.most_at_once
        assert most == 200
        sizes = [(width, height) for width in range(16, 3000, 211) for height in range(16, 3000, 97)]
        rows = [found.parts(*size).num_rows for size in sizes if max(size) <= 100 * min(size)]
        assert 190 < max(rows) <= most
    finally:
        found.close()


def test_slices_have_tokens_between_them(projector: Callable[[str], Projector]) -> None:
    parts = projector("idefics3").parts(300, 200)
    assert len(parts.chunks) == 13
    assert len(parts.tokens) > 13
    assert min(parts.tokens) >= 0


def test_a_large_picture_is_scaled_down_to_the_most_rows(
    options_of: Callable[[str], ProjectorOptions], projector: Callable[[str], Projector]
) -> None:
    assert projector("qwen2vl").parts(4000, 4000).num_rows == 1024
    small = Projector(replace(options_of("qwen2vl"), most_tokens=64))
    try:
        assert small.parts(4000, 4000).num_rows == 64
        # Its rows are others.
        assert small.facts.identity != projector("qwen2vl").facts.identity
    finally:
        small.close()


def test_too_many_rows_are_refused_before_any_is_computed(
    options_of: Callable[[str], ProjectorOptions],
) -> None:
    large = Projector(replace(options_of("qwen2vl"), most_tokens=10_000))
    try:
        with pytest.raises(InvalidRequest, match=f"becomes 10000 rows, {MOST_ROWS} are the most: scale it"):
            large.encode(Picture(4000, 4000, bytes(4000 * 4000 * 3)))
        assert large.parts(560, 560).num_rows == 400
    finally:
        large.close()


def test_the_identity_is_that_of_the_file_s_content(
    options_of: Callable[[str], ProjectorOptions], projector: Callable[[str], Projector], tmp_path: Path
) -> None:
    same, other = tmp_path / "same.gguf", tmp_path / "other.gguf"
    options = options_of("llava")
    tiny_projectors.llava(same)
    tiny_projectors.llava(other, **{"general.name": "another"})
    identities = []
    for path in (same, other):
        found = Projector(replace(options, path=str(path)))
        identities.append(found.facts.identity)
        found.close()
    assert identities[0] == projector("llava").facts.identity != identities[1]


def test_the_identity_names_the_build_of_kernels_that_computes(
    options_of: Callable[[str], ProjectorOptions], projector: Callable[[str], Projector], tmp_path: Path
) -> None:
    """libmtmd is compiled by itself, so that it is the same beside other kernels."""
    options = options_of("llava")
    same, folder = library_folder(), tmp_path / "lib"
    assert same is not None
    shutil.copytree(same, folder)
    for path in folder.glob("*ggml-cpu*"):
        path.write_bytes(path.read_bytes() + b"\0")
    program = (
        "import sys; from stages.vision.projector import Projector, ProjectorOptions;"
        "print(Projector(ProjectorOptions(*sys.argv[1:], num_threads=1)).facts.identity)"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", program, options.path, options.model],
            env=os.environ | {"LLAMA_CPP_LIB_PATH": str(each)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
        for each in (same, folder)
    ]
    assert found[0] == projector("llava").facts.identity != found[1]


def test_a_projector_of_another_model_is_refused(
    options_of: Callable[[str], ProjectorOptions], smollm2_path: Path
) -> None:
    options = replace(options_of("llava"), model=str(smollm2_path))
    with pytest.raises(InvalidModel, match=r"is no projector of .*= 576\).*= 64\); take the mmproj file"):
        Projector(options)


def test_a_vocabulary_without_the_tokens_is_refused(
    options_of: Callable[[str], ProjectorOptions], tmp_path: Path
) -> None:
    model = text_model(tmp_path / "model.gguf", controls=())
    with pytest.raises(InvalidModel, match="vocabulary lacks a token that a projector of kind idefics3 puts"):
        Projector(replace(options_of("idefics3"), model=str(model)))


def test_a_file_that_ends_too_soon_is_refused(
    options_of: Callable[[str], ProjectorOptions], tmp_path: Path
) -> None:
    options = options_of("llava")
    whole = tiny_projectors.llava(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidModel, match=r"cut\.gguf"):
        Projector(replace(options, path=str(cut)))


def test_a_device_that_is_not_there_is_named(options_of: Callable[[str], ProjectorOptions]) -> None:
    with pytest.raises(ClusterError, match="CUDA7 is no GPU that llama"):
        Projector(replace(options_of("llava"), device="CUDA7"))


def test_a_file_that_changes_while_it_is_loaded_is_refused(
    options_of: Callable[[str], ProjectorOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_projectors.llava(tmp_path / "mmproj.gguf")
    load = Projector._load

    def changed(self: Projector, options: ProjectorOptions) -> object:
        context = load(self, options)
        tiny_projectors.llava(path, **{"general.name": "another"})
        return context

    monkeypatch.setattr(Projector, "_load", changed)
    with pytest.raises(InvalidModel, match=r"mmproj\.gguf or its model was changed while it was loaded"):
        Projector(replace(options_of("llava"), path=str(path)))


def test_colours_become_the_embeddings_of_their_words(smollm2_path: Path, tmp_path: Path) -> None:
    """The projector that the tests of answers have: each row is a token's embedding, bit for bit."""
    words = list(ColourWords.WORDS)
    tokenizer = Tokenizer(smollm2_path)
    tokens = [tokenizer.encode(word, add_special=False, parse_special=False)[0] for word in words]
    embeddings = embeddings_of(smollm2_path, tokens)
    path = ColourWords.write(tmp_path / "mmproj.gguf", embeddings)
    found = Projector(ProjectorOptions(str(path), str(smollm2_path), num_threads=1))
    try:
        pixels = ColourWords.picture([*words, *words])
        (rows,) = found.encode(Picture(pixels.shape[1], pixels.shape[0], pixels.tobytes()))
    finally:
        found.close()
    assert np.array_equal(rows, np.concatenate([embeddings, embeddings]))


def grid(rows: int, columns: int) -> NDArray[np.int64]:
    return np.array([(0, number // columns, number % columns) for number in range(rows * columns)])


def columns_of(places: NDArray[np.int64], num_positions: int) -> int | None:
    chunk = _chunk_of(0, places, num_positions, sees_all=False)
    return None if chunk is None else chunk.columns


def test_places_of_rows_are_one_after_the_other_or_in_a_grid() -> None:
    after = np.arange(6)[:, None] * np.ones(3, np.int64)
    assert columns_of(after, 6) == 0
    assert columns_of(grid(2, 3), 3) == 3
    assert columns_of(grid(3, 2), 3) == 2
    assert columns_of(np.zeros((1, 3), np.int64), 1) == 0
    # Other numbers of positions, a grid with a hole, one that begins elsewhere, time that goes on.
    assert columns_of(after, 5) is None
    assert columns_of(grid(2, 3), 2) is None
    assert columns_of(grid(2, 3)[:5], 3) is None
    assert columns_of(grid(2, 3) + np.array([0, 1, 0]), 3) is None
    assert columns_of(grid(2, 3) + np.arange(6)[:, None] * np.array([1, 0, 0]), 3) is None
