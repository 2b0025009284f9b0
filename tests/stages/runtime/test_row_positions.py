"""Positions of rows: of text one each, of images as their lines and columns tell."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanmesh_proto.errors import InvalidWindow
from spanmesh_proto.image_chunk import ImageChunk
from spanmesh_proto.row_ids import FIRST_ROW_ID
from stages.runtime.row_positions import TOKENS_ONLY, RowPositions

ROW = FIRST_ROW_ID + 7
# Of each part of a text: lines and columns of an image, or 0 lines for so many tokens.
layouts = st.lists(
    st.tuples(st.just(0), st.integers(0, 4)) | st.tuples(st.integers(1, 4), st.integers(1, 5)), max_size=6
)


def laid_out(
    parts: list[tuple[int, int]], *, has_columns: bool, sees_all: bool
) -> tuple[RowPositions, list[tuple[int, int, int]], list[int]]:
    """Chunks; position, y and x of each row, in the plainest way; and ids."""
    chunks, places, ids, position = [], [], [], 0
    for lines, columns in parts:
        if not lines:
            places += [(position + index,) * 3 for index in range(columns)]
            ids += [5] * columns
            position += columns
            continue
        num_rows = lines * columns
        chunks.append(ImageChunk(len(places), num_rows, columns if has_columns else 0, sees_all))
        places += [
            (position, position + y, position + x) if has_columns else (position + y * columns + x,) * 3
            for y in range(lines)
            for x in range(columns)
        ]
        ids += [ROW] * num_rows
        position += max(lines, columns) if has_columns else num_rows
    return RowPositions(tuple(chunks)), [*places, (position,) * 3], ids


@given(parts=layouts, has_columns=st.booleans())
def test_each_row_has_its_position(parts: list[tuple[int, int]], *, has_columns: bool) -> None:
    positions, places, ids = laid_out(parts, has_columns=has_columns, sees_all=False)
    for row, (position, y, x) in enumerate(places[:-1]):
        assert positions.parts(row, 1).T.tolist() == [[position, y, x, 0]]
        if ids[row] != ROW:
            assert positions.end_of(row) == position
    for chunk in positions.chunks:
        whole = positions.parts(chunk.first_row, chunk.num_rows)
        assert [tuple(place) for place in whole[:3].T.tolist()] == places[chunk.first_row : chunk.stop]
    for num_rows in range(len(places)):
        # What is computed behind the first rows, and dropped from there, is behind all of their positions.
        largest = max((max(place) for place in places[:num_rows]), default=-1)
        within = positions.within(num_rows)
        assert positions.end_of(num_rows) > largest
        assert (within is None) or (within.first_row < num_rows < within.stop)
        assert within is not None or positions.end_of(num_rows) == largest + 1


@given(one=layouts, two=layouts, common=layouts, has_columns=st.booleans())
def test_rows_before_the_first_other_image_are_alike(
    one: list[tuple[int, int]],
    two: list[tuple[int, int]],
    common: list[tuple[int, int]],
    *,
    has_columns: bool,
) -> None:
    (a, of_a, _), (b, of_b, _) = (
        laid_out([*common, *rest], has_columns=has_columns, sees_all=False) for rest in (one, two)
    )
    num_alike = a.num_alike(b)
    assert num_alike == b.num_alike(a)
    num_known = min(num_alike, len(of_a) - 1, len(of_b) - 1)
    assert of_a[:num_known] == of_b[:num_known]
    assert num_known >= min(len(laid_out(common, has_columns=has_columns, sees_all=False)[2]), num_known)
    if a.chunks == b.chunks:
        assert num_alike >= 2**31 - 1
    else:
        first = min(set(a.chunks) ^ set(b.chunks), key=lambda chunk: chunk.first_row)
        assert num_alike == first.first_row


@given(parts=layouts, sees_all=st.booleans(), data=st.data())
def test_windows_have_tokens_or_rows_of_one_chunk(
    parts: list[tuple[int, int]], *, sees_all: bool, data: st.DataObject
) -> None:
    positions, _, ids = laid_out(parts, has_columns=True, sees_all=sees_all)
    positions.check_prefix(ids)
    start = data.draw(st.integers(0, len(ids)))
    window = ids[start : start + data.draw(st.integers(1, 8))]
    stop = start + len(window)
    chunk = next((each for each in positions.chunks if each.first_row <= start < each.stop), None)
    if chunk is None:
        is_valid = ROW not in window
    elif sees_all:
        is_valid = (start, stop) == (chunk.first_row, chunk.stop)
    else:
        is_valid = stop <= chunk.stop
    if is_valid and window:
        positions.check(start, window)
    elif window:
        with pytest.raises(InvalidWindow, match="a window from"):
            positions.check(start, window)
    if window:
        flipped = [ROW if each != ROW else 5 for each in window]
        with pytest.raises(InvalidWindow, match=r"a window (from|at)"):
            positions.check(start, flipped)
        with pytest.raises(InvalidWindow, match=f"row {start} of a session is"):
            positions.check_prefix([*ids[:start], *flipped])


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([ImageChunk(0, 0)], "0 rows"),
        ([ImageChunk(0, 6, 4)], "do not fit"),
        ([ImageChunk(0, 6, 7)], "do not fit"),
        ([ImageChunk(0, 2**31)], "past the last position"),
        ([ImageChunk(4, 6), ImageChunk(9, 1)], "row 9 begins before row 10"),
        ([ImageChunk(4, 6), ImageChunk(0, 2)], "row 0 begins before row 10"),
    ],
)
def test_chunks_that_cannot_be_are_refused(chunks: list[ImageChunk], reason: str) -> None:
    with pytest.raises(InvalidWindow, match=reason):
        RowPositions(tuple(chunks))


def test_where_a_sequence_can_end() -> None:
    plain = ImageChunk(3, 6)
    for chunk, is_fixed in (
        (plain, False),
        (replace(plain, sees_all=True), True),
        (replace(plain, columns=2), True),
    ):
        positions = RowPositions((chunk,))
        assert [row for row in range(12) if positions.within(row)] == ([4, 5, 6, 7, 8] if is_fixed else [])
        assert [row for row in range(12) if positions.is_whole(row)] == (
            [3, 4, 5, 6, 7, 8] if chunk.sees_all else []
        )
    with pytest.raises(InvalidWindow, match="its session has none"):
        TOKENS_ONLY.check(0, [ROW])
    with pytest.raises(InvalidWindow, match="row 1 of a session is no token"):
        TOKENS_ONLY.check_prefix([5, ROW])
