"""Values that a JSON schema allows, its edges more often than its middle. Pure: the generator decides.

It knows what OpenAPI documents of pydantic models are made of, and no more of JSON Schema.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from random import Random

# Texts that have surprised parsers, tokenizers, templates and terminals.
TEXTS: Final = (
    "", " ", "a", "Hello", "0", "-1", "null", "\x00", "\n" * 20, "\r\n", "\x1b[2J", "\\", '"', "{{ 7*7 }}",
    "{% for x in y %}", "%s%n", "../../etc/passwd", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "</s>",
    "é", "e\u0301" * 5, "\u202e abc", "\ufeff", "\uffff", "\ud800", "\udc00\ud800",
    "\U0001f9d1\u200d\U0001f680",    "\u0000\u0001", "日本語", "\u200b" * 30, "a" * 300, "ab " * 100,
)  # fmt: skip
# For patterns, which are those of names.
_NAMES: Final = ("look", "f-1_x.y", "Z" * 64)
# Where a schema says nothing.
_ANY: Final[tuple[Any, ...]] = (None, True, 0, 1.5, "text", [], {})
_DEPTH: Final = 6
_FEW: Final = 4


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
        return self._random.choice(
            (low, high, self._random.randint(low, near), self._random.randint(low, high))
        )

    def _string(self, schema: Mapping[str, Any]) -> str:
        random = self._random
        if "pattern" in schema:
            return random.choice([text for text in (*_NAMES, *TEXTS) if re.search(schema["pattern"], text)])
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


def _as_json_reads(text: str) -> str:
    """The text that JSON gives back: two surrogates that meet are one character, escaped as the same pair."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
