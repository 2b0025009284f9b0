"""Codec of hidden states: float32, float16 and 8-bit blocks.

Each row is encoded by itself: its bytes do not depend on other rows, so a text does not depend on how windows
were cut or batched.

`q8` follows GGML's Q8_0, block-wise quantisation with one scale for 32 values, with two differences. All
scales of a row precede its values, so that a last block may be short. And a scale keeps float32's range in
two bytes (the upper half of its bits, as in bfloat16): some models have hidden states beyond the range of
half precision.

The code is `hidden_codec.c`, compiled at installation. Where it is missing, as in a plain copy of the
sources, arrays of numpy give the same bytes, more slowly.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import numpy as np
import structlog

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import InvalidWindow, StageFailed
from stages.compiled_extension import REMEDY, load_extension

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_EXTENSION: Final = "stages._hidden_codec"
BLOCK_WIDTH: Final = 32
_SCALE_BYTES: Final = 2
_MOST_STEPS: Final = 127
_LARGEST_F16: Final = np.float32(65504)

log = structlog.get_logger()


class HiddenType(StrEnum):
    """Formats of hidden states on the wire, the most exact first."""

    F32 = "f32"
    """As computed."""
    F16 = "f16"
    """Rounded to half precision; what is beyond its range becomes its largest number, 65504."""
    Q8 = "q8"
    """In blocks of 32 values, each a multiple, -127 to 127, of the block's scale."""

    def row_bytes(self, n_embd: int) -> int:
        """Size of a row of `n_embd` values."""
        match self:
            case HiddenType.F32:
                return 4 * n_embd
            case HiddenType.F16:
                return 2 * n_embd
            case HiddenType.Q8:
                return _num_blocks(n_embd) * _SCALE_BYTES + n_embd


TO_WIRE: Final[Mapping[HiddenType, wire.HiddenType]] = {
    hidden_type: getattr(wire, f"HIDDEN_TYPE_{hidden_type.name}") for hidden_type in HiddenType
}
FROM_WIRE: Final = {number: hidden_type for hidden_type, number in TO_WIRE.items()}


@dataclass
class EncodedHidden:
    """Encoded rows of a bundle, decoded once by the computing thread: decoding many takes milliseconds."""

    data: bytes
    """Whole rows."""
    hidden_type: HiddenType
    """Their format."""
    n_embd: int
    """Values of a row."""

    @classmethod
    def of_bundle(cls, bundle: wire.WindowBundle, n_embd: int) -> EncodedHidden:
        """Rows of all windows of a bundle, for a stage other than the first.

        Raises:
            InvalidWindow: If the format is unknown, or the size is not that of the windows' rows.
        """
        hidden_type = FROM_WIRE.get(bundle.hidden_type)
        if hidden_type is None:
            raise InvalidWindow(
                f"hidden states of type {bundle.hidden_type} are not known here; known are "
                f"{', '.join(HiddenType)}: install the same spanmesh on every host"
            )
        num_rows = sum(len(window.tokens) for window in bundle.windows)
        expected_bytes = num_rows * hidden_type.row_bytes(n_embd)
        if len(bundle.hidden) != expected_bytes:
            raise InvalidWindow(
                f"{num_rows} rows need {expected_bytes} bytes of hidden states as {hidden_type}, "
                f"{len(bundle.hidden)} arrived"
            )
        return cls(bundle.hidden, hidden_type, n_embd)

    @functools.cached_property
    def decoded(self) -> NDArray[np.float32]:
        """The rows, float32 (rows, n_embd), read-only."""
        return decode(self.data, self.hidden_type, self.n_embd)


def encode(hidden: NDArray[np.float32], hidden_type: HiddenType) -> bytes:
    """Rows as bytes, little-endian, row after row.

    Args:
        hidden: float32 (rows, n_embd).
        hidden_type: The format.

    Returns:
        `row_bytes` bytes for each row.

    Raises:
        StageFailed: If a value is infinite or NaN, which only `f32` can represent.
    """
    match hidden_type:
        case HiddenType.F32:
            return np.ascontiguousarray(hidden, dtype="<f4").tobytes()
        case HiddenType.F16 | HiddenType.Q8:
            compiled = _compiled()
            if compiled is None:
                return encode_by_arrays(hidden, hidden_type)
            rows, n_embd = hidden.shape
            values = hidden.astype(np.float32, copy=False).tobytes()
            encoded = ctypes.create_string_buffer(rows * hidden_type.row_bytes(n_embd))
            if hidden_type is HiddenType.F16:
                is_finite = compiled.hidden_codec_encode_f16(values, hidden.size, encoded)
            else:
                is_finite = compiled.hidden_codec_encode_q8(values, rows, n_embd, encoded)
            if not is_finite:
                _require_finite(hidden, hidden_type)
            return encoded.raw


