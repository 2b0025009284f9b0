"""Vectors of texts: their length, shorter ones, and their bytes."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Final

import numpy as np

from spanmesh_proto.errors import ProtocolError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# float32, little-endian: on the wire, and in OpenAI's base64.
_WIRE: Final = np.dtype("<f4")


def normalised(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of Euclidean length 1, float32; zeros stay zeros.

    Args:
        rows: float32 (texts, width).
    """
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    scaled: NDArray[np.float32] = (rows / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)
    return scaled


def shortened(rows: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """The first numbers of each row, of length 1 again: what `dimensions` asks for.

    Models that were trained for it (Matryoshka representation learning) keep most of what they tell in these.

    Args:
        rows: float32 (texts, width).
        dimensions: Numbers of a vector, 1 to width; None for all.
    """
    if dimensions is None or dimensions == rows.shape[1]:
        return rows
    return normalised(rows[:, :dimensions])


def to_bytes(rows: NDArray[np.float32]) -> bytes:
    """One row, or several one after the other, as little-endian float32."""
    return rows.astype(_WIRE, copy=False).tobytes()


def from_bytes(data: bytes, num_texts: int, width: int) -> NDArray[np.float32]:
    """Rows of `to_bytes`, float32 (texts, width).

    Raises:
        ProtocolError: If they are not so many.
    """
    if len(data) != num_texts * width * _WIRE.itemsize:
        raise ProtocolError(
            f"{len(data)} bytes came for {num_texts} vectors of {width} numbers: install the same spanmesh "
            "on every host"
        )
    rows: NDArray[np.float32] = np.frombuffer(data, _WIRE).reshape(num_texts, width).astype(np.float32)
    return rows


def to_base64(row: NDArray[np.float32]) -> str:
    """One vector as OpenAI's `encoding_format: base64` has it."""
    return base64.b64encode(to_bytes(row)).decode("ascii")
