"""Process that parses large request bodies, and the form of its results; see `mesh.util.worker_main`.

Reading a result creates objects of known classes only, whatever the bytes hold, and validates nothing again.
It is done in short steps: the interpreter's lock is free between them, and other threads go on.

A result is a row of pieces. A piece is a long text, or a list of values in MessagePack; the last one holds
the body. Models are maps with the key `MODEL`: their class, their extra fields, and the names of the fields
that were set. Extensions stand for what MessagePack lacks: large numbers, and containers that are not lists,
or long, or deep, whose values are in earlier pieces. So no reading is nested in another one, and a body,
however deep, takes no more of the stack than others. A long text that stands in the request as it is, like
the base64 of a picture, is told by its place there: megabytes do not come back.
"""

from __future__ import annotations

import codecs
import importlib
import struct
import sys
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgpack
from pydantic import BaseModel

from mesh.api.message_bodies import AllowedTools
from mesh.api.request_parsing import parse_body
from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_PACKAGES: Final = ("mesh.api.", "mesh.options.")
# Keys of JSON's objects are texts.
MODEL: Final = b""
_LIST, _TUPLE, _DICT, _ALLOWED_TOOLS, _PATH, _NUMBER, _TEXT, _QUOTE = range(8)
# A step of reading makes about so many values, and a text of so many bytes.
_STEP_VALUES: Final = 2048
_STEP_BYTES: Final = 2**20
_LONG_CHARS: Final = 64 * 1024
# Texts are looked for by their beginnings, until so many looks were in vain: each may read the whole request.
_BEGIN_BYTES: Final = 64
_MOST_MISSES: Final = 16
# MessagePack's own limit is some hundreds.
_MAX_LEVELS: Final = 100
# Number of pieces; size of a piece, and whether it is a text; number of an earlier piece.
_COUNT: Final = struct.Struct("<I")
_PIECE: Final = struct.Struct("<Q?")
_PLACE: Final = struct.Struct("<I")
# First byte in the request, and number of bytes.
_EXTENT: Final = struct.Struct("<QQ")
_MOST: Final = 2**63
PARSED: Final = b"p"
REFUSED: Final = b"r"
# A body may be nested as deep as the interpreter's usual limit lets a parser go; encoding it takes a few
# calls for each level.
_MAX_CALLS: Final = 10_000


class _Node:
    """A value for MessagePack, with its size.

    Attributes:
        value: The value.
        num_values: Values that reading it creates in one step.
        num_levels: Depth of it.
    """

    __slots__ = ("num_levels", "num_values", "value")

    def __init__(self, value: Any, num_values: int = 1, num_levels: int = 0) -> None:
        self.value = value
        self.num_values = num_values
        self.num_levels = num_levels


