"""Pictures of requests: ids in prompts, rows on demand, and what is remembered of them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mesh.vision.encoder import EncodedPicture, EncoderProcess
from mesh.vision.picture_reader import PictureReader, shared_picture_pool
from mesh.vision.pictures import ModelPictures
from mesh.vision.placed_encoder import PlacedEncoder
from spanmesh_proto.errors import InvalidRequest
from spanmesh_proto.row_ids import FIRST_ROW_ID
from stages.vision.projector import ProjectorOptions
from tests.support import tiny_projectors
from tests.support.hostile_pictures import photograph, saved
from tests.support.tiny_projectors import text_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from stages.vision.chunks import PictureParts
    from stages.vision.picture import Picture
    from stages.vision.projector import ProjectorFacts

PNG = saved(photograph(90, 70), "PNG")


@dataclass
class Counting:
    """An encoder that counts what it is asked for."""

    inner: EncoderProcess
    calls: list[str] = field(default_factory=list)

    async def facts(self) -> ProjectorFacts:
        return await self.inner.facts()

    async def parts(self, width: int, height: int, *, client: str | None = None) -> PictureParts:
        self.calls.append("parts")
        return await self.inner.parts(width, height, client=client)

    async def encode(
        self, picture: Picture, parts: PictureParts, *, client: str | None = None
    ) -> EncodedPicture:
        self.calls.append("encode")
        return await self.inner.encode(picture, parts, client=client)


@dataclass
class CountingReader(PictureReader):
    """A reader that counts."""

    num_read: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    async def read(
        self, data: bytes, *, client: str | None = None, most_side: int = 0, param: str | None = None
    ) -> Picture:
        self.num_read += 1
        return await super().read(data, client=client, most_side=most_side, param=param)


@dataclass
class Parts:
    """What tests look at."""

    pictures: ModelPictures
    encoder: Counting
    reader: CountingReader


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Parts]:
    shared_picture_pool.cache_clear()
    model, path = text_model(tmp_path / "model.gguf"), tiny_projectors.idefics3(tmp_path / "mmproj.gguf")
    inner = EncoderProcess(ProjectorOptions(str(path), str(model), 1))
    encoder, reader = Counting(inner), CountingReader()
    yield Parts(ModelPictures(encoder, reader), encoder, reader)
    inner.close()
    shared_picture_pool().close()
    shared_picture_pool.cache_clear()


async def test_ids_and_rows_of_a_picture(made: Parts) -> None:
    layout = await made.pictures.layout(PNG)
    assert made.encoder.calls == ["parts"]
    for chunk in layout.chunks:
        assert min(layout.ids[chunk.first_row : chunk.stop]) >= FIRST_ROW_ID
    beside = set(range(len(layout.ids))).difference(*(range(c.first_row, c.stop) for c in layout.chunks))
    assert all(0 <= layout.ids[place] < FIRST_ROW_ID for place in beside)
    rows = [await layout.load(number) for number in range(len(layout.chunks))]
    # All slices of it at once.
    assert made.encoder.calls == ["parts", "encode"]
    assert [each.shape for each in rows] == [(chunk.num_rows, 64) for chunk in layout.chunks]
    # After a loss they are wanted once more.
    assert np.array_equal(await layout.load(1), rows[1])
    assert np.array_equal(await layout.load(2), rows[2])
    assert made.encoder.calls == ["parts", "encode", "encode"]


async def test_a_picture_that_was_shown_before_is_neither_decoded_nor_encoded(made: Parts) -> None:
    first = await made.pictures.layout(PNG)
    again = await made.pictures.layout(PNG)
    assert (again.ids, again.chunks) == (first.ids, first.chunks)
    assert (made.reader.num_read, made.encoder.calls) == (1, ["parts"])
    # Another picture of the same size is read, and its parts are known.
    other = await made.pictures.layout(saved(photograph(90, 70, seed=2), "PNG"))
    assert (made.reader.num_read, made.encoder.calls) == (2, ["parts"])
    assert other.chunks == first.chunks
    assert other.ids != first.ids
    # The same pixels in another format have the same ids: what counts is what the model sees.
    assert (await made.pictures.layout(saved(photograph(90, 70), "WEBP", lossless=True))).ids == first.ids


async def test_clients_do_not_learn_what_others_have_shown(made: Parts) -> None:
    """Not even by the time that it takes."""
    first = await made.pictures.layout(PNG, client="a")
    assert (await made.pictures.layout(PNG, client="b")).ids == first.ids
    assert made.reader.num_read == 2
    await made.pictures.layout(PNG, client="a")
    assert made.reader.num_read == 2


async def test_a_picture_that_is_scaled_down_is_another_one(made: Parts) -> None:
    whole, small = [await made.pictures.layout(PNG, most_side=side) for side in (0, 45)]
    assert whole.ids != small.ids
    rows = await small.load(0)
    assert rows.shape == (small.chunks[0].num_rows, 64)
    assert (await made.pictures.layout(PNG, most_side=200)).ids == whole.ids


async def test_chunks_are_loaded_at_once_by_one_encoding(made: Parts) -> None:
    layout = await made.pictures.layout(PNG)
    await asyncio.gather(*(layout.load(number) for number in range(len(layout.chunks))))
    assert made.encoder.calls.count("encode") == 1


async def test_what_is_remembered_is_bounded(made: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = await made.pictures.layout(PNG)
    monkeypatch.setattr("mesh.vision.pictures._MOST_REMEMBERED_IDS", 3 * len(layout.ids))
    for seed in range(1, 5):
        await made.pictures.layout(saved(photograph(90, 70, seed=seed), "PNG"))
    assert len(made.pictures._known) == 3
    assert made.pictures._num_known_ids == 3 * len(layout.ids)
    await made.pictures.layout(saved(photograph(90, 70, seed=4), "PNG"))
    assert made.reader.num_read == 5
    await made.pictures.layout(PNG)
    assert made.reader.num_read == 6


def test_the_head_has_neither_decoders_nor_libmtmd() -> None:
    """Both are in processes of their own, which are started with the first picture."""
    script = (
        "import sys, mesh.vision.encoder, mesh.vision.pictures;"
        "print({'PIL', 'llama_cpp.mtmd_cpp'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


async def test_errors_name_the_field(made: Parts) -> None:
    with pytest.raises(InvalidRequest, match="is no PNG") as caught:
        await made.pictures.layout(b"text", param="messages[0].content[1]")
    assert caught.value.param == "messages[0].content[1]"


@dataclass
class Elsewhere(Counting):
    """The same projector on another device."""

    async def facts(self) -> ProjectorFacts:
        return replace(await self.inner.facts(), identity="ab" * 32)

    async def encode(
        self, picture: Picture, parts: PictureParts, *, client: str | None = None
    ) -> EncodedPicture:
        encoded = await super().encode(picture, parts, client=client)
        return replace(encoded, identity="ab" * 32)


async def test_rows_of_an_encoder_that_has_moved_are_not_those_that_ids_name(made: Parts) -> None:
    placed = PlacedEncoder(made.encoder.inner)
    pictures = ModelPictures(placed, made.reader)
    before = await pictures.layout(PNG)
    await before.load(0)
    assert not before.is_carried()
    await placed.resume(Elsewhere(made.encoder.inner))
    after = await pictures.layout(PNG)
    assert after.chunks == before.chunks
    assert set(after.ids).isdisjoint(each for each in before.ids if each >= FIRST_ROW_ID)
    await after.load(0)
    assert not after.is_carried()
    # A stage was lost, and its rows were dropped.
    await before.load(0)
    assert before.is_carried()
    # Back on the head they are known again.
    placed.suspend()
    assert (await pictures.layout(PNG)).ids == before.ids
