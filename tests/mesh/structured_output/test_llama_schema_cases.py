"""llama.cpp's own cases for JSON Schema to grammar, read from its source where that is: none is copied here.

`SPANMESH_LLAMA_CPP` names a folder with llama.cpp's source: `make test` unpacks one. So does, in the user's
cache, `python -m meshbench.compare_llama_rpc`. Without either these tests are skipped.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, Self

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from mesh.structured_output.json_schema import schema_grammar
from meshbench.lab.llama_cpp_build import unpacked_source
from spanmesh_proto.errors import InvalidRequest
from stages.grammar.automaton import Automaton
from stages.grammar.session_grammar import make_automaton
from tests.stages.grammar.test_grammar import matches
from tests.support.json_schemas import modern, random_text

_TEXT = r'(?:R"""\((?P<raw{0}>.*?)\)"""|"(?P<plain{0}>[^"]*)")'
_CASE = re.compile(
    r'test\(\{\s*(?P<status>SUCCESS|FAILURE),\s*"(?P<name>[^"]*)",\s*(?://[^\n]*\n\s*)*'
    + _TEXT.format(1)
    + r",\s*"
    + _TEXT.format(2),
    re.DOTALL,
)

ROUNDS = 6

# What we refuse and they let through, since they do not enforce it.
REFUSED = {
    "unsupported regexp in a property": "look-around",
}


@dataclass(frozen=True)
class LlamaCase:
    name: str
    fails: bool
    schema: str
    grammar: str


def source() -> Path | None:
    named = os.environ.get("SPANMESH_LLAMA_CPP")
    folder = Path(named) if named else unpacked_source()
    path = None if folder is None else folder / "tests" / "test-json-schema-to-grammar.cpp"
    return path if path is not None and path.is_file() else None


def cases() -> Iterator[LlamaCase]:
    path = source()
    if path is None:
        return
    for found in _CASE.finditer(path.read_text()):
        yield LlamaCase(
            found["name"],
            found["status"] == "FAILURE",
            found["raw1"] or found["plain1"] or "",
            found["raw2"] or found["plain2"] or "",
        )


CASES = list(cases())
pytestmark = pytest.mark.skipif(not CASES, reason="no source of llama.cpp: see SPANMESH_LLAMA_CPP")


def test_all_of_them_are_read() -> None:
    path = source()
    assert path is not None
    assert len(CASES) == path.read_text().count("test({") > 70


@pytest.mark.parametrize("case", [case for case in CASES if case.fails], ids=lambda case: case.name)
def test_what_they_refuse_is_refused(case: LlamaCase) -> None:
    with pytest.raises(InvalidRequest):
        schema_grammar(json.loads(case.schema), param="schema")


@pytest.mark.parametrize("case", [case for case in CASES if not case.fails], ids=lambda case: case.name)
def test_what_they_take_is_taken(case: LlamaCase) -> None:
    """All that ours allows is valid and promised; and what theirs allows and is both, ours allows too."""
    schema: Any = json.loads(case.schema)
    if case.name in REFUSED or not is_schema(schema):
        with pytest.raises(InvalidRequest, match=REFUSED.get(case.name, "must be")):
            schema_grammar(schema, param="schema")
        return
    ours = make_automaton(schema_grammar(schema, param="schema"))
    theirs = make_automaton(case.grammar)
    promise = Promise(schema)
    random = Random(case.name)
    for text in some_texts(ours, random):
        assert promise.covers(text), text
    if '"format"' in case.schema:
        return  # ours writes each format in one of its forms
    for text in some_texts(theirs, random):
        assert not promise.covers(text) or matches(ours, normal(text)), text


def some_texts(automaton: Automaton, random: Random) -> list[str]:
    texts = [random_text(automaton, random) for _ in range(ROUNDS)]
    return [text for text in texts if text is not None]


def is_schema(schema: Any) -> bool:
    return bool(Draft202012Validator(Draft202012Validator.META_SCHEMA).is_valid(modern(schema)))


class Promise:
    """Which of the valid values ours has to allow.

    Where a schema names properties there are no others, and each alternative is taken alone; one that speaks
    of properties means an object.
    """

    def __init__(self, schema: Any) -> None:
        whole = modern(schema)
        self._whole = _validator(whole)
        names_properties = '"properties"' in json.dumps(schema)
        self._alone = [
            _validator({**each, "unevaluatedProperties": False} if names_properties else each)
            for each in _each_alternative(whole)
        ]

    def covers(self, text: str) -> bool:
        try:
            value = json.loads(text)
        except ValueError:
            return False
        return self._whole.is_valid(value) and any(each.is_valid(value) for each in self._alone)


def _validator(schema: Any) -> Draft202012Validator:
    return Draft202012Validator(schema, format_checker=FormatChecker())


def _each_alternative(schema: Any) -> Iterator[Any]:
    """The schema with one alternative of each `anyOf` and `oneOf` at its top, those within an `allOf` too."""
    if not isinstance(schema, dict):
        yield schema
        return
    rest = {key: value for key, value in schema.items() if key not in {"allOf", "anyOf", "oneOf"}}
    if not rest.keys().isdisjoint({"properties", "required", "additionalProperties"}):
        rest.setdefault("type", "object")
    groups = [list(_each_alternative(each)) for each in schema.get("allOf", ())]
    groups += [
        [one for each in schema[key] for one in _each_alternative(each)]
        for key in ("anyOf", "oneOf")
        if key in schema
    ]
    for chosen in product(*groups):
        yield {**rest, "allOf": list(chosen)} if chosen else rest


def normal(text: str) -> str:
    """The same value in ordinary spaces and escapes; numbers as they stand, but zero without a sign."""
    value = json.loads(text, parse_int=_Number, parse_float=_Number)
    return re.sub(r'"\\u0000([^"]*)\\u0000"', r"\1", json.dumps(value, ensure_ascii=False))


class _Number(str):
    """A number's own digits: as a marked string, for `json` to write."""

    __slots__ = ()

    def __new__(cls, digits: str) -> Self:
        return super().__new__(cls, f"\0{'0' if digits == '-0' else digits}\0")