class _Pieces:
    """The pieces of a body, those of inner containers first.

    Args:
        source: The request that it was read from.

    Attributes:
        found: Bytes of each, and whether it is a text.
    """

    def __init__(self, source: bytes) -> None:
        self._source = source
        # End of the text that was found last: most follow each other as in the request.
        self._sought = 0
        self._num_misses = 0
        self.found: list[tuple[bytes, bool]] = []

    def add(self, values: list[Any]) -> int:
        """Add a list of values as a piece; returns its number."""
        packed = msgpack.packb(values, unicode_errors="surrogatepass", strict_types=True)
        self.found.append((packed, False))
        return len(self.found) - 1

    def node(self, value: Any) -> _Node:  # noqa: PLR0911 - one for each kind
        """A value for a piece, whose long parts have become earlier pieces."""
        match value:
            case None | bool() | float():
                return _Node(value)
            case str():
                return self._text(value)
            case int():
                is_small = -_MOST <= value < _MOST
                return _Node(value if is_small else msgpack.ExtType(_NUMBER, b"%x" % value))
            case list():
                return self._sequence(_LIST, ((self.node(each),) for each in value))
            case tuple():
                return self._sequence(_TUPLE, ((self.node(each),) for each in value))
            case dict():
                return self._dict(value)
            case BaseModel():
                return self._model(value)
            case AllowedTools():
                return self._sequence(_ALLOWED_TOOLS, [(self.node(value.mode), self.node(value.names))])
            case Path():
                return self._sequence(_PATH, [(self.node(str(value)),)])
        raise TypeError(f"a body holds a {type(value).__name__}")

    def _text(self, text: str) -> _Node:
        if len(text) <= _LONG_CHARS:
            return _Node(text)
        data = text.encode("utf-8", "surrogatepass")
        at = self._place_of(data)
        if at >= 0:
            return _Node(msgpack.ExtType(_QUOTE, _EXTENT.pack(at, len(data))))
        self.found.append((data, True))
        return _Node(msgpack.ExtType(_TEXT, _PLACE.pack(len(self.found) - 1)))

    def _place_of(self, data: bytes) -> int:
        """Index of a place in the request with these bytes; -1 if there is none, or it is not found soon."""
        at = self._sought - 1
        is_from_begin = not self._sought
        while self._num_misses < _MOST_MISSES:
            at = self._source.find(data[:_BEGIN_BYTES], at + 1)
            if at >= 0 and self._source.startswith(data, at):
                self._sought = at + len(data)
                return at
            self._num_misses += 1
            if at < 0 and is_from_begin:
                return -1
            is_from_begin |= at < 0
        return -1

    def _dict(self, given: dict[str, Any]) -> _Node:
        values = {key: self.node(value) for key, value in given.items()}
        num_values = len(values) + sum(node.num_values for node in values.values())
        num_levels = 1 + max((node.num_levels for node in values.values()), default=0)
        has_short_names = all(len(key) <= _LONG_CHARS for key in given)
        if has_short_names and num_values <= _STEP_VALUES and num_levels < _MAX_LEVELS:
            return _Node({key: node.value for key, node in values.items()}, num_values, num_levels)
        pairs = ((self._text(key), value) for key, value in values.items())
        return self._sequence(_DICT, pairs)

    def _model(self, model: BaseModel) -> _Node:
        values = {key: self.node(value) for key, value in vars(model).items()}
        extra = self.node(model.model_extra)
        about = [f"{type(model).__module__}:{type(model).__qualname__}", extra.value]
        nodes = (extra, *values.values())
        return _Node(
            {
                MODEL: [*about, list(model.model_fields_set)],
                **{key: node.value for key, node in values.items()},
            },
            len(values) + sum(node.num_values for node in nodes),
            2 + max(node.num_levels for node in nodes),
        )

    def _sequence(self, kind: int, groups: Iterable[tuple[_Node, ...]]) -> _Node:
        """A container of values, those of a group in one piece."""
        values: list[Any] = []
        places: list[int] = []
        num_values = num_levels = 0
        for group in groups:
            size = sum(node.num_values for node in group)
            if num_values + size > _STEP_VALUES and values:
                places.append(self.add(values))
                values, num_values = [], 0
            values += (node.value for node in group)
            num_values += size
            num_levels = max(num_levels, *(1 + node.num_levels for node in group))
        if kind == _LIST and not places and num_levels < _MAX_LEVELS:
            return _Node(values, 1 + num_values, num_levels)
        places.append(self.add(values))
        return _Node(msgpack.ExtType(kind, b"".join(map(_PLACE.pack, places))))


def encode(body: BaseModel, source: bytes = b"") -> bytes:
    """A body as bytes.

    Args:
        body: The body.
        source: The request that it was read from.

    Raises:
        TypeError: If it has a value that JSON has not.
    """
    pieces = _Pieces(source)
    pieces.add([pieces.node(body).value])
    heads = (_PIECE.pack(len(data), is_text) for data, is_text in pieces.found)
    return b"".join([_COUNT.pack(len(pieces.found)), *heads, *(data for data, _ in pieces.found)])


