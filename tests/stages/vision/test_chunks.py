"""Ids of a picture's rows, and their form for JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from spanmesh_proto.image_chunk import ImageChunk
from spanmesh_proto.row_ids import FIRST_ROW_ID
from stages.vision.chunks import PictureParts, encoder_identity, ids_of
from stages.vision.picture import Picture

PICTURE = Picture(3, 2, bytes(range(18)))
IDENTITY = encoder_identity(b"p" * 32, b"l" * 32, "most_tokens=1024")
PARTS = PictureParts(((7, 8), ImageChunk(2, 9, 3), (9,), ImageChunk(12, 4, sees_all=True), ImageChunk(16, 4)))


def rows_of(ids: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [ids[chunk.first_row : chunk.stop] for chunk in PARTS.chunks]


def test_ids_of_rows_are_beside_those_of_tokens_and_above_them() -> None:
    ids = ids_of(IDENTITY, PICTURE, PARTS)
    assert (ids[:2], ids[11], len(ids)) == ((7, 8), 9, 20)
    rows = rows_of(ids)
    assert [len(chunk) for chunk in rows] == [9, 4, 4]
    assert all(FIRST_ROW_ID <= each < 2**32 for chunk in rows for each in chunk)
    assert PARTS.tokens == (7, 8, 9)
    assert PARTS.num_rows == 17


def test_ids_are_the_same_forever() -> None:
    """Blocks on disk are named by them: other ids need another version."""
    assert ids_of(IDENTITY, PICTURE, PARTS)[2:5] == (3391894240, 2722621963, 3170530661)


@pytest.mark.parametrize(
    ("identity", "picture"),
    [
        (IDENTITY, Picture(2, 3, PICTURE.rgb)),
        (IDENTITY, Picture(3, 2, b"\1" + PICTURE.rgb[1:])),
        (encoder_identity(b"q" * 32, b"l" * 32, "most_tokens=1024"), PICTURE),
        (encoder_identity(b"p" * 32, b"m" * 32, "most_tokens=1024"), PICTURE),
        (encoder_identity(b"p" * 32, b"l" * 32, "most_tokens=1025"), PICTURE),
    ],
    ids=["another shape", "another pixel", "another projector", "another library", "another setting"],
)
def test_ids_tell_rows_apart(identity: bytes, picture: Picture) -> None:
    plain, other = ids_of(IDENTITY, PICTURE, PARTS), ids_of(identity, picture, PARTS)
    assert not set(other[2:11]) & set(plain[2:11])


def test_chunks_of_one_picture_have_other_ids_each() -> None:
    """Slices of one colour would be equal; but their rows are not compared."""
    first, second, third = map(set, rows_of(ids_of(IDENTITY, PICTURE, PARTS)))
    assert len(first | second | third) == 17


def test_parts_come_back_from_json() -> None:
    assert PictureParts.of(json.loads(json.dumps(PARTS.told()))) == PARTS
    assert replace(PARTS, parts=PARTS.parts[1:]) != PARTS
