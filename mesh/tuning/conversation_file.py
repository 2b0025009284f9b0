"""One recorded conversation: its tokens, and the features that a drafter reads.

The layout is that of safetensors (https://huggingface.co/docs/safetensors): 8 bytes with the length of a
JSON header, the header, the values of all tensors. `token_ids` are I32 [T]; `features` are F16
[R, layers, n_embd], of the positions from `start` on.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, NoReturn, TypeGuard, cast, get_args

import numpy as np

from spanmesh_proto.errors import ModelError
from stages.files import whole_file

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

Api = Literal["chat", "raw"]

SUFFIX: Final = ".feat"
_TOKENS: Final = "token_ids"
_FEATURES: Final = "features"
_METADATA: Final = "__metadata__"
_LENGTH: Final = struct.Struct("<Q")
# Metadata are a few names and numbers; a prompt's id is bounded where it is chosen.
_MOST_HEADER_BYTES: Final = 64 * 1024
_DTYPES: Final = {_TOKENS: ("I32", 4, 1), _FEATURES: ("F16", 2, 3)}


@dataclass(frozen=True)
class ConversationInfo:
    """What is known of a conversation besides tokens and features."""

    start: int
    """Position of the first row of features."""
    answer_start: int
    """Position of the answer's first token."""
    api: Api
    """Whether a chat template wrote the prompt."""
    temperature: float
    """Temperature at which the answer was drawn."""
    prompt_id: str
    """Name of the prompt: conversations with the same one are held out together."""
    key_digest: str
    """Digest of the API key, in hex; empty where there is none."""
    time_s: float
    """Seconds since 1970 when the answer ended."""


@dataclass(frozen=True, eq=False)
class Conversation:
    """A recorded conversation."""

    info: ConversationInfo
    token_ids: NDArray[np.int32]
    """[T]."""
    features: NDArray[np.float16]
    """[R, layers, n_embd]; row i is of position `info.start + i`, and R is at most T - `info.start`."""

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.token_ids) - self.info.answer_start


