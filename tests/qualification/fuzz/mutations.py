"""Mutations of bytes, of JSON and of values of a schema."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from random import Random

_MOST_BYTES: Final = 64
# It knows what OpenAPI documents of pydantic models are made of, and no more of JSON Schema.
# Texts that have surprised parsers, tokenizers, templates and terminals.
TEXTS: Final = (
    "", " ", "a", "Hello", "0", "-1", "null", "\x00", "\n" * 20, "\r\n", "\x1b[2J", "\\", '"', "{{ 7*7 }}",
    "{% for x in y %}", "%s%n", "../../etc/passwd", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "</s>",
    "é", "e\u0301" * 5, "\u202e abc", "\ufeff", "\uffff", "\ud800", "\udc00\ud800",
    "\U0001f9d1\u200d\U0001f680",    "\u0000\u0001", "日本語", "\u200b" * 30, "a" * 300, "ab " * 100,
)  # fmt: skip
# For patterns, which are those of names and of types of tools.
_VALUE_NAMES: Final = ("look", "f-1_x.y", "Z" * 64, "web_search")
# Where a schema says nothing.
_ANY: Final[tuple[Any, ...]] = (None, True, 0, 1.5, "text", [], {})
_DEPTH: Final = 6
_FEW: Final = 4
_WRONG: Final[tuple[Any, ...]] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 1e308, -0.0, 1.5, 5e-324, "", "1",
    [], {}, [[]], [None], [{}], {"": {}}, ["a", 1], float("nan"), float("inf"), 10**400, list(range(300)),
    "x" * 20_000, ["x"] * 2000, [[0] * 50] * 50, {str(number): number for number in range(500)},
)  # fmt: skip
# Lengths and counts that readers trip over, as little-endian numbers of 1, 2, 4 and 8 bytes.
_ODD_NUMBERS: Final = tuple(
    number.to_bytes(width, "little")
    for width in (1, 2, 4, 8)
    for number in (0, 1, 2 ** (8 * width - 1) - 1, 2 ** (8 * width - 1), 2 ** (8 * width) - 1)
)
_JSON_NAMES: Final = (
    "",
    "__proto__",
    "model_config",
    "self",
    "role",
    "messages",
    "stream",
    "n",
    "user",
    "\x00",
    "\ud800",
)


class SchemaValues:
    """Makes values of one document's schemas.

    Args:
        document: With `components.schemas`.
        random: Decides.
    """

    def __init__(self, document: Mapping[str, Any], random: Random) -> None:
        self._schemas: Mapping[str, Any] = document["components"]["schemas"]
        self._random = random

    def value(self, schema: Mapping[str, Any], depth: int = 0) -> Any:
        """A value that the schema allows.

        Args:
            schema: Part of the document.
            depth: How many containers surround it.
        """
        random = self._random
        if "$ref" in schema:
            return self.value(self._schemas[schema["$ref"].rpartition("/")[2]], depth)
        if "anyOf" in schema:
            outer = {name: schema[name] for name in ("minimum", "maximum") if name in schema}
            return self.value({**outer, **random.choice(schema["anyOf"])}, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return random.choice(schema["enum"])
        return self._of_type(schema, depth)

    def _of_type(self, schema: Mapping[str, Any], depth: int) -> Any:
        random = self._random
        makers: dict[str, Callable[[], Any]] = {
            "null": lambda: None,
            "boolean": lambda: random.random() < 0.5,
            "integer": lambda: self._integer(schema),
            "number": lambda: self._number(schema),
            "string": lambda: self._string(schema),
            "array": lambda: self._array(schema, depth),
            "object": lambda: self._object(schema, depth),
        }
        return makers.get(schema.get("type", ""), lambda: random.choice(_ANY))()

    def _number(self, schema: Mapping[str, Any]) -> float:
        low, high = schema.get("minimum", -1e9), schema.get("maximum", 1e9)
        middle = self._random.uniform(low, high)
        return self._random.choice((low, high, middle, min(max(round(middle), low), high)))

    def _integer(self, schema: Mapping[str, Any]) -> int:
        low = int(schema.get("minimum", -(2**31)))
        high = int(schema.get("maximum", schema.get("exclusiveMaximum", 2**31) - 1))
        near = min(high, low + 8)
        forbidden = schema.get("not", {}).get("const")
        found = (low, high, self._random.randint(low, near), self._random.randint(low, high))
        return self._random.choice([number for number in found if number != forbidden])

    def _string(self, schema: Mapping[str, Any]) -> str:
        random = self._random
        if "pattern" in schema:
            return random.choice(
                [text for text in (*_VALUE_NAMES, *TEXTS) if re.search(schema["pattern"], text)]
            )
        least, most = schema.get("minLength", 0), schema.get("maxLength", 2000)
        text = random.choice(TEXTS)
        if random.random() < 0.3:
            text = _as_json_reads("".join(random.choices(TEXTS, k=random.randint(1, _FEW))))
        return text.ljust(least, "x")[:most]

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        if depth >= _DEPTH:
            return []
        least = schema.get("minItems", 0)
        most = min(schema.get("maxItems", _FEW), max(least, _FEW))
        count = self._random.randint(least, most)
        return [self.value(schema.get("items", {}), depth + 1) for _ in range(count)]

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        random = self._random
        required = schema.get("required", ())
        found = {}
        for name, inner in schema.get("properties", {}).items():
            if name in required or random.random() < 0.1:
                found[name] = self.value(inner, depth + 1)
        for inner in schema.get("patternProperties", {}).values():
            for _ in range(random.randint(0, _FEW)):
                found[str(random.randint(0, 60_000))] = self.value(inner, depth + 1)
        if schema.get("additionalProperties") is True and depth < _DEPTH and random.random() < 0.1:
            found[random.choice(TEXTS)] = self.value({}, depth + 1)
        return found


def damaged(data: bytes, random: Random) -> bytes:
    """`data` after one to four accidents: bits flipped, bytes changed, lost, doubled, or the end cut off.

    Args:
        data: Any bytes.
        random: Decides.
    """
    wreck = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        random.choice((_flip, _overwrite, _insert, _lose, _double, _cut))(wreck, random)
    return bytes(wreck)


def _flip(wreck: bytearray, random: Random) -> None:
    if wreck:
        wreck[random.randrange(len(wreck))] ^= 1 << random.randrange(8)


def _overwrite(wreck: bytearray, random: Random) -> None:
    new = random.choice((random.randbytes(random.randint(1, 8)), random.choice(_ODD_NUMBERS)))
    at = random.randint(0, len(wreck))
    wreck[at : at + len(new)] = new


def _insert(wreck: bytearray, random: Random) -> None:
    at = random.randint(0, len(wreck))
    wreck[at:at] = random.choice((random.randbytes(random.randint(1, 8)), random.choice(_ODD_NUMBERS)))


def _lose(wreck: bytearray, random: Random) -> None:
    at = random.randint(0, len(wreck))
    del wreck[at : at + random.randint(1, _MOST_BYTES)]


def _double(wreck: bytearray, random: Random) -> None:
    at = random.randint(0, len(wreck))
    wreck[at:at] = wreck[at : at + random.randint(1, _MOST_BYTES)]


def _cut(wreck: bytearray, random: Random) -> None:
    del wreck[random.randint(0, len(wreck)) :]


def _as_json_reads(text: str) -> str:
    """The text that JSON gives back: two surrogates that meet are one character, escaped as the same pair."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def damaged_value(value: Any, random: Random) -> Any:
    """A copy of a JSON value with one to three of its parts replaced, removed or added.

    Args:
        value: Containers of it are copied.
        random: Decides.
    """
    value = json.loads(json.dumps(value))
    for _ in range(random.choice((1, 1, 2, 3))):
        value = _damage(value, random)
    return value


