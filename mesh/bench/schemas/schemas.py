"""Twenty schemas of what applications ask for, each with what to ask; all bounded, so that answers end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class SchemaCase:
    """One schema.

    Attributes:
        name: For the report.
        schema: JSON Schema, 2020-12.
        question: What to ask; `{}` takes a subject.
    """

    name: str
    schema: dict[str, Any]
    question: str


SUBJECTS: Final = (
    "a bakery", "the city of Lisbon", "a red bicycle", "a lost cat", "Ada Lovelace", "a rainy Monday",
    "the planet Mars", "a school library", "tomato soup", "a football match",
)  # fmt: skip


def _text(most: int, least: int = 1) -> dict[str, Any]:
    return {"type": "string", "minLength": least, "maxLength": most}


def _object(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _list(items: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


_ADDRESS: Final = _object(
    {"street": _text(24), "city": _text(16), "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}
)

SCHEMA_CASES: Final = (
    SchemaCase("flat object", _object({"title": _text(24), "summary": _text(60)}), "Describe {} as JSON."),
    SchemaCase(
        "nested objects",
        _object({"name": _text(20), "address": _ADDRESS, "contact": _object({"phone": _text(12)})}),
        "Invent a customer who has to do with {}.",
    ),
    SchemaCase("list of words", _object({"keywords": _list(_text(12), 2, 4)}), "Name keywords for {}."),
    SchemaCase(
        "list of objects",
        _object(
            {
                "items": _list(
                    _object({"name": _text(14), "amount": {"type": "integer", "minimum": 1, "maximum": 99}}),
                    1,
                    3,
                )
            }
        ),
        "List what one needs for {}.",
    ),
    SchemaCase(
        "enums",
        _object(
            {
                "mood": {"enum": ["happy", "sad", "neutral"]},
                "stars": {"enum": [1, 2, 3, 4, 5]},
                "sure": {"type": "boolean"},
            }
        ),
        "Rate {}.",
    ),
    SchemaCase(
        "anyOf",
        _object(
            {
                "answer": {
                    "anyOf": [_text(30), {"type": "number", "minimum": 0, "maximum": 1000}, {"type": "null"}]
                }
            }
        ),
        "How old is {}?",
    ),
    SchemaCase(
        "oneOf with a tag",
        {
            "oneOf": [
                _object(
                    {
                        "kind": {"const": "person"},
                        "name": _text(20),
                        "age": {"type": "integer", "minimum": 0, "maximum": 120},
                    }
                ),
                _object({"kind": {"const": "place"}, "name": _text(20), "country": _text(16)}),
                _object(
                    {
                        "kind": {"const": "thing"},
                        "weight_kg": {"type": "number", "minimum": 0, "maximum": 5000},
                    }
                ),
            ]
        },
        "Classify {}.",
    ),
    SchemaCase(
        "references",
        {
            "$defs": {
                "point": _object(
                    {
                        "x": {"type": "integer", "minimum": -9, "maximum": 9},
                        "y": {"type": "integer", "minimum": -9, "maximum": 9},
                    }
                )
            },
            **_object({"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}),
        },
        "Where on a map is {}?",
    ),
    SchemaCase(
        "recursive",
        {
            "$defs": {
                "box": _object(
                    {
                        "what": {"enum": ["box", "bag", "tin"]},
                        "inside": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/box"}]},
                    }
                )
            },
            "$ref": "#/$defs/box",
        },
        "Pack {}.",
    ),
    SchemaCase(
        "bounded numbers",
        _object(
            {
                "percent": {"type": "number", "minimum": 0, "maximum": 100},
                "delta": {"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": 1.5},
                "count": {"type": "integer", "minimum": -20, "maximum": 450},
            }
        ),
        "Give figures for {}.",
    ),
    SchemaCase(
        "multiples",
        _object({"minutes": {"type": "integer", "minimum": 0, "maximum": 120, "multipleOf": 15}}),
        "How long does {} take?",
    ),
    SchemaCase(
        "patterns",
        _object(
            {
                "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
                "slug": {"type": "string", "pattern": "^[a-z]+(-[a-z]+){0,2}$"},
            }
        ),
        "Give {} an article number.",
    ),
    SchemaCase(
        "formats",
        _object(
            {
                "day": {"type": "string", "format": "date"},
                "at": {"type": "string", "format": "date-time"},
                "id": {"type": "string", "format": "uuid"},
            }
        ),
        "When did {} begin?",
    ),
    SchemaCase(
        "addresses of the net",
        _object({"mail": {"type": "string", "format": "email"}, "ip": {"type": "string", "format": "ipv4"}}),
        "How can {} be reached?",
    ),
    SchemaCase(
        "optional properties",
        _object(
            {
                "a": _text(10),
                "b": {"type": "integer", "minimum": 0, "maximum": 9},
                "c": {"type": "boolean"},
                "d": _text(10),
            },
            "a",
            "b",
            "d",
        ),
        "Say what you know of {}.",
    ),
    SchemaCase(
        "a map",
        {
            "type": "object",
            "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 99},
            "maxProperties": 3,
        },
        "Count what belongs to {}.",
    ),
    SchemaCase(
        "a tuple",
        {
            "type": "array",
            "prefixItems": [_text(12), {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}],
            "minItems": 3,
            "items": False,
        },
        "Put {} into three values.",
    ),
    SchemaCase(
        "allOf",
        {
            "allOf": [
                {
                    "type": "object",
                    "properties": {"id": {"type": "integer", "minimum": 1, "maximum": 999}},
                    "required": ["id"],
                },
                {"properties": {"label": _text(16)}, "required": ["label"]},
            ]
        },
        "Label {}.",
    ),
    SchemaCase(
        "nullable and const",
        _object(
            {
                "version": {"const": 2},
                "note": {"type": ["string", "null"], "maxLength": 24},
                "ok": {"const": True},
            }
        ),
        "Is {} all right?",
    ),
    SchemaCase(
        "a tool call",
        _object(
            {
                "name": {"const": "search"},
                "arguments": _object(
                    {
                        "query": _text(30),
                        "limit": {"type": "integer", "minimum": 1, "maximum": 20},
                        "sort": {"enum": ["new", "best"]},
                    },
                    "sort",
                ),
            }
        ),
        "Search for {}.",
    ),
)
