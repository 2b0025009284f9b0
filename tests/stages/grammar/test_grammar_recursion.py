"""Rules within themselves: to a bound, and whatever has begun can be ended."""

import json
from collections import deque
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from mesh.structured_output.json_schema import json_object_grammar, schema_grammar
from spanmesh_proto.errors import InvalidRequest
from stages.grammar.automaton import DEAD, Automaton
from stages.grammar.gbnf_parser import MAX_RECURSION, parse_gbnf
from stages.grammar.graph import build_graph
from stages.grammar.session_grammar import make_automaton
from tests.stages.grammar.test_grammar import begins, matches
from tests.support.searches import search

BRACKETS = 'root ::= "(" root ")" | "x"'
LISTS = 'root ::= "[" (item ("," item)*)? "]"\nitem ::= root | "1"'
BOX = {
    "type": "object",
    "properties": {"inside": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
    "required": ["inside"],
}


def bounded(grammar: str, most: int) -> Automaton:
    return Automaton(build_graph(parse_gbnf(grammar)), most_recursion=most)


def boxes(count: int) -> str:
    return '{"inside":' * count + "null" + "}" * count


def test_brackets_close_where_one_more_would_be_too_many() -> None:
    automaton = make_automaton(BRACKETS)
    full = "(" * MAX_RECURSION
    assert matches(automaton, f"{full}x{')' * MAX_RECURSION}")
    assert begins(automaton, f"{full}x")
    assert not begins(automaton, f"{full}(")
    # Those that are closed again do not count.
    two = bounded('root ::= pair*\npair ::= "(" root ")"', 2)
    assert matches(two, "(())" * 50)
    assert not begins(two, "(((")


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a" root | "a"',
        'root ::= "a" rest\nrest ::= root | ""',
        "root ::= " + " ".join(['("a"+)'] * 3),
    ],
)
def test_what_only_repeats_goes_on(grammar: str) -> None:
    assert matches(bounded(grammar, 1), "a" * 5000)


def test_rules_that_do_not_come_back_are_not_counted() -> None:
    tower = "root ::= r0\n" + "\n".join(f'r{depth} ::= "(" r{depth + 1} ")"' for depth in range(100))
    assert matches(bounded(f'{tower}\nr100 ::= "x"', 0), "(" * 100 + "x" + ")" * 100)


def test_lists_in_lists_are_counted_through_repetitions() -> None:
    automaton = bounded(LISTS, 6)
    depth = max(depth for depth in range(1, 20) if begins(automaton, "[" * depth))
    assert depth == 7
    assert matches(automaton, "[" * depth + "]" * depth)
    assert not begins(automaton, "[1," * (depth + 1))


@pytest.mark.parametrize("grammar", ['root ::= "a" root', 'root ::= "(" a ")"\na ::= [0-9] root | "-" a'])
def test_a_grammar_without_an_end_is_refused(grammar: str) -> None:
    with pytest.raises(InvalidRequest, match="no text of it ends"):
        make_automaton(grammar)


def test_a_branch_without_an_end_is_not_taken() -> None:
    automaton = make_automaton('root ::= "a" never | "b"\nnever ::= "c" never')
    assert matches(automaton, "b")
    assert not begins(automaton, "a")


def test_objects_within_themselves() -> None:
    automaton = make_automaton(schema_grammar(BOX, param="schema"))
    deepest = max(count for count in range(1, 100) if matches(automaton, boxes(count)))
    assert deepest == MAX_RECURSION + 1
    within = '{"inside":' * deepest
    assert begins(automaton, f"{within}null")
    assert not begins(automaton, within + "{")


def test_any_object_nests_to_the_bound() -> None:
    automaton = make_automaton(json_object_grammar())
    alive = [depth for depth in range(1, 100) if begins(automaton, '{"a":' * depth)]
    assert alive == list(range(1, len(alive) + 1))
    assert len(alive) == MAX_RECURSION + 1
    value: Any = {}
    for _ in range(len(alive) - 1):
        value = {"a": value}
    assert matches(automaton, json.dumps(value))


def test_a_schema_that_never_ends_is_refused() -> None:
    endless = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    with pytest.raises(InvalidRequest, match="no text of it ends") as caught:
        schema_grammar(endless, param="response_format")
    assert caught.value.param == "response_format"


RULES = ("root", "b", "c")
ITEMS = st.recursive(
    st.one_of(
        st.sampled_from(['"x"', '"y"', '""', "root", "b", "c"]),
        st.sampled_from(["root", "b", "c"]).map(lambda rule: f'"(" {rule} ")"'),
    ),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda items: f"({' '.join(items)})"),
        st.lists(inner, min_size=2, max_size=3).map(lambda items: f"({' | '.join(items)})"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{2,3}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)
GRAMMARS = st.tuples(ITEMS, ITEMS, ITEMS).map(
    lambda bodies: "\n".join(f"{rule} ::= {body}" for rule, body in zip(RULES, bodies, strict=True))
)


@search(60, 1000)
@given(GRAMMARS, st.lists(st.sampled_from(b"xy()"), max_size=30), st.integers(0, 3))
def test_whatever_has_begun_can_be_ended(grammar: str, text: list[int], most: int) -> None:
    try:
        automaton, wider = bounded(grammar, most), bounded(grammar, most + 1)
    except InvalidRequest:
        reject()
    state, kept = automaton.start, b""
    assert ends(automaton, state)
    for byte in text:
        following = automaton.after(state, bytes([byte]))
        if following != DEAD:
            state, kept = following, kept + bytes([byte])
            assert ends(automaton, state), (grammar, kept)
    # More room allows more.
    assert wider.after(wider.start, kept) != DEAD
    if matches(automaton, kept):
        assert matches(wider, kept)


def ends(automaton: Automaton, start: int) -> bool:
    """Whether a way leads from a state to an end."""
    seen, todo = {start}, deque([start])
    while todo:
        state = todo.popleft()
        if automaton.may_end(state):
            return True
        for byte in b"xy()":
            try:
                following = automaton.after(state, bytes([byte]))
            except InvalidRequest:
                # A grammar with too many parses of a text is refused there; so it has no end to look for.
                reject()
            if following != DEAD and following not in seen:
                seen.add(following)
                todo.append(following)
    return False