@dataclass(frozen=True)
class FeatureShape:
    """Sizes that all conversations of a recording share."""

    num_layers: int
    n_embd: int
    n_vocab: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of features."""
        return 2 * self.num_layers * self.n_embd


@dataclass(frozen=True)
class _Tensor:
    shape: tuple[int, ...]
    begin: int
    end: int


class _Reader:
    """Reader of one file, which checks each length before anything of that length is read."""

    def __init__(self, path: Path, file: BinaryIO, shape: FeatureShape) -> None:
        self._path = path
        self._file = file
        self._shape = shape
        self.file_bytes = os.fstat(file.fileno()).st_size

    def refuse(self, reason: str) -> NoReturn:
        raise ModelError(f"{self._path} is no recorded conversation: {reason}; remove it")

    def read(self, *, with_features: bool) -> Conversation:
        header, data_start = self._header()
        info = self._info(header)
        tensors = {name: self._tensor(header, name) for name in _DTYPES}
        self._require_tiles(tensors, self.file_bytes - data_start)
        num_tokens, (num_rows, *row) = tensors[_TOKENS].shape[0], tensors[_FEATURES].shape
        if row != [self._shape.num_layers, self._shape.n_embd]:
            wanted = f"{self._shape.num_layers} layers of {self._shape.n_embd} values"
            self.refuse(f"its rows have {row[0]} layers of {row[1]} values, the recording's {wanted}")
        if not 0 <= info.start < info.start + num_rows <= num_tokens:
            self.refuse(f"{num_rows} rows from position {info.start} on do not fit {num_tokens} tokens")
        if not 0 < info.answer_start < num_tokens:
            self.refuse(f"its answer begins at {info.answer_start} of {num_tokens} tokens")
        token_ids = self._values(tensors[_TOKENS], data_start, np.dtype("<i4"))
        if token_ids.min() < 0 or token_ids.max() >= self._shape.n_vocab:
            self.refuse(f"a token is not among the {self._shape.n_vocab} of the model")
        features = np.zeros((0, *row), np.float16)
        if with_features:
            features = self._values(tensors[_FEATURES], data_start, np.dtype("<f2"))
            if not np.isfinite(features).all():
                self.refuse("its features hold values that are no numbers")
        return Conversation(info, token_ids, features)

    def _header(self) -> tuple[dict[str, Any], int]:
        start = self._file.read(_LENGTH.size)
        if len(start) < _LENGTH.size:
            self.refuse(f"it has {len(start)} bytes")
        (num_bytes,) = _LENGTH.unpack(start)
        if num_bytes > min(_MOST_HEADER_BYTES, self.file_bytes - _LENGTH.size):
            self.refuse(f"its header is said to have {num_bytes} bytes")
        try:
            header = json.loads(self._file.read(num_bytes))
        except (ValueError, RecursionError):
            self.refuse("its header is no JSON")
        names = {_METADATA, *_DTYPES}
        if not isinstance(header, dict) or header.keys() != names:
            self.refuse(f"its header does not hold {', '.join(sorted(names))} alone")
        return header, _LENGTH.size + num_bytes

    def _info(self, header: dict[str, Any]) -> ConversationInfo:
        said = header[_METADATA]
        if not isinstance(said, dict) or not all(isinstance(value, str) for value in said.values()):
            self.refuse("its metadata are no texts")
        api = said.get("api")
        if api not in get_args(Api):
            self.refuse(f"its api is {api!r}")
        try:
            info = ConversationInfo(
                start=int(said["start"]),
                answer_start=int(said["answer_start"]),
                api=cast("Api", api),
                temperature=float(said["temperature"]),
                prompt_id=said["prompt_id"],
                key_digest=said["key_digest"],
                time_s=float(said["time"]),
            )
            info.prompt_id.encode()
        except (KeyError, ValueError) as error:
            self.refuse(f"its metadata are not whole ({error})")
        # It would never be too old.
        if not math.isfinite(info.time_s):
            self.refuse(f"its time is {info.time_s}")
        return info

    def _tensor(self, header: dict[str, Any], name: str) -> _Tensor:
        said = header[name]
        dtype, width, num_dims = _DTYPES[name]
        if not isinstance(said, dict) or said.get("dtype") != dtype:
            self.refuse(f"{name} is not of type {dtype}")
        shape, offsets = said.get("shape"), said.get("data_offsets")
        if not _are_counts(shape, num_dims) or not _are_counts(offsets, 2):
            self.refuse(f"{name} has shape {shape!r} at {offsets!r}")
        num_bytes = width
        for extent in shape:
            num_bytes *= extent
        begin, end = offsets
        if not num_bytes or end - begin != num_bytes:
            self.refuse(f"{name} of shape {shape} cannot have {end - begin} bytes")
        return _Tensor(tuple(shape), begin, end)

    def _require_tiles(self, tensors: dict[str, _Tensor], data_bytes: int) -> None:
        """Check that the tensors follow one another and fill the file."""
        at = 0
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.begin):
            if tensor.begin != at:
                self.refuse("its tensors overlap, or have gaps between them")
            at = tensor.end
        if at != data_bytes:
            self.refuse(f"it holds {data_bytes} bytes of values, need {at}")

    def _values(self, tensor: _Tensor, data_start: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        self._file.seek(data_start + tensor.begin)
        data = self._file.read(tensor.end - tensor.begin)
        if len(data) != tensor.end - tensor.begin:
            self.refuse("it ended while it was being read")
        return np.frombuffer(data, dtype).reshape(tensor.shape)


def conversation_bytes(conversation: Conversation) -> int:
    """Size of the file that `write_conversation` makes."""
    return len(_encoded_header(conversation)) + conversation.token_ids.nbytes + conversation.features.nbytes


def write_conversation(path: Path, conversation: Conversation) -> None:
    """Write a conversation, readable by this user only; nothing has the name before all is written.

    A power cut may leave a file that ends early, which readers refuse.

    Raises:
        OSError: If the folder cannot be written to, or its disk is full.
    """
    with whole_file(path, is_private=True, is_durable=False) as file:
        file.write(_encoded_header(conversation))
        file.write(np.ascontiguousarray(conversation.token_ids, "<i4").tobytes())
        file.write(np.ascontiguousarray(conversation.features, "<f2").tobytes())


def read_conversation(path: Path, shape: FeatureShape) -> Conversation:
    """Read a whole conversation.

    Raises:
        ModelError: If it cannot be read, is damaged or of another model, or holds no numbers.
    """
    return _read(path, shape, with_features=True)


def read_tokens(path: Path, shape: FeatureShape) -> Conversation:
    """Read a conversation without its features, of which there are no rows then.

    Raises:
        ModelError: If it cannot be read, is damaged or is of another model.
    """
    return _read(path, shape, with_features=False)


def _read(path: Path, shape: FeatureShape, *, with_features: bool) -> Conversation:
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            reader = _Reader(path, file, shape)
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                reader.refuse("it is no regular file")
            return reader.read(with_features=with_features)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error


def _open_at_once(path: str, flags: int) -> int:
    # A pipe would be waited for until something writes to it.
    return os.open(path, flags | os.O_NONBLOCK)


def _are_counts(values: object, number: int) -> TypeGuard[list[int]]:
    return (
        isinstance(values, list)
        and len(values) == number
        and all(type(value) is int and 0 <= value < 2**48 for value in values)
    )


def _encoded_header(conversation: Conversation) -> bytes:
    info, at = conversation.info, conversation.token_ids.nbytes
    fields = {
        _METADATA: {
            "start": str(info.start),
            "answer_start": str(info.answer_start),
            "api": info.api,
            "temperature": repr(info.temperature),
            "prompt_id": info.prompt_id,
            "key_digest": info.key_digest,
            "time": repr(info.time_s),
        },
        _TOKENS: {"dtype": "I32", "shape": [len(conversation.token_ids)], "data_offsets": [0, at]},
        _FEATURES: {
            "dtype": "F16",
            "shape": list(conversation.features.shape),
            "data_offsets": [at, at + conversation.features.nbytes],
        },
    }
    text = json.dumps(fields, separators=(",", ":")).encode()
    # Values begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text
