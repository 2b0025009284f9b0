"""The process of a projector: what it answers, what ends it, and what others notice of that."""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from mesh.vision.encoder import EncodedPicture, EncoderProcess
from spanmesh_proto.errors import InvalidModel, InvalidRequest
from stages.vision.picture import Picture
from stages.vision.projector import Projector, ProjectorOptions
from tests.support import tiny_projectors
from tests.support.tiny_projectors import text_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

SMALL = Picture(90, 70, bytes(range(210)) * 90)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("projectors")
    text_model(folder / "llama.gguf")
    text_model(folder / "qwen2vl.gguf", "qwen2vl")
    tiny_projectors.idefics3(folder / "idefics3.gguf")
    tiny_projectors.qwen2vl(folder / "mmproj-qwen2vl.gguf")
    return folder


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Iterator[EncoderProcess]:
    """Of slices."""
    found = EncoderProcess(ProjectorOptions(str(folder / "idefics3.gguf"), str(folder / "llama.gguf"), 1))
    yield found
    found.close()


@pytest.fixture
async def grids(folder: Path) -> AsyncIterator[EncoderProcess]:
    """Of pictures of any size, without a bound worth the name: 4096 rows take seconds."""
    options = ProjectorOptions(
        str(folder / "mmproj-qwen2vl.gguf"), str(folder / "qwen2vl.gguf"), 1, most_tokens=4096
    )
    found = EncoderProcess(options)
    await found.facts()
    yield found
    found.close()


def process_of(encoder: EncoderProcess) -> psutil.Process:
    (worker,) = encoder._pool._workers
    assert worker._process is not None
    return psutil.Process(worker._process.pid)


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.005)


async def test_it_answers_as_the_projector_does(encoder: EncoderProcess) -> None:
    direct = Projector(encoder.options)
    try:
        assert await encoder.facts() == direct.facts
        parts = await encoder.parts(90, 70)
        assert parts == direct.parts(90, 70)
        rows = (await encoder.encode(SMALL, parts)).chunks
        assert all(map(np.array_equal, rows, direct.encode(SMALL)))
        assert len(rows) == len(parts.chunks) > 1
        assert all(each.base is None for each in rows)
    finally:
        direct.close()


async def test_a_picture_that_ends_the_process_ends_no_other(folder: Path) -> None:
    """More patches side by side than the projector has positions for: an assertion of ggml."""
    path = tiny_projectors.gemma4(folder / "gemma4.gguf")
    encoder = EncoderProcess(ProjectorOptions(str(path), str(folder / "llama.gguf"), 1))
    try:
        strip, strip_parts = Picture(16, 1600, bytes(16 * 1600 * 3)), await encoder.parts(16, 1600)
        parts = await encoder.parts(90, 70)
        before = (await encoder.encode(SMALL, parts)).chunks
        pid = process_of(encoder).pid
        hostile, *others = await asyncio.gather(
            encoder.encode(strip, strip_parts, client="a"),
            encoder.encode(SMALL, parts, client="b"),
            encoder.encode(SMALL, parts, client="a"),
            return_exceptions=True,
        )
        assert isinstance(hostile, InvalidRequest)
        assert re.search(r"16 × 1600 pixels ended its process \(SIGABRT\) when its rows", hostile.message)
        for encoded in others:
            assert isinstance(encoded, EncodedPicture)
            assert np.array_equal(encoded.chunks[0], before[0])
        assert process_of(encoder).pid != pid
    finally:
        encoder.close()


async def test_a_process_that_is_killed_costs_no_request(encoder: EncoderProcess) -> None:
    parts = await encoder.parts(90, 70)
    before = (await encoder.encode(SMALL, parts)).chunks
    process = process_of(encoder)
    process.suspend()
    running = asyncio.create_task(encoder.encode(SMALL, parts))
    await until(lambda: bool(encoder._pool._num_running[None]))
    process.kill()
    assert all(map(np.array_equal, (await running).chunks, before))
    # And between requests.
    process_of(encoder).kill()
    assert all(map(np.array_equal, (await encoder.encode(SMALL, parts)).chunks, before))


