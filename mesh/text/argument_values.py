"""Argument values: text between tags as JSON, by the schema of its parameter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from mesh.text.answer_characters import StringEscaper

_STRING: Final = frozenset({"string"})
_ALL: Final = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
# The first that fits: bool is an int.
_TYPES: Final = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
    (object, "null"),
)
_MAX_DEPTH: Final = 16
# Templates that write earlier calls write these values as Python does, and models follow.
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}


class ParameterSchemas:
    """Schemas of a function's parameters, as far as they tell texts from other values.

    Args:
        schema: JSON schema of the parameters as one object; anything else says nothing.
    """

    def __init__(self, schema: Any) -> None:
        self._root: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
        named = self._root.get("properties")
        self._named: Mapping[str, Any] = named if isinstance(named, Mapping) else {}

    def has(self, name: str) -> bool:
        """Whether a parameter has a schema of its own."""
        return name in self._named

    def is_text(self, name: str) -> bool:
        """Whether all values of a parameter are strings."""
        return self._types(self._schema_of(name)) == _STRING

    def as_json(self, name: str, text: str) -> str:
        """A value as JSON: by its schema if possible, else what JSON reads in it, else a string.

        Args:
            name: Name of the parameter.
            text: The value as the model wrote it.
        """
        schema = self._schema_of(name)
        types = self._types(schema)
        as_text = json.dumps(text, ensure_ascii=False)
        if types == _STRING or text in _constants(schema):
            return as_text
        found = _read(text)
        if found is None:
            return as_text
        written, value = found
        if isinstance(value, str) and "string" not in types:
            # JSON within JSON, as some models write it.
            inner = _read(value)
            return inner[0] if inner is not None and _type_of(inner[1]) in types else written
        is_other = _type_of(value) not in types or isinstance(value, str)
        return as_text if is_other and "string" in types else written

    def _schema_of(self, name: str) -> Any:
        return self._named.get(name, self._root.get("additionalProperties"))

    def _types(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """Types that values may have; all of them where a schema does not tell."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return _ALL
        found = _ALL
        if types := _names(schema.get("type")):
            found &= types
        if values := _constants(schema):
            found &= {_type_of(value) for value in values}
        for key in ("anyOf", "oneOf"):
            if options := _list(schema.get(key)):
                found &= frozenset[str]().union(*(self._types(option, depth + 1) for option in options))
        for each in _list(schema.get("allOf")):
            found &= self._types(each, depth + 1)
        if "$ref" in schema:
            found &= self._types(self._target(schema["$ref"]), depth + 1)
        return found or _ALL

    def _target(self, reference: Any) -> Any:
        found: Any = self._root
        for step in str(reference).removeprefix("#").split("/")[1:]:
            if not isinstance(found, Mapping):
                return None
            found = found.get(step.replace("~1", "/").replace("~0", "~"))
        return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _names(value: Any) -> frozenset[str]:
    given = [value] if isinstance(value, str) else [each for each in _list(value) if isinstance(each, str)]
    # Every integer is a number.
    return frozenset([*given, "integer"] if "number" in given else given)


def _constants(schema: Any) -> list[Any]:
    if not isinstance(schema, Mapping):
        return []
    return [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]


def _read(text: str) -> tuple[str, Any] | None:
    """JSON that a text is, and its value; None if it is none."""
    text = text.strip()
    written = StringEscaper().escaped(_PYTHON_WORDS.get(text, text))
    try:
        return written, json.loads(written, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _type_of(value: Any) -> str:
    return next(name for kind, name in _TYPES if isinstance(value, kind))
