"""Keywords of a JSON Schema: which a grammar can express, their values, and those of older drafts."""

from __future__ import annotations

import json
import math
from typing import Any, Final

from mesh.structured_output.gbnf import InvalidSchemaError, SchemaError

Flat = dict[str, Any]

REFUSED: Final = (
    "not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies", "patternProperties",
    "propertyNames", "contains", "minContains", "maxContains", "$dynamicRef", "$recursiveRef",
    "unevaluatedItems",
)  # fmt: skip
GREATEST: Final = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
LEAST: Final = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
# Keywords without effect on validity, for grammars, are left out. Unknown keywords have none either.
_KEPT: Final = frozenset({
    *GREATEST, *LEAST, "type", "properties", "required", "additionalProperties", "items", "prefixItems",
    "unevaluatedProperties", "enum", "pattern", "format", "multipleOf", "uniqueItems",
})  # fmt: skip
_MAX_COUNT: Final = 2**63 - 1


def plain_keywords(schema: dict[str, Any]) -> Flat:
    """A schema's own keywords, in terms of the newest draft.

    Raises:
        SchemaError: If a grammar cannot express one, or its value is not what the keyword takes.
    """
    for key in REFUSED:
        if key in schema:
            raise SchemaError(f"the keyword {key} cannot be expressed by a grammar: leave it out")
    flat = {key: value for key, value in schema.items() if key in _KEPT}
    _modernise(schema, flat)
    enum = enum_of(schema)
    if enum is not None:
        flat["enum"] = enum
    _check(flat)
    return flat


def types_of(flat: Flat) -> frozenset[str] | None:
    """Types of a value, if the schema names them; `integer` is not part of `number` here."""
    given = flat.get("type")
    if given is None:
        return None
    types = [given] if isinstance(given, str) else given
    known = {"string", "number", "integer", "boolean", "null", "object", "array"}
    if not isinstance(types, list) or not types or not all(isinstance(each, str) for each in types):
        raise InvalidSchemaError(f"type is {shown(given)}: it must be a name or a list of names")
    if unknown := set(types) - known:
        raise InvalidSchemaError(f"type {shown(min(unknown))} is unknown")
    return frozenset(types)


def type_of(value: Any) -> str:
    """The type of a JSON value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "number"
    names: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _modernise(schema: dict[str, Any], flat: Flat) -> None:
    """Draft 4 and 7: `items` as a list, and bounds that a boolean excludes."""
    if isinstance(schema.get("items"), list):
        flat["prefixItems"] = schema["items"]
        flat.pop("items")
        if "additionalItems" in schema:
            flat["items"] = schema["additionalItems"]
    for key, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        value = schema.get(key)
        if isinstance(value, bool):
            del flat[key]
            if value and bound in flat:
                flat[key] = flat.pop(bound)


def enum_of(schema: dict[str, Any]) -> list[Any] | None:
    """Values that `enum` and `const` allow; None if they are not there."""
    if "const" in schema:
        values = [schema["const"]]
        if "enum" in schema and canonical(schema["const"]) not in map(canonical, list_of(schema, "enum")):
            return []
        return values
    return list_of(schema, "enum") if "enum" in schema else None


def _check(flat: Flat) -> None:
    types_of(flat)
    for key in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"):
        if key in flat:
            flat[key] = _count(key, flat[key])
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        if not _is_number(flat.get(key, 1)):
            raise InvalidSchemaError(f"{key} is {shown(flat[key])}: it must be a number")
    required = flat.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise InvalidSchemaError(f"required is {shown(required)}: it must be a list of names")
    for key, kind, name in (
        ("properties", dict, "an object"),
        ("prefixItems", list, "a list"),
        ("pattern", str, "a string"),
        ("format", str, "a string"),
    ):
        if key in flat and not isinstance(flat[key], kind):
            raise InvalidSchemaError(f"{key} is {shown(flat[key])}: it must be {name}")


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    # Of any length: `math` accepts none that is too long for a double.
    return isinstance(value, int) and not isinstance(value, bool)


def _count(key: str, value: Any) -> int:
    if not _is_number(value) or not 0 <= value <= _MAX_COUNT or value != int(value):
        raise InvalidSchemaError(f"{key} is {shown(value)}: it must be a whole number from 0 to {_MAX_COUNT}")
    return int(value)


def list_of(schema: dict[str, Any], key: str) -> list[Any]:
    """The list under a key, empty if the key is not there.

    Raises:
        InvalidSchemaError: If it is no list, or an empty one.
    """
    values = schema.get(key, [])
    if not isinstance(values, list) or (key in schema and not values):
        raise InvalidSchemaError(f"{key} is {shown(values)}: it must be a list, not an empty one")
    return values


def canonical(value: Any) -> str:
    """A JSON value as text that equal values share."""
    if isinstance(value, float) and value == int(value):
        value = int(value)
    return json.dumps(value, sort_keys=True)


def shown(value: Any) -> str:
    """A JSON value for an error, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"
