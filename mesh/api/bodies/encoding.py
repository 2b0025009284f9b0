"""Validated bodies as bytes, from the process that parsed them to the server.

Reading them creates objects of known classes only, whatever the bytes hold, and validates nothing again. It
is done in short steps: the interpreter's lock is free between them, and other threads go on.

A value is MessagePack. Models are maps with the key `""`: their class, their extra fields, and the names of
the fields that were set. What MessagePack lacks are its extensions: tuples, large numbers, objects with such
a key, and long texts, which follow after the value. Long or deep containers are divided by extensions, too.
"""

from __future__ import annotations

import codecs
import itertools
import struct
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import msgpack
from pydantic import BaseModel

from mesh.api.protocol import AllowedTools

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_PACKAGE: Final = "mesh.api."
_MODEL_KEY: Final = ""
_LIST, _TUPLE, _DICT, _RUN, _NUMBER, _TEXT, _ALLOWED_TOOLS = range(7)
# A step of reading makes about so many values, and a text of so many bytes.
_RUN_VALUES: Final = 2048
_STEP_BYTES: Final = 2**20
_LONG_CHARS: Final = 64 * 1024
# MessagePack's own limit is some hundreds.
_MAX_LEVELS: Final = 100
_HEAD: Final = struct.Struct("<QI")
_LENGTH: Final = struct.Struct("<Q")
_MOST: Final = 2**63


def encode(body: BaseModel) -> bytes:
    """A body as bytes.

    Raises:
        TypeError: If it has a value that JSON has not.
    """
    texts: list[bytes] = []
    tree = _pack(_Encoder(texts).node(body).value)
    lengths = (_LENGTH.pack(len(text)) for text in texts)
    return b"".join([_HEAD.pack(len(tree), len(texts)), *lengths, tree, *texts])


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


class _Encoder:
    def __init__(self, texts: list[bytes]) -> None:
        self._texts = texts

    def node(self, value: Any) -> _Node:  # noqa: PLR0911 - one for each kind
        match value:
            case None | bool() | float():
                return _Node(value)
            case str():
                return self._text(value)
            case int():
                is_small = -_MOST <= value < _MOST
                return _Node(value if is_small else msgpack.ExtType(_NUMBER, b"%x" % value))
            case list():
                return self._sequence(_LIST, map(self.node, value))
            case tuple():
                return self._sequence(_TUPLE, map(self.node, value))
            case dict():
                return self._dict(value)
            case BaseModel():
                return self._model(value)
            case AllowedTools():
                return self._sequence(_ALLOWED_TOOLS, map(self.node, (value.mode, value.names)))
        raise TypeError(f"a body holds a {type(value).__name__}")

    def _text(self, text: str) -> _Node:
        if len(text) <= _LONG_CHARS:
            return _Node(text)
        self._texts.append(text.encode("utf-8", "surrogatepass"))
        return _Node(msgpack.ExtType(_TEXT, b"%x" % (len(self._texts) - 1)))

    def _dict(self, given: dict[str, Any]) -> _Node:
        values = {key: self.node(value) for key, value in given.items()}
        num_values = len(values) + sum(node.num_values for node in values.values())
        num_levels = 1 + max((node.num_levels for node in values.values()), default=0)
        is_plain = _MODEL_KEY not in given and all(len(key) <= _LONG_CHARS for key in given)
        if is_plain and num_values <= _RUN_VALUES and num_levels < _MAX_LEVELS:
            return _Node({key: node.value for key, node in values.items()}, num_values, num_levels)
        pairs = [node for key, value in values.items() for node in (self._text(key), value)]
        return self._sequence(_DICT, pairs)

    def _model(self, model: BaseModel) -> _Node:
        values = {key: self.node(value) for key, value in vars(model).items()}
        extra = self.node(model.model_extra)
        about = [f"{type(model).__module__}:{type(model).__qualname__}", extra.value]
        nodes = (extra, *values.values())
        return _Node(
            {
                _MODEL_KEY: [*about, list(model.model_fields_set)],
                **{key: node.value for key, node in values.items()},
            },
            len(values) + sum(node.num_values for node in nodes),
            2 + max(node.num_levels for node in nodes),
        )

    def _sequence(self, kind: int, nodes: Iterable[_Node]) -> _Node:
        runs: list[list[Any]] = [[]]
        num_values = num_levels = 0
        for node in nodes:
            if num_values + node.num_values > _RUN_VALUES and runs[-1]:
                runs.append([])
                num_values = 0
            runs[-1].append(node.value)
            num_values += node.num_values
            num_levels = max(num_levels, 1 + node.num_levels)
        if len(runs) > 1:
            packed = [msgpack.ExtType(_RUN, _pack(run)) for run in runs]
            return _Node(msgpack.ExtType(kind, _pack(packed)))
        if kind == _LIST and num_levels < _MAX_LEVELS:
            return _Node(runs[0], 1 + num_values, num_levels)
        return _Node(msgpack.ExtType(kind, _pack([msgpack.ExtType(_RUN, _pack(runs[0]))])))


def _pack(value: Any) -> bytes:
    data: bytes = msgpack.packb(value, unicode_errors="surrogatepass", strict_types=True)
    return data


def decode(data: bytes | memoryview) -> Any:
    """The body that `encode` was given.

    Raises:
        ValueError: If the bytes are of nothing known.
    """
    view = memoryview(data)
    tree_bytes, num_texts = _HEAD.unpack_from(view)
    at = _HEAD.size + num_texts * _LENGTH.size
    ends = [at + tree_bytes]
    for index in range(num_texts):
        ends.append(ends[-1] + _LENGTH.unpack_from(view, _HEAD.size + index * _LENGTH.size)[0])
    texts = [_text(view[start:end]) for start, end in itertools.pairwise(ends)]
    return _Decoder(texts).value(view[at : ends[0]])


def _text(data: memoryview) -> str:
    decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")
    steps = range(0, len(data), _STEP_BYTES)
    parts = [decoder.decode(data[start : start + _STEP_BYTES]) for start in steps]
    return "".join([*parts, decoder.decode(b"", final=True)])


class _Decoder:
    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def value(self, data: memoryview | bytes) -> Any:
        return msgpack.unpackb(
            data, unicode_errors="surrogatepass", object_hook=_object, ext_hook=self._extension
        )

    def _extension(self, code: int, data: bytes) -> Any:
        if code == _NUMBER:
            return int(data, 16)
        if code == _TEXT:
            return self._texts[int(data, 16)]
        found = self.value(data)
        if code == _RUN:
            return found
        values: list[Any] = []
        for run in found:
            values += run
        return _MAKERS[code](values)


def _object(given: dict[str, Any]) -> Any:
    about = given.pop(_MODEL_KEY, None)
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


_MAKERS: Final[dict[int, Callable[[list[Any]], Any]]] = {
    _LIST: list,
    _TUPLE: tuple,
    _DICT: lambda values: dict(zip(values[::2], values[1::2], strict=True)),
    _ALLOWED_TOOLS: lambda values: AllowedTools(*values),
}


@lru_cache(maxsize=256)
def _class_of(name: str) -> type[BaseModel]:
    module, _, own_name = name.partition(":")
    found = getattr(sys.modules.get(module), own_name, None) if module.startswith(_PACKAGE) else None
    if not (isinstance(found, type) and issubclass(found, BaseModel)):
        raise ValueError(f"{name} is no class of request bodies")  # noqa: TRY004 - of what was read
    return found
