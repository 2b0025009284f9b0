"""Argument values: text between tags as JSON, by the schema of its parameter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from mesh.text.answer_characters import StringEscaper

if TYPE_CHECKING:
    from collections.abc import Sequence

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
_OPTIONS: Final = ("anyOf", "oneOf")
_MAX_DEPTH: Final = 16
# Schemas, properties and constants that one walk may meet: it runs between the tokens of all answers.
_MAX_VISITS: Final = 10_000
# Templates that write earlier calls write these values as Python does, and models follow.
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}


class ParameterSchemas:
    """Schemas of a function's parameters, as far as they tell texts from other values.

    Args:
        schema: JSON schema of the parameters as one object; anything else says nothing.
    """

    def __init__(self, schema: Any) -> None:
        self._root: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
        self._named = _Gathering(self._root).properties()
        self._kinds: dict[str | None, _Kind] = {}

    def has(self, name: str) -> bool:
        """Whether a parameter has a schema of its own."""
        return name in self._named

    def is_text(self, name: str) -> bool:
        """Whether all values of a parameter are strings."""
        return self._kind_of(name).types == _STRING

    def as_json(self, name: str, text: str) -> str:
        """A value as JSON: by its schema if possible, else what JSON reads in it, else a string.

        Args:
            name: Name of the parameter.
            text: The value as the model wrote it.
        """
        kind = self._kind_of(name)
        types = kind.types
        as_text = json.dumps(text, ensure_ascii=False)
        if types == _STRING or ("string" in types and text in kind.texts):
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

    def _kind_of(self, name: str) -> _Kind:
        key = name if name in self._named else None
        if key not in self._kinds:
            self._kinds[key] = _Gathering(self._root).kind(self._named.get(key))
        return self._kinds[key]


@dataclass(frozen=True)
class _Kind:
    """Facts of a schema about values."""

    types: frozenset[str]
    """Types that they may have; all of them where the schema does not tell."""
    texts: frozenset[str] = frozenset()
    """Strings among the constants that it names."""


class _TooLarge(Exception):
    """A walk has met more than it may."""


class _Gathering:
    """One walk over a schema and what it refers to, which meets each schema once.

    Args:
        root: The schema that references begin at.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_left = _MAX_VISITS
        # By identity; None while it is being walked, so that a cycle says nothing.
        self._types_by_id: dict[int, frozenset[str] | None] = {}
        self._properties_by_id: dict[int, dict[str | None, Any]] = {}
        self._texts: set[str] = set()

    def kind(self, schema: Any) -> _Kind:
        """Facts of a value's schema; none where it is too large."""
        try:
            types = self._types(schema, 0)
        except _TooLarge:
            return _Kind(_ALL)
        return _Kind(types, frozenset(self._texts))

    def properties(self) -> dict[str | None, Any]:
        """Schemas of the root's properties by name, those of its branches too; None for further ones."""
        try:
            return self._properties(self._root, 0)
        except _TooLarge:
            return _own_properties(self._root)

    def _spend(self, num_visits: int) -> None:
        self._num_left -= num_visits
        if self._num_left < 0:
            raise _TooLarge

    def _types(self, schema: Any, depth: int) -> frozenset[str]:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return _ALL
        key = id(schema)
        if key not in self._types_by_id:
            self._types_by_id[key] = None
            self._types_by_id[key] = self._types_within(schema, depth)
        return self._types_by_id[key] or _ALL

    def _types_within(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        found = _ALL
        types, values = _names(schema.get("type")), _constants(schema)
        self._spend(1 + len(types) + len(values))
        if types:
            found &= types
        if values:
            found &= {_type_of(value) for value in values}
            self._texts.update(value for value in values if isinstance(value, str))
        for key in _OPTIONS:
            if options := _list(schema.get(key)):
                self._spend(len(options))
                found &= frozenset[str]().union(*(self._types(option, depth + 1) for option in options))
        for each in self._all_of(schema):
            found &= self._types(each, depth + 1)
        return found or _ALL

    def _properties(self, schema: Any, depth: int) -> dict[str | None, Any]:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return {}
        key = id(schema)
        if key not in self._properties_by_id:
            self._properties_by_id[key] = {}
            self._properties_by_id[key] = self._properties_within(schema, depth)
        return self._properties_by_id[key]

    def _properties_within(self, schema: Mapping[str, Any], depth: int) -> dict[str | None, Any]:
        # Those that the root has itself are there anyway.
        self._spend(1)
        parts = [_own_properties(schema)]
        for key in _OPTIONS:
            options = [self._properties(option, depth + 1) for option in _list(schema.get(key))]
            parts.append(self._merged("anyOf", options))
        parts += [self._properties(each, depth + 1) for each in self._all_of(schema)]
        return self._merged("allOf", parts)

    def _merged(self, key: str, parts: Sequence[dict[str | None, Any]]) -> dict[str | None, Any]:
        """Properties of several schemas; one that some have is bound by these together."""
        parts = [part for part in parts if part]
        if len(parts) < 2:
            return parts[0] if parts else {}
        found: dict[str | None, list[Any]] = {}
        for part in parts:
            self._spend(len(part))
            for name, schema in part.items():
                found.setdefault(name, []).append(schema)
        return {name: schemas[0] if len(schemas) == 1 else {key: schemas} for name, schemas in found.items()}

    def _all_of(self, schema: Mapping[str, Any]) -> list[Any]:
        """Schemas that hold beside this one."""
        found = list(_list(schema.get("allOf")))
        self._spend(len(found))
        return [*found, self._target(schema["$ref"])] if "$ref" in schema else found

    def _target(self, reference: Any) -> Any:
        found: Any = self._root
        for step in str(reference).removeprefix("#").split("/")[1:]:
            if not isinstance(found, Mapping):
                return None
            found = found.get(step.replace("~1", "/").replace("~0", "~"))
        return found


def _own_properties(schema: Mapping[str, Any]) -> dict[str | None, Any]:
    named = schema.get("properties")
    found: dict[str | None, Any] = dict(named) if isinstance(named, Mapping) else {}
    others = schema.get("additionalProperties", False)
    return found if others is False else {**found, None: others}


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
