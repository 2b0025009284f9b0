"""Grammars of what may follow a beginning."""

from random import Random

import pytest

from mesh.structured_output.continuation import rest_of
from mesh.structured_output.gbnf import to_gbnf
from mesh.structured_output.json_schema import json_object_grammar, schema_grammar
from stages.grammar.automaton import DEAD, Automaton
from stages.grammar.gbnf_parser import parse_gbnf
from stages.grammar.session_grammar import make_automaton
from tests.stages.grammar.test_grammar import matches
from tests.support.json_schemas import CASES, random_text

GRAMMARS = {
    **{
        case.name: schema_grammar(case.schema, param="schema")
        for case in CASES
        if case.name in {"anything", "pattern", "groups", "number between", "enum", "length"}
    },
    "object": json_object_grammar(),
    "repetitions": 'root ::= ("ab" | "a" "b"?){2,3} [xy]* end\nend ::= "." | ""',
    "a rule that refers to the root": 'root ::= "x" | "[" root ("," root)? "]"',
}


def automaton_behind(grammar: str, beginning: str) -> Automaton | None:
    rules = rest_of(parse_gbnf(grammar), beginning)
    return None if rules is None else make_automaton(to_gbnf(rules))


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_text_goes_on_as_the_grammar_wants(name: str) -> None:
    grammar = GRAMMARS[name]
    whole, random = make_automaton(grammar), Random(3)
    for text in filter(None, (random_text(whole, random, 60) for _ in range(12))):
        cut = random.randrange(len(text) + 1)
        rest = automaton_behind(grammar, text[:cut])
        assert rest is not None
        assert matches(rest, text[cut:])
        for other in filter(None, (random_text(rest, random, 60) for _ in range(5))):
            assert matches(whole, text[:cut] + other)
        for wrong in ("\0", "é!", text[cut:] + "}", text[cut + 1 :]):
            assert matches(rest, wrong) == matches(whole, text[:cut] + wrong)


def test_what_no_text_begins_with_has_no_rest() -> None:
    grammar = 'root ::= "a"{2} "b"'
    assert automaton_behind(grammar, "ab") is None
    assert automaton_behind(grammar, "aabb") is None
    assert automaton_behind(grammar, "a" * 5000) is None
    end = automaton_behind(grammar, "aab")
    assert end is not None
    assert matches(end, "")
    assert end.after(end.start, b"b") == DEAD
