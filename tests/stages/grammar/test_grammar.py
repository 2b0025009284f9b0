"""GBNF from text to which bytes may come, and hostile grammars: refused or bounded, never a hang."""

import re
import time
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanmesh_proto.errors import InvalidRequest
from stages.grammar.automaton import DEAD, Automaton
from stages.grammar.gbnf_parser import (
    MAX_CODE_POINT,
    MAX_DRAW_WORK,
    MAX_GRAMMAR_BYTES,
    MAX_REPEATS,
    byte_sequences,
    complement,
    merged,
)
from stages.grammar.session_grammar import make_automaton


def matches(automaton: Automaton, text: str | bytes) -> bool:
    data = text.encode() if isinstance(text, str) else text
    return automaton.may_end(automaton.after(automaton.start, data))


def begins(automaton: Automaton, text: str) -> bool:
    return automaton.after(automaton.start, text.encode()) != DEAD


@pytest.mark.parametrize(
    ("grammar", "fits", "does_not_fit"),
    [
        ('root ::= "yes" | "no"', ["yes", "no"], ["", "ye", "yesno", "maybe"]),
        ("root ::= [a-c]+ [^a-c]", ["ab1", "aé"], ["", "1", "abc", "ab12"]),
        ('root ::= ("a" | "b")* "c"?', ["", "abab", "c", "bac"], ["cc", "d"]),
        ('root ::= "x"{2} "y"{1,3} "z"{2,}', ["xxyzz", "xxyyyzzzz"], ["xyzz", "xxyyyyzz", "xxyz"]),
        ('root ::= "a"{0}', [""], ["a"]),
        ('root ::= "ab"* "c"{,3}'.replace("{,3}", "{0,3}"), ["ababccc", ""], ["aba", "cccc"]),
        ('root ::= "\\x41\\u00e9\\U0001F600\\n\\"\\\\"', ['Aé😀\n"\\'], ["A"]),
        ("root ::= [\\]\\-\\[^]", ["]", "-", "[", "^"], ["\\", "a"]),
        ("root ::= [-a]", ["-", "a"], ["b"]),
        ("root ::= . .", ["aé", "😀\n"], ["a", "abc"]),
        ('root ::= a "!"  # a comment\r\na ::= "(" a ")" | [0-9]', ["7!", "((7))!"], ["((7)!", "7"]),
        ('root ::=\n  "a" |\n  "b" (\n "c"\n | "d" )', ["a", "bd", "bc"], ["b", "ad"]),
        # Several readings at once, and rules that may be empty.
        ('root ::= a a a\na ::= "x"?', ["", "x", "xx", "xxx"], ["xxxx"]),
        ('root ::= ("a"* "b"*)* "c"', ["c", "abbac"], ["", "ab"]),
        # The later of two rules of one name counts, as in llama.cpp.
        ('root ::= a\na ::= "1"\na ::= "2"', ["2"], ["1"]),
        ('root ::= ""', [""], ["a"]),
        ("root ::= [Α-ω]+ [\\U0001F600-\\U0001F64F]", ["αβγ😀"], ["αβγ", "a😀", "α🚀"]),
    ],
)
def test_what_a_grammar_says(grammar: str, fits: list[str], does_not_fit: list[str]) -> None:
    automaton = make_automaton(grammar)
    for text in fits:
        assert matches(automaton, text), text
        assert all(begins(automaton, text[:length]) for length in range(len(text)))
    for text in does_not_fit:
        assert not matches(automaton, text), text


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("", "no rule `root`"),
        ('start ::= "a"', "no rule `root`"),
        ("root ::= a", "refers to `a`, which is not defined"),
        ('root := "a"', "line 1: `::=` must follow"),
        ('root ::= "a', "a literal does not end"),
        ("root ::= [a", "a character class does not end"),
        ('root ::= "a"\n\nb ::= (("a")', r"line 3: `\)` is missing"),
        ('root ::= "a")', "a rule must end with its line"),
        ('root ::= "a"\n| "b"', "line 2: a name"),
        ("root ::= *", "nothing to repeat"),
        ("root ::= [z-a]", "runs backwards"),
        ("root ::= []", "matches nothing"),
        ("root ::= [\\uD800-\\uDFFF]", "matches nothing"),
        ('root ::= "\\uD800"', "surrogate"),
        ('root ::= "\ud800"', "surrogate"),
        ('root ::= "\\q"', r"escape `\\q` is unknown"),
        ('root ::= "\\x4"', "2 hex digits"),
        ('root ::= "\\U00110000"', "no code point"),
        ('root ::= "a"{3,1}', "3 to 1 times is impossible"),
        ('root ::= "a"{', "a number must be here"),
        ('root ::= "a"{1', "`}` is missing"),
        ('root ::= "a"{99999999999999999999}', "too often"),
        ("root ::= <[]>", "single tokens"),
        ("root ::= <[4a]>", "single tokens"),
        ("root ::= !<[42]>", "single tokens"),
        ("root ::= <think>", "single tokens"),
        ("root ::= !<think>", "single tokens"),
        ('root ::= root "a" | "b"', "`root` is left-recursive"),
        ('root ::= a\na ::= b "x"\nb ::= "y"? a "z"', "left-recursive"),
        ("root ::= (root)*", "left-recursive"),
        ("root ::= root", "left-recursive"),
    ],
)
def test_what_is_no_grammar(grammar: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        make_automaton(grammar)
    assert caught.value.param == "grammar"
    assert "\n" not in caught.value.message
    assert "\0" not in caught.value.message


HOSTILE = {
    "two readings of each letter, without end": 'root ::= a | b | ""\na ::= [a-z] root\nb ::= [a-z] root "!"',
    "nested repetitions": "root ::= " + "(" * 20 + '"a"*' + ")*" * 20,
    "optional in many ways": "root ::= " + '"a"? ' * 1000 + '"b"',
    "a product of repetitions": f'root ::= (("a"? "b"?){{0,{MAX_REPEATS}}} "c"?){{0,{MAX_REPEATS}}}',
    "many rules that may be empty": "root ::= "
    + " ".join(f"r{number}" for number in range(4000))
    + "".join(f'\nr{number} ::= "a"? r{number + 1}' for number in range(3999))
    + '\nr3999 ::= "a"?',
    "nothing but text": "root ::= " + '"' + "a" * (MAX_GRAMMAR_BYTES - 20) + '"',
    "too large": "root ::= " + '"' + "a" * MAX_GRAMMAR_BYTES + '"',
    "groups in groups": "root ::= " + "(" * 50_000,
    "too many repetitions": f'root ::= "a"{{0,{MAX_REPEATS + 1}}}',
    "repetitions of repetitions": 'root ::= "a"' + "{1,2}" * 20_000,
    "too many steps": "root ::= " + f'"abcdefgh"{{{MAX_REPEATS}}} ' * 100,
    "too many rules": "\n".join(f'r{number} ::= "a"' for number in range(10_000)),
    "a tower of calls": "root ::= r0\n"
    + "\n".join(f'r{number} ::= r{number + 1} "a"' for number in range(6000))
    + '\nr6000 ::= "b"',
    "every class of bytes": "root ::= ("
    + " | ".join(f"[\\x{byte:02x}-\\xff] root" for byte in range(1, 255))
    + ")?",
}


@pytest.mark.parametrize("grammar", HOSTILE.values(), ids=HOSTILE)
def test_hostile_grammars_are_refused_or_bounded(grammar: str) -> None:
    started_s = time.process_time()
    with suppress(InvalidRequest):
        automaton = make_automaton(grammar)
        state = automaton.start
        for _ in range(200):
            automaton.most_work = automaton.work + MAX_DRAW_WORK
            state = automaton.after(state, b"a")
    assert time.process_time() - started_s < 6


def test_what_is_honest_is_far_from_the_bounds() -> None:
    automaton = make_automaton('root ::= "\\"" ([^"\\\\\\x00-\\x1f] | "\\\\" ["\\\\n]){0,16000} "\\""')
    text = '"' + "Größe 😀 \\n" * 300 + '"'
    automaton.most_work = automaton.work + 100 * len(text)
    assert matches(automaton, text)


@given(
    st.lists(st.tuples(st.integers(0, MAX_CODE_POINT), st.integers(0, 3000)), max_size=4),
    st.characters(codec="utf-8"),
)
def test_ranges_of_code_points_are_ranges_of_bytes(pairs: list[tuple[int, int]], letter: str) -> None:
    ranges = [(low, min(low + width, MAX_CODE_POINT)) for low, width in pairs]
    for found, is_in in (
        (merged(ranges), any(low <= ord(letter) <= high for low, high in ranges)),
        (complement(ranges), not any(low <= ord(letter) <= high for low, high in ranges)),
    ):
        data = letter.encode()
        fitting = [
            sequence
            for sequence in byte_sequences(found)
            if len(sequence) == len(data)
            and all(low <= byte <= high for byte, (low, high) in zip(data, sequence, strict=True))
        ]
        assert len(fitting) == is_in


def expressions() -> st.SearchStrategy[tuple[str, str]]:
    """The same expression as GBNF and as a regular expression of Python's."""
    atoms = st.sampled_from([
        ('"a"', "a"), ('"bc"', "(?:bc)"), ("[ab]", "[ab]"), ("[^ab]", "[^ab]"), ('"é"', "é"), ('""', "(?:)"),
    ])  # fmt: skip
    suffixes = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,3}", "{2,}"])

    def larger(inner: st.SearchStrategy[tuple[str, str]]) -> st.SearchStrategy[tuple[str, str]]:
        several = st.lists(inner, min_size=1, max_size=3)
        return st.one_of(
            several.map(
                lambda parts: (" ".join(part[0] for part in parts), "".join(part[1] for part in parts))
            ),
            several.map(
                lambda parts: (
                    "(" + " | ".join(part[0] for part in parts) + ")",
                    "(?:" + "|".join(part[1] for part in parts) + ")",
                )
            ),
            st.tuples(inner, suffixes).map(
                lambda pair: (f"({pair[0][0]}){pair[1]}", f"(?:{pair[0][1]}){pair[1]}")
            ),
        )

    return st.recursive(atoms, larger, max_leaves=6)


@settings(max_examples=150, deadline=None)
@given(expressions(), st.lists(st.text("abcé", max_size=7), min_size=1, max_size=8))
def test_regular_grammars_are_regular_expressions(pair: tuple[str, str], texts: list[str]) -> None:
    gbnf, pattern = pair
    automaton = make_automaton(f"root ::= {gbnf}")
    for text in texts:
        assert matches(automaton, text) == (re.fullmatch(pattern, text) is not None), (gbnf, text)
