"""Schema resolver: keywords that a grammar can express, and $ref, allOf, anyOf and oneOf to plain schemas.

Keywords of one schema must hold at once. So each alternative is merged with the keywords beside it; what
cannot be merged without loss is refused. A reference with nothing beside it stays one, so that recursive
schemas end.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from mesh.structured_output.gbnf import InvalidSchemaError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
_ALTERNATIVES: Final = ("$ref", "allOf", "anyOf", "oneOf")
_MAX_ALTERNATIVES: Final = 512
_MAX_CHAIN: Final = 32
_MAX_INDEX_DIGITS: Final = 9
# Schemas within schemas; those that are referred to count each time.
_MAX_LOOKS: Final = 20_000
# Members of schemas and values of enums that are merged or compared: a second or two.
_MAX_WORK: Final = 500_000
_COMPARISONS_PER_STEP: Final = 16


class Flattener:
    """Resolver of one document's schemas.

    Args:
        document: The document to which `#` refers.
    """

    def __init__(self, document: Any) -> None:
        self._document = document
        self._num_looks = 0
        self._work = 0

    def alternatives(self, schema: Any, depth: int = 0) -> list[Flat]:
        """The plain schemas of which one must hold; empty if nothing is valid.

        Raises:
            SchemaError: If it is no schema, or a grammar cannot express it.
        """
        if schema is True:
            return [{}]
        if schema is False:
            return []
        if not isinstance(schema, dict):
            raise InvalidSchemaError(f"a schema must be an object or a boolean, not {shown(schema)}")
        self._num_looks += 1
        if depth > _MAX_CHAIN or self._num_looks > _MAX_LOOKS:
            raise SchemaError(f"$ref, allOf and anyOf nest deeper than {_MAX_CHAIN}, or never end")
        self._count(_size(schema))
        base = plain_keywords(schema)
        if _is_only_reference(schema, base):
            self.target(schema["$ref"])
            return [{"$ref": schema["$ref"]}]
        found = [base]
        for beside in self._beside(schema, depth + 1):
            found = self._both(found, beside, depth)
        return found

    def _beside(self, schema: dict[str, Any], depth: int) -> Iterator[list[Flat]]:
        """Alternatives of all keywords that must hold together with the schema's own."""
        if "$ref" in schema:
            yield self.alternatives(self.target(schema["$ref"]), depth)
        for each in list_of(schema, "allOf"):
            yield self.alternatives(each, depth)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                branches = [self.alternatives(each, depth) for each in list_of(schema, key)]
                if key == "oneOf":
                    self._require_apart(branches, depth)
                yield [each for branch in branches for each in branch]

    def target(self, reference: Any) -> Any:
        """Target of a reference within the document.

        Raises:
            SchemaError: If there is none, or it is beyond the document.
        """
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise SchemaError(f"$ref {shown(reference)} refers outside the schema: only `#/…` is supported")
        found = self._document
        for step in unquote(reference[1:]).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and _is_index(name) and int(name) < len(found):
                found = found[int(name)]
            else:
                raise InvalidSchemaError(f"$ref {shown(reference)} refers to nothing")
        if reference != "#" and not reference.startswith("#/"):
            raise SchemaError(f"$ref {shown(reference)} names an anchor: write it as a path, `#/…`")
        return found

    def _both(self, left: list[Flat], right: list[Flat], depth: int) -> list[Flat]:
        """Alternatives where one of each holds."""
        if len(left) * len(right) > _MAX_ALTERNATIVES:
            raise SchemaError(f"allOf, anyOf and oneOf have more than {_MAX_ALTERNATIVES} alternatives")
        found: list[Flat] = []
        for one in left:
            for other in right:
                found += self._merged(one, other, depth)
        return found

    def _merged(self, one: Flat, other: Flat, depth: int) -> list[Flat]:
        if not one or not other or one == other:
            return [one or other]
        if "$ref" in one or "$ref" in other:
            pair = [
                self.alternatives(self.target(each["$ref"]), depth + 1) if "$ref" in each else [each]
                for each in (one, other)
            ]
            return self._both(pair[0], pair[1], depth + 1)
        self._count(_size(one) + _size(other))
        merged = merge(one, other)
        return [] if merged is None else [merged]

    def _require_apart(self, branches: list[list[Flat]], depth: int) -> None:
        """Check that no value matches two branches of a `oneOf`, which a grammar cannot detect."""
        num_flats = sum(map(len, branches))
        if num_flats > _MAX_ALTERNATIVES:
            raise SchemaError(f"oneOf has more than {_MAX_ALTERNATIVES} alternatives")
        known = [
            [self._domain(flat) for each in branch for flat in self._opened(each, depth)]
            for branch in branches
        ]
        # Comparing all pairs is cheap.
        self._count(num_flats**2 // _COMPARISONS_PER_STEP)
        for index, branch in enumerate(known):
            for second, other in enumerate(known[:index]):
                if not all(one.is_apart_from(two) for one in branch for two in other):
                    raise SchemaError(
                        f"oneOf: a value may match alternatives {second} and {index} at once, which a grammar"
                        " cannot rule out: use anyOf, or tell them apart by a required property with a const"
                    )

    def _domain(self, flat: Flat) -> _Domain:
        domain = _Domain(flat)
        self._count(domain.size)
        return domain

    def _count(self, num_steps: int) -> None:
        self._work += num_steps
        if self._work > _MAX_WORK:
            raise SchemaError(
                "$ref, allOf, anyOf and oneOf take too long to resolve: make the schema smaller"
            )

    def _opened(self, flat: Flat, depth: int) -> list[Flat]:
        if "$ref" not in flat:
            return [flat]
        found = self.alternatives(self.target(flat["$ref"]), depth + 1)
        return [each for inner in found for each in self._opened(inner, depth + 1)]


class _Domain:
    """Known facts of a plain schema's values, to tell them from another's.

    Attributes:
        size: Number of these facts.
    """

    def __init__(self, flat: Flat) -> None:
        self._types = _all_types(flat)
        self._values = _canonical_set(flat["enum"]) if "enum" in flat else None
        required = set(flat.get("required", ()))
        # Required properties that name their values.
        self._constants = {
            name: _canonical_set(values)
            for name, schema in flat.get("properties", {}).items()
            if name in required and isinstance(schema, dict) and (values := enum_of(schema)) is not None
        }
        self.size = _size(flat) + sum(map(len, self._constants.values()))

    def is_apart_from(self, other: _Domain) -> bool:
        """Whether certainly no value matches both."""
        types = self._types & other._types
        if not types:
            return True
        if self._values is not None and other._values is not None:
            return self._values.isdisjoint(other._values)
        if types != {"object"}:
            return False
        return any(
            values.isdisjoint(other._constants[name])
            for name, values in self._constants.items()
            if name in other._constants
        )


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


def _is_index(name: str) -> bool:
    return name.isdecimal() and len(name) <= _MAX_INDEX_DIGITS


def _is_only_reference(schema: dict[str, Any], base: Flat) -> bool:
    return "$ref" in schema and not base and not any(key in schema for key in _ALTERNATIVES[1:])


def _canonical_set(values: list[Any]) -> frozenset[str]:
    return frozenset(map(canonical, values))


def _size(schema: dict[str, Any]) -> int:
    """Size of a schema, without schemas within it."""
    return 1 + sum(len(value) if isinstance(value, dict | list) else 1 for value in schema.values())


def _all_types(flat: Flat) -> frozenset[str]:
    given = types_of(flat)
    if given is None:
        allowed = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
    else:
        allowed = given | ({"integer"} if "number" in given else set())
    return allowed & {type_of(value) for value in flat["enum"]} if "enum" in flat else allowed


def merge(one: Flat, other: Flat) -> Flat | None:
    """Keywords of both schemas; None if nothing can match both.

    Raises:
        SchemaError: If a grammar cannot express it.
    """
    merged: Flat = {**other, **one}
    for key in one.keys() & other.keys():
        if one[key] != other[key] and key not in {"type", "properties", "additionalProperties"}:
            merged[key] = _merged_value(key, one[key], other[key])
    if "type" in one and "type" in other:
        merged["type"] = sorted(_common_types(one, other))
        if not merged["type"]:
            return None
    _merge_properties(one, other, merged)
    return merged


def _merged_value(key: str, one: Any, other: Any) -> Any:
    if key in GREATEST:
        return max(one, other)
    if key in LEAST:
        return min(one, other)
    if key == "enum":
        known = {canonical(each) for each in one}
        return [each for each in other if canonical(each) in known]
    if key == "required":
        return [*one, *(name for name in other if name not in one)]
    if key == "items":
        return _all_of(one, other)
    if key in {"uniqueItems", "unevaluatedProperties"}:
        return one or other
    raise SchemaError(f"{key} is given twice, in a schema and beside or within its allOf or $ref")


def _common_types(one: Flat, other: Flat) -> set[str]:
    nothing: frozenset[str] = frozenset()
    types, others = types_of(one) or nothing, types_of(other) or nothing
    common = set(types & others)
    for numbers, integers in ((types, others), (others, types)):
        if "number" in numbers and "integer" in integers:
            common.add("integer")
    return common


def _merge_properties(one: Flat, other: Flat, merged: Flat) -> None:
    if not any("properties" in each or "additionalProperties" in each for each in (one, other)):
        return
    properties: dict[str, Any] = {}
    mine, theirs = one.get("properties", {}), other.get("properties", {})
    for name in (*mine, *(name for name in theirs if name not in mine)):
        left = mine.get(name, one.get("additionalProperties", True))
        right = theirs.get(name, other.get("additionalProperties", True))
        properties[name] = _all_of(left, right)
    if properties:
        merged["properties"] = properties
    if "additionalProperties" in one or "additionalProperties" in other:
        merged["additionalProperties"] = _all_of(
            one.get("additionalProperties", True), other.get("additionalProperties", True)
        )


def _all_of(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    if one is True or one == other:
        return other
    return one if other is True else {"allOf": [one, other]}