def decode(data: bytes | memoryview, source: bytes | bytearray = b"") -> Any:
    """The body that `encode` was given.

    Args:
        data: Its result.
        source: The same as there.

    Raises:
        ValueError: If the bytes are of nothing known.
    """
    view = memoryview(data)
    (num_pieces,) = _COUNT.unpack_from(view)
    at = _COUNT.size
    heads = [_PIECE.unpack_from(view, at + index * _PIECE.size) for index in range(num_pieces)]
    at += num_pieces * _PIECE.size
    found: list[Any] = []

    def extension(code: int, data: bytes) -> Any:
        if code == _NUMBER:
            return int(data, 16)
        if code == _QUOTE:
            begin, num_bytes = _EXTENT.unpack(data)
            return _text(memoryview(source)[begin : begin + num_bytes])
        places = [place for (place,) in _PLACE.iter_unpack(data)]
        if code == _TEXT:
            return found[places[0]]
        return _MAKERS[code](found[place] for place in places)

    for num_bytes, is_text in heads:
        piece, at = view[at : at + num_bytes], at + num_bytes
        if is_text:
            found.append(_text(piece))
        else:
            found.append(
                msgpack.unpackb(
                    piece, unicode_errors="surrogatepass", object_hook=_object, ext_hook=extension
                )
            )
    return found[-1][0]


def _text(data: memoryview) -> str:
    decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")
    steps = range(0, len(data), _STEP_BYTES)
    parts = [decoder.decode(data[start : start + _STEP_BYTES]) for start in steps]
    return "".join([*parts, decoder.decode(b"", final=True)])


def _object(given: dict[Any, Any]) -> Any:
    about = given.pop(MODEL, None)
    if about is None:
        return given
    name, extra, fields_set = about
    kind = _class_of(name)
    # As `model_construct` does, without its search for defaults: none is missing.
    model = kind.__new__(kind)
    for attribute, value in (
        ("__dict__", given),
        ("__pydantic_fields_set__", set(fields_set)),
        ("__pydantic_extra__", extra),
        ("__pydantic_private__", None),
    ):
        object.__setattr__(model, attribute, value)
    return model


def _list(runs: Iterable[list[Any]]) -> list[Any]:
    values: list[Any] = []
    for run in runs:
        values += run
    return values


def _dict(runs: Iterable[list[Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for run in runs:
        found.update(zip(run[::2], run[1::2], strict=True))
    return found


_MAKERS: Final[dict[int, Callable[[Iterable[list[Any]]], Any]]] = {
    _LIST: _list,
    _TUPLE: lambda runs: tuple(_list(runs)),
    _DICT: _dict,
    _ALLOWED_TOOLS: lambda runs: AllowedTools(*_list(runs)),
    _PATH: lambda runs: Path(*_list(runs)),
}


@lru_cache(maxsize=256)
def _class_of(name: str) -> type[BaseModel]:
    module, _, own_name = name.partition(":")
    found = getattr(sys.modules.get(module), own_name, None) if module.startswith(_PACKAGES) else None
    if not (isinstance(found, type) and issubclass(found, BaseModel)):
        raise ValueError(f"{name} is no class of request bodies")  # noqa: TRY004 - of what was read
    return found


def job_header(kind: type[BaseModel], most_values: int) -> bytes:
    """Header of a job; its payload is the body.

    Args:
        kind: Model of the body.
        most_values: Most values that it may hold.
    """
    data: bytes = msgpack.packb([kind.__module__, kind.__qualname__, most_values])
    return data


def handle(header: bytes, payload: bytes) -> bytes:
    """The encoded body after `PARSED`, or message and field of the error after `REFUSED`."""
    module, name, most_values = msgpack.unpackb(header)
    try:
        body = parse_body(payload, _kind(module, name), most_values)
    except InvalidRequest as error:
        refusal: bytes = msgpack.packb([error.message, error.param], unicode_errors="surrogatepass")
        return REFUSED + refusal
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(_MAX_CALLS)
    try:
        return PARSED + encode(body, payload)
    finally:
        sys.setrecursionlimit(limit)


@cache
def _kind(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