def json_text(value: Any, random: Random) -> bytes:
    """A JSON value as a client might write it: spaced, escaped, with a mark before it, or in another coding.

    Args:
        value: Any.
        random: Decides.
    """
    is_ascii = random.random() < 0.5
    indent = random.choice((None, None, None, 0, 2))
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    if random.random() < 0.1:
        depth = random.choice((2, 50, 900, 5000))
        text = text.replace('"messages"', f'"deep": {"[" * depth}{"]" * depth}, "messages"', 1)
    if random.random() < 0.03:
        return text.encode(random.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7")), "surrogatepass")
    return text.encode("utf-8", "surrogatepass")


def _damage(value: Any, random: Random) -> Any:
    # The deeper a part lies, the less likely it is the one.
    if isinstance(value, dict) and value and random.random() < 0.7:
        name = random.choice(list(value))
        match random.randrange(5):
            case 0:
                del value[name]
            case 1:
                value[random.choice((*_JSON_NAMES, *TEXTS))] = _wrong(random)
            case _:
                value[name] = _damage(value[name], random)
        return value
    if isinstance(value, list) and value and random.random() < 0.7:
        at = random.randrange(len(value))
        match random.randrange(5):
            case 0:
                del value[at]
            case 1:
                value[at:at] = [value[at]] * random.choice((1, 70, 600))
            case _:
                value[at] = _damage(value[at], random)
        return value
    return _wrong(random)


def _wrong(random: Random) -> Any:
    # A copy: further damage may befall it.
    return deepcopy(random.choice((*_WRONG, *TEXTS)))
