"""Vectors have length 1, also when they are shortened, and keep every bit on their way."""

from __future__ import annotations

import base64
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from spanmesh_proto.errors import ProtocolError
from stages.embedding.vectors import from_bytes, normalised, shortened, to_base64, to_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS = arrays(
    np.float32, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=st.floats(-1e3, 1e3, width=32)
)


@given(ROWS)
def test_each_row_has_length_one_or_is_zero(rows: NDArray[np.float32]) -> None:
    lengths = np.linalg.norm(normalised(rows).astype(np.float64), axis=1)
    for row, length in zip(rows, lengths, strict=True):
        assert length == pytest.approx(1.0 if np.linalg.norm(row.astype(np.float64)) else 0.0, abs=1e-6)


@given(ROWS, st.integers(1, 9))
def test_shorter_ones_are_the_first_numbers_in_the_same_direction(
    rows: NDArray[np.float32], dimensions: int
) -> None:
    rows = normalised(rows)
    dimensions = min(dimensions, rows.shape[1])
    short = shortened(rows, dimensions)
    assert short.shape == (len(rows), dimensions)
    for whole, row in zip(rows.astype(np.float64), short.astype(np.float64), strict=True):
        part = whole[:dimensions]
        assert row * np.linalg.norm(part) == pytest.approx(part, abs=1e-6)


def test_all_numbers_are_left_as_they_are() -> None:
    rows = normalised(np.arange(1, 7, dtype=np.float32).reshape(2, 3))
    assert shortened(rows, None) is rows
    assert shortened(rows, 3) is rows


@given(ROWS)
def test_bytes_come_back_bit_for_bit(rows: NDArray[np.float32]) -> None:
    back = from_bytes(to_bytes(rows), *rows.shape)
    assert back.dtype == np.float32
    assert back.tobytes() == rows.tobytes()


def test_other_sizes_are_refused() -> None:
    with pytest.raises(ProtocolError, match="12 bytes came for 2 vectors of 2 numbers"):
        from_bytes(bytes(12), 2, 2)


def test_base64_is_little_endian_float32() -> None:
    row = np.array([1.0, -0.5, 3.25e-3], np.float32)
    assert struct.unpack("<3f", base64.b64decode(to_base64(row))) == tuple(row.tolist())
