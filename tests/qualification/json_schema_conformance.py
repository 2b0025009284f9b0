"""Conformance of answers to JSON schemas, with and without speculation."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from jsonschema import Draft202012Validator, FormatChecker

from meshbench.load_client.schedule import Request
from tests.support.requests import answer_here

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SUBJECTS: Final = (
    "a bakery", "the city of Lisbon", "a red bicycle", "a lost cat", "Ada Lovelace", "a rainy Monday",
    "the planet Mars", "a school library", "tomato soup", "a football match",
)  # fmt: skip
_MAX_TOKENS: Final = 400
# Greedy, drawn, and drawn through filters, in turn.
_SAMPLINGS: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 40},
)


@dataclass(frozen=True)
class SchemaCase:
    """One schema."""

    name: str
    """For the report."""
    schema: dict[str, Any]
    """JSON Schema, 2020-12."""
    question: str
    """Question; `{}` takes a subject."""


@dataclass(frozen=True)
class SchemaAnswer:
    """One answer."""

    text: str
    """Text of the answer."""
    finish: str
    """Why it ended."""
    num_tokens: int
    """Its length."""
    num_accepted: int
    """Proposed tokens that were the model's own."""
    num_rejected: int
    """And those that were not."""


@dataclass(frozen=True)
class SchemaResult:
    """One question."""

    case: SchemaCase
    """Its schema."""
    number: int
    """Of the question among all."""
    answer: SchemaAnswer
    """With speculation."""
    plain: SchemaAnswer | None
    """Answer without speculation; None if there is none."""
    fault: str | None
    """Why the answer is not valid; None if it is."""

    @property
    def is_same(self) -> bool:
        """Whether speculation made no difference."""
        return self.plain is None or self.plain.text == self.answer.text


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


def questions(count: int) -> list[tuple[SchemaCase, str]]:
    """This many questions, all schemas in turn."""
    pairs = product(SUBJECTS, SCHEMA_CASES)
    return [(case, case.question.format(subject)) for subject, case in pairs][:count]


def ask_all(
    port: int,
    count: int,
    *,
    api_key: str,
    num_at_once: int,
    compares: bool,
    on_result: Callable[[SchemaResult], None] = lambda _result: None,
) -> list[SchemaResult]:
    """Ask `count` questions, at most one for each schema and subject.

    Args:
        port: Of the API on 127.0.0.1.
        count: How many.
        api_key: Opens it.
        num_at_once: How many are under way together.
        compares: Whether each is sent without speculation, too.
        on_result: Called with each result, in any order.

    Raises:
        MeshError: If the server refuses one.
    """

    def one(numbered: tuple[int, tuple[SchemaCase, str]]) -> SchemaResult:
        number, (case, question) = numbered
        body = request_body(case, question, number)
        answer = _ask(port, body, api_key)
        plain = _ask(port, {**body, "speculation": {"mode": "off"}}, api_key) if compares else None
        result = SchemaResult(case, number, answer, plain, fault_of(case, answer))
        on_result(result)
        return result

    with ThreadPoolExecutor(num_at_once) as pool:
        return list(pool.map(one, enumerate(questions(count))))


def request_body(case: SchemaCase, question: str, number: int) -> dict[str, Any]:
    """What is asked: the question, its schema, and a seed and a way to draw of its own."""
    return {
        "model": "default",
        "messages": [{"role": "user", "content": question}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": case.schema}},
        "max_tokens": _MAX_TOKENS,
        "seed": number,
        **_SAMPLINGS[number % len(_SAMPLINGS)],
    }


def fault_of(case: SchemaCase, answer: SchemaAnswer) -> str | None:
    """Reason why an answer is not valid; None if it is."""
    if answer.finish != "stop":
        return f"it ended with `{answer.finish}` after {answer.num_tokens} tokens"
    try:
        value = json.loads(answer.text)
    except ValueError as error:
        return f"it is not JSON: {error}"
    validator = Draft202012Validator(case.schema, format_checker=FormatChecker())
    first = next(validator.iter_errors(value), None)
    return None if first is None else f"{first.json_path}: {first.message}"


def _ask(port: int, body: dict[str, Any], api_key: str) -> SchemaAnswer:
    found = answer_here(f"http://127.0.0.1:{port}", Request.streamed({**body, "cache_prompt": True}), api_key)
    num_accepted = found.timings["draft_n_accepted"]
    num_rejected = found.timings["draft_n"] - num_accepted
    return SchemaAnswer(found.text, str(found.record.finish), found.num_tokens, num_accepted, num_rejected)


def summary(results: Sequence[SchemaResult]) -> dict[str, Any]:
    """For a JSON file."""
    return {
        "questions": len(results),
        "schemas": len({result.case.name for result in results}),
        "valid": sum(result.fault is None for result in results),
        "same_without_speculation": sum(result.is_same for result in results),
        "compared": sum(result.plain is not None for result in results),
        "tokens": sum(result.answer.num_tokens for result in results),
        "accepted": sum(result.answer.num_accepted for result in results),
        "rejected": sum(result.answer.num_rejected for result in results),
        "faults": [
            {
                "schema": result.case.name,
                "number": result.number,
                "fault": result.fault,
                "text": result.answer.text,
            }
            for result in results
            if result.fault is not None
        ],
        "different": [
            {
                "schema": result.case.name,
                "number": result.number,
                "text": result.answer.text,
                "plain": result.plain.text,
            }
            for result in results
            if result.plain is not None and not result.is_same
        ],
    }
