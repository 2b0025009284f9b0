"""Schemas, with texts that they call valid and that their grammars allow, and texts that neither does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.grammar.automaton import DEAD, Automaton

if TYPE_CHECKING:
    from random import Random


@dataclass(frozen=True)
class Case:
    name: str
    schema: Any
    allowed: tuple[Any, ...]
    refused: tuple[Any, ...] = ()


NODE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer"},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
    },
    "required": ["value", "next"],
    "additionalProperties": False,
}

CASES = (
    Case("anything", {}, ({"a": [1, None]}, "x", 1.5), ()),
    Case("true", bool(1), (None, [], {}), ()),
    Case("only words", {"title": "T", "description": "d", "x-own": 1}, (1, "a"), ()),
    Case("boolean", {"type": "boolean"}, (True, False), (None, 0, "true")),
    Case("null", {"type": "null"}, (None,), (False,)),
    Case("several types", {"type": ["string", "null"], "maxLength": 2}, (None, "ab"), ("abc", 1)),
    Case("const", {"const": {"a": [1, "é"]}}, ({"a": [1, "é"]},), ({}, {"a": [1]})),
    Case("enum", {"enum": ["red", 3, None, 'a "b"\n']}, ("red", 3, None, 'a "b"\n'), ("blue", 4)),
    Case("enum of a type", {"type": "string", "enum": ["a", 1, None], "minLength": 1}, ("a",), (1, None)),
    Case("enum within bounds", {"enum": [1, 5, 9, "x"], "maximum": 5}, (1, 5, "x"), (9,)),
    Case("integer", {"type": "integer"}, (0, -7, 1234567890), ("1", 1.5, None)),
    Case("at least", {"type": "integer", "minimum": 15}, (15, 19, 20, 99, 100, 12345), (14, 9, 0, -20)),
    Case("at most", {"type": "integer", "maximum": -123}, (-123, -124, -999, -1000), (-122, -9, 0, 123)),
    Case("between", {"type": "integer", "minimum": -10, "maximum": 205}, (-10, -1, 0, 99, 205), (-11, 206)),
    Case(
        "exclusive", {"type": "integer", "exclusiveMinimum": 0.5, "exclusiveMaximum": 3}, (1, 2), (0, 3, -1)
    ),
    Case("draft 4", {"type": "integer", "minimum": 3, "exclusiveMinimum": True}, (4, 30), (3, 2)),
    Case("multiples", {"type": "integer", "minimum": 0, "maximum": 20, "multipleOf": 5}, (0, 20), (1, 25)),
    Case("number", {"type": "number"}, (0, -1.5, 1e21, 3.0625), ("1",)),
    Case(
        "number between",
        {"type": "number", "minimum": -1.25, "maximum": 3.5},
        (-1.25, -1.2, -1, 0, 0.001, 3.5, 3.49, 3),
        (-1.26, 3.51, 4, -2),
    ),
    Case(
        "number beyond",
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        (0.5, 0.001, 0.999),
        (0, 1, 1.5, -0.5),
    ),
    Case("probability", {"type": "number", "minimum": 0, "maximum": 1}, (0, 1, 0.25), (1.01, -0.01)),
    Case("below zero", {"type": "number", "maximum": -0.5}, (-0.5, -7, -0.75), (0, -0.4, 0.5)),
    Case("string", {"type": "string"}, ("", "é😀", 'a"\\\n\t'), (1,)),
    Case("length", {"type": "string", "minLength": 2, "maxLength": 3}, ("ab", "é😀a", '""'), ("a", "abcd")),
    Case("pattern", {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}, ("AB-1",), ("A-1", "AB-", "xAB-1")),
    Case("unanchored", {"type": "string", "pattern": "b+c"}, ("bc", "abbcd"), ("b", "cb")),
    Case("one anchor", {"type": "string", "pattern": "^a|z$"}, ("ab", "bz"), ("ba", "zb")),
    Case("groups", {"type": "string", "pattern": "^(?:ab|c(d|e)?){2,3}$"}, ("abc", "cdceab"), ("ab", "d")),
    Case("shorthands", {"type": "string", "pattern": r"^\w+\s\d\.\S$"}, ("a_1 7.x",), ("a 7x", "é 7.x")),
    Case("quotes", {"type": "string", "pattern": r'^"[^"]\\/"$'}, ('"a\\/"',), ('"\\/"',)),
    Case("lazy", {"type": "string", "pattern": "^a+?b*?$"}, ("a", "aabb"), ("b",)),
    Case(
        "pattern and length",
        {"pattern": "^[a-z]+$", "type": "string", "maxLength": 4},
        ("abcd",),
        ("abcde", ""),
    ),
    Case(
        "date",
        {"type": "string", "format": "date"},
        ("2024-02-28", "1999-12-31"),
        ("2024-13-01", "2024-02-30"),
    ),
    Case(
        "date-time", {"type": "string", "format": "date-time"}, ("2024-06-01T12:30:05Z",), ("2024-06-01", "x")
    ),
    Case(
        "uuid", {"type": "string", "format": "uuid"}, ("123e4567-e89b-12d3-a456-426614174000",), ("123e4567",)
    ),
    Case("email", {"type": "string", "format": "email"}, ("a.b@c.de".replace("a.b", "a-b"),), ("a", "@b.c")),
    Case("ipv4", {"type": "string", "format": "ipv4"}, ("255.0.10.199",), ("256.0.0.1", "1.2.3")),
    Case("other format", {"type": "string", "format": "color"}, ("red",), ()),
    Case("free object", {"type": "object"}, ({}, {"a": {"b": [1]}}), ([], None)),
    Case(
        "object",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
            "required": ["a"],
        },
        ({"a": 1}, {"a": 1, "b": "x"}),
        ({}, {"b": "x"}, {"a": "1"}, {"a": 1, "c": 2}),
    ),
    Case(
        "optional properties",
        {"properties": {name: {"type": "integer"} for name in "abcd"}, "required": ["c"]},
        ({"c": 1}, {"a": 1, "c": 2}, {"b": 1, "c": 2, "d": 3}, dict.fromkeys("abcd", 0)),
        ({}, {"a": 1}, {"c": 1, "x": 2}),
    ),
    Case(
        "all optional",
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}},
        },
        ({}, {"a": None}, {"b": None}, {"a": None, "c": None}, dict.fromkeys("abc")),
        ({"d": None},),
    ),
    Case(
        "others",
        {
            "type": "object",
            "properties": {"ab": {"type": "integer"}, "a": {"type": "null"}},
            "additionalProperties": {"type": "boolean"},
        },
        ({}, {"ab": 1, "x": True}, {"ac": True, "abc": False, "b": True}, {"a": None, "aa": True}),
        ({"ab": True}, {"x": 1}, {"a": True}),
    ),
    Case(
        "others with escapes",
        {
            "properties": {'a"': {"type": "null"}, "\n": {"type": "null"}, "\x01": {"type": "null"}},
            "additionalProperties": {"type": "boolean"},
        },
        (
            {'a"': None, "\n": None, "\x01": None},
            {"C:\\": True, '"': True, 'a"b': False, "a\n\n": True, "\x01a": True},
        ),
        ({'a"': True}, {"\n": True}, {"\x01": True}),
    ),
    Case(
        "a map",
        {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
        ({}, {"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1, "b": 2, "c": 3}, {"a": "x"}),
    ),
    Case(
        "required without a schema",
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"]},
        ({"b": 1}, {"a": None, "b": [2]}),
        ({"a": None},),
    ),
    Case(
        "a property that cannot be",
        {"type": "object", "properties": {"a": False, "b": {"type": "null"}}},
        ({}, {"b": None}),
        ({"a": 1},),
    ),
    Case(
        "no properties",
        {"type": "object", "properties": {}, "additionalProperties": False},
        ({},),
        ({"a": 1},),
    ),
    Case(
        "names",
        {"properties": {'"é\n': {"type": "null"}, "": {"type": "null"}}},
        ({'"é\n': None, "": None},),
        (),
    ),
    Case("array", {"type": "array", "items": {"type": "integer"}}, ([], [1], [1, 2, 3]), (["a"], {})),
    Case(
        "counted array",
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        ([1, 2], [1, 2, 3]),
        ([1], [1, 2, 3, 4]),
    ),
    Case(
        "one item or none",
        {"type": "array", "items": {"type": "null"}, "maxItems": 1},
        ([], [None]),
        ([None] * 2,),
    ),
    Case("empty array", {"type": "array", "maxItems": 0}, ([],), ([1],)),
    Case(
        "tuple",
        {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "minItems": 1},
        (["a"], ["a", 1]),
        ([], [1], ["a", 1, 2]),
    ),
    Case(
        "tuple and more",
        {"prefixItems": [{"type": "string"}], "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        (["a", 1], ["a", 1, 2]),
        (["a"], ["a", 1, 2, 3], ["a", "b"]),
    ),
    Case(
        "draft 7 tuple",
        {"type": "array", "items": [{"const": 1}], "additionalItems": False},
        ([], [1]),
        ([2],),
    ),
    Case(
        "anyOf",
        {"anyOf": [{"type": "string", "maxLength": 1}, {"type": "array", "items": {"type": "null"}}]},
        ("a", [None]),
        ("ab", 1),
    ),
    Case(
        "anyOf beside properties",
        {
            "type": "object",
            "properties": {"kind": {"enum": ["a", "b"]}},
            "anyOf": [
                {"properties": {"kind": {"const": "a"}, "x": {"type": "integer"}}, "required": ["kind", "x"]},
                {"properties": {"kind": {"const": "b"}}, "required": ["kind"]},
            ],
        },
        ({"kind": "a", "x": 1}, {"kind": "b"}),
        ({"kind": "a"}, {"kind": "b", "x": 1}),
    ),
    Case(
        "oneOf",
        {
            "oneOf": [
                {"type": "object", "properties": {"t": {"const": "a"}}, "required": ["t"]},
                {"type": "object", "properties": {"t": {"const": "b"}}, "required": ["t"]},
                {"type": "integer"},
            ]
        },
        ({"t": "a"}, {"t": "b"}, 7),
        ({"t": "c"}, "x"),
    ),
    Case(
        "allOf",
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]},
                {"properties": {"a": {"maximum": 5}, "b": {"type": "null"}}},
            ]
        },
        ({"a": 3}, {"a": 5, "b": None}),
        ({"a": 2}, {"a": 6}, {"b": None}),
    ),
    Case(
        "allOf that closes",
        {"allOf": [{"enum": ["a", "b", "c"]}, {"enum": ["c", "b", "d"]}]},
        ("b", "c"),
        ("a", "d"),
    ),
    Case("reference", {"$ref": "#/definitions/a%20b", "definitions": {"a b": {"const": 1}}}, (1,), (2,)),
    Case(
        "reference and more",
        {"$defs": {"s": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/s", "maxLength": 1}}},
        ({"a": "x"},),
        ({"a": "xy"},),
    ),
    Case(
        "recursive",
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        ({"value": 1, "next": None}, {"value": 1, "next": {"value": 2, "next": None}}),
        ({"value": 1}, {"value": 1, "next": 2}),
    ),
    Case(
        "tree",
        {
            "type": "object",
            "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}},
            "required": ["kids"],
        },
        ({"kids": []}, {"kids": [{"kids": []}, {"kids": [{"kids": []}]}]}),
        ({"kids": [1]},),
    ),
    Case(
        "merged with itself",
        {
            "$defs": {"a": {"properties": {"x": {"allOf": [{"$ref": "#/$defs/a"}, {"required": ["x"]}]}}}},
            "$ref": "#/$defs/a",
        },
        ({},),
        ({"x": {}},),
    ),
    Case(
        "unevaluated",
        {
            "allOf": [{"properties": {"a": {"type": "null"}}, "required": ["a"]}],
            "properties": {"b": {"type": "null"}},
            "unevaluatedProperties": False,
        },
        ({"a": None}, {"b": None, "a": None}),
        ({"a": None, "c": None},),
    ),
)


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def modern(schema: Any) -> Any:
    """Draft 4's and 7's words in those of 2020-12."""
    if isinstance(schema, list):
        return [modern(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: modern(value) for key, value in schema.items()}
    if isinstance(found.get("items"), list):
        found["prefixItems"] = found.pop("items")
        found["items"] = found.pop("additionalItems", True)
    for key, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if found.get(key) is True:
            found[key] = found.pop(bound)
    return found


def random_text(automaton: Automaton, random: Random, most_bytes: int = 400) -> str | None:
    """Some text that a grammar allows, mostly a short one; None if none ended in time."""
    classes: dict[int, list[int]] = {}
    for byte, number in enumerate(automaton.class_of_byte.tolist()):
        classes.setdefault(number, []).append(byte)
    state, text = automaton.start, bytearray()
    while len(text) < most_bytes:
        automaton.most_work = automaton.work + 200_000
        alive = [found for found in classes.values() if automaton.after(state, bytes(found[:1])) != DEAD]
        if automaton.may_end(state) and (not alive or random.random() < 0.3):
            return text.decode()
        if not alive:
            return None
        # What ends something: else numbers, strings and lists go on for long.
        enders = [found for found in alive if found[0] in b'"}],:0']
        found = random.choice(enders if enders and random.random() < 0.4 else alive)
        text.append(random.choice(found))
        state = automaton.after(state, bytes(text[-1:]))
    return None


__all__ = ["CASES", "Case", "dump", "modern", "random_text"]