def encode_by_arrays(hidden: NDArray[np.float32], hidden_type: HiddenType) -> bytes:
    """As `encode`, without compiled code."""
    match hidden_type:
        case HiddenType.F32:
            return encode(hidden, hidden_type)
        case HiddenType.F16:
            _require_finite(hidden, hidden_type)
            return np.clip(hidden, -_LARGEST_F16, _LARGEST_F16).astype("<f2").tobytes()
        case HiddenType.Q8:
            _require_finite(hidden, hidden_type)
            return _quantised(hidden)


def decode(data: bytes, hidden_type: HiddenType, n_embd: int) -> NDArray[np.float32]:
    """Rows from bytes, as exact as the format.

    Args:
        data: Result of `encode`: whole rows.
        hidden_type: Their format.
        n_embd: Values of a row.

    Returns:
        float32 (rows, n_embd), read-only.
    """
    match hidden_type:
        case HiddenType.F32:
            return np.frombuffer(data, "<f4").reshape(-1, n_embd)
        case HiddenType.F16:
            return _read_only(np.frombuffer(data, "<f2").astype(np.float32).reshape(-1, n_embd))
        case HiddenType.Q8:
            compiled = _compiled()
            if compiled is None:
                return _read_only(_dequantised(data, n_embd))
            rows = len(data) // hidden_type.row_bytes(n_embd)
            values = np.empty((rows, n_embd), np.float32)
            compiled.hidden_codec_decode_q8(data, rows, n_embd, values.ctypes.data)
            return _read_only(values)


def _read_only(values: NDArray[np.float32]) -> NDArray[np.float32]:
    values.flags.writeable = False
    return values


@functools.cache
def _compiled() -> ctypes.CDLL | None:
    try:
        library = load_extension(_EXTENSION)
        read, written, size = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t
        library.hidden_codec_encode_f16.argtypes = (read, size, written)
        library.hidden_codec_encode_q8.argtypes = (read, size, size, written)
        library.hidden_codec_decode_q8.argtypes = (read, size, size, written)
        library.hidden_codec_decode_q8.restype = None
    except (ImportError, AttributeError) as error:
        log.warning("slow_codec", reason=str(error), remedy=REMEDY)
        return None
    return library


def _quantised(hidden: NDArray[np.float32]) -> bytes:
    rows, n_embd = hidden.shape
    num_blocks = _num_blocks(n_embd)
    scale_bits = _rounded_up(_largest_of_blocks(hidden) / np.float32(_MOST_STEPS))
    scales = _scales(scale_bits)
    # A block of zeros, or of values too small for a scale, has the scale 0.
    divisors = _per_value(np.where(scales == 0, np.float32(np.inf), scales), n_embd)
    encoded = np.empty((rows, num_blocks * _SCALE_BYTES + n_embd), np.uint8)
    encoded[:, : num_blocks * _SCALE_BYTES] = scale_bits.view(np.uint8)
    encoded[:, num_blocks * _SCALE_BYTES :] = np.rint(hidden / divisors).astype(np.int8).view(np.uint8)
    return encoded.tobytes()


def _dequantised(data: bytes, n_embd: int) -> NDArray[np.float32]:
    scales_bytes = _num_blocks(n_embd) * _SCALE_BYTES
    encoded = np.frombuffer(data, np.uint8).reshape(-1, scales_bytes + n_embd)
    scales = _scales(np.ascontiguousarray(encoded[:, :scales_bytes]).view("<u2"))
    steps = encoded[:, scales_bytes:].view(np.int8)
    return _per_value(scales, n_embd) * steps


def _largest_of_blocks(hidden: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 (rows, blocks): the largest absolute value of each."""
    rows, n_embd = hidden.shape
    padded = np.zeros((rows, _num_blocks(n_embd) * BLOCK_WIDTH), np.float32)
    np.abs(hidden, out=padded[:, :n_embd])
    largest: NDArray[np.float32] = padded.reshape(rows, -1, BLOCK_WIDTH).max(axis=-1)
    return largest


def _rounded_up(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper half of each float32, which is at least 0; up, so that no value needs more than 127 steps."""
    return ((values.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)).astype("<u2")


def _scales(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _per_value(per_block: NDArray[np.float32], n_embd: int) -> NDArray[np.float32]:
    return np.repeat(per_block, BLOCK_WIDTH, axis=-1)[:, :n_embd]


def _num_blocks(n_embd: int) -> int:
    return -(-n_embd // BLOCK_WIDTH)


def _require_finite(hidden: NDArray[np.float32], hidden_type: HiddenType) -> None:
    is_finite = np.isfinite(hidden)
    if is_finite.all():
        return
    row, column = np.argwhere(~is_finite)[0]
    raise StageFailed(
        f"value {column} of row {row} of the hidden states is {hidden[row, column]}: {hidden_type} carries "
        "finite numbers only; check the model file, or use --wire f32"
    )