async def test_a_client_that_leaves_costs_others_no_process(grids: EncoderProcess) -> None:
    large = Picture(1400, 1400, bytes(1400 * 1400 * 3))
    parts = await grids.parts(1400, 1400)
    assert parts.num_rows == 2500
    pid = process_of(grids).pid
    left = asyncio.create_task(grids.encode(large, parts, client="a"))
    await until(lambda: bool(grids._pool._num_running["a"]))
    left.cancel()
    small = Picture(56, 56, bytes(56 * 56 * 3))
    assert len((await grids.encode(small, await grids.parts(56, 56), client="b")).chunks) == 1
    assert process_of(grids).pid == pid


async def test_a_picture_that_takes_too_long_is_an_error(folder: Path) -> None:
    options = ProjectorOptions(
        str(folder / "mmproj-qwen2vl.gguf"), str(folder / "qwen2vl.gguf"), 1, most_tokens=4096
    )
    slow = EncoderProcess(options, wall_limit_s=30)
    try:
        parts = await slow.parts(1760, 1760)
        slow._pool._workers[0]._wall_limit_s = 0.05
        with pytest.raises(InvalidRequest, match=r"1760 × 1760 pixels took longer than .* when its"):
            await slow.encode(Picture(1760, 1760, bytes(1760 * 1760 * 3)), parts)
    finally:
        slow.close()


async def test_what_is_no_projector_of_the_model_is_refused_at_the_start(folder: Path) -> None:
    wrong = EncoderProcess(ProjectorOptions(str(folder / "llama.gguf"), str(folder / "llama.gguf"), 1))
    try:
        with pytest.raises(InvalidModel, match=r"llama\.gguf is a model \(llama\) and no projector"):
            await wrong.facts()
    finally:
        wrong.close()


async def test_a_projector_that_ends_the_process_at_the_start_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    """Its width is no multiple of its heads: an assertion of ggml."""
    path = tiny_projectors.llava(tmp_path / "mmproj.gguf", **{"clip.vision.attention.head_count": 7})
    broken = EncoderProcess(ProjectorOptions(str(path), str(folder / "llama.gguf"), 1))
    try:
        with pytest.raises(InvalidModel, match=r"mmproj\.gguf ended its process \(SIGABRT\) when it"):
            await broken.facts()
    finally:
        broken.close()


async def test_another_file_of_the_same_name_makes_no_rows(folder: Path, tmp_path: Path) -> None:
    """Ids of its rows would be those of the former file's."""
    path = tiny_projectors.llava(tmp_path / "mmproj.gguf")
    encoder = EncoderProcess(ProjectorOptions(str(path), str(folder / "llama.gguf"), 1))
    try:
        parts = await encoder.parts(90, 70)
        await encoder.encode(SMALL, parts)
        tiny_projectors.llava(path, **{"general.name": "another"})
        process_of(encoder).kill()
        with pytest.raises(InvalidModel, match="another one than it was: load the model anew"):
            await encoder.encode(SMALL, parts)
    finally:
        encoder.close()


async def test_a_picture_of_too_many_rows_is_an_error_and_the_process_stays(folder: Path) -> None:
    options = ProjectorOptions(
        str(folder / "mmproj-qwen2vl.gguf"), str(folder / "qwen2vl.gguf"), 1, most_tokens=10_000
    )
    encoder = EncoderProcess(options)
    try:
        await encoder.facts()
        pid = process_of(encoder).pid
        with pytest.raises(InvalidRequest, match="becomes 10000 rows, 4096 are the most"):
            await encoder.parts(4000, 4000)
        assert process_of(encoder).pid == pid
    finally:
        encoder.close()


async def test_its_memory_does_not_grow_with_pictures(grids: EncoderProcess) -> None:
    picture, parts = Picture(560, 560, bytes(560 * 560 * 3)), await grids.parts(560, 560)
    sizes = []
    for _ in range(6):
        await grids.encode(picture, parts)
        sizes.append(process_of(grids).memory_info().rss)
    assert sizes[-1] < sizes[1] + 16 * 2**20
