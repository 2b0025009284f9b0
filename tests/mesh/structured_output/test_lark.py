"""Grammars in Lark's notation: which texts they permit, and what is refused by name."""

import pytest

from mesh.structured_output.gbnf import SchemaError
from mesh.structured_output.lark import gbnf_of, is_lark, lark_rules
from spanmesh_proto.errors import InvalidRequest
from stages.grammar.session_grammar import make_automaton
from tests.stages.grammar.test_grammar import matches

# As Codex sends it for its tool `apply_patch`.
PATCH = r"""start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
SUMS = r"""
// A sum; blanks are ignored.
?start: sum
?sum: product
    | sum "+" product -> add
    | sum "-" product
product: atom ("*" atom)*
atom: NUMBER.2 | "(" sum ")" | NAME
NUMBER.2: DIGIT+ ["." DIGIT~1..2]
NAME: "abs"i | "a".."c"
%import common.DIGIT
%import common (WS_INLINE, CNAME)
%ignore WS_INLINE
""".replace("NUMBER.2 |", "NUMBER |")
LISTS = r"""%llguidance {}
start: list | pair
list[capture]: "[" _items{1,2} "]"
_items: ITEM ("," ITEM){,2}
ITEM: /x\/[^\n"]/i | "\u00e9\x41\t"
pair[capture="p", suffix=";"]: %json {
  "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]
}
"""
DOTS = 'start: /a.b/s /c.d/ /[.]/s | "root" root\nroot: space\nspace: "s"'


@pytest.mark.parametrize(
    ("grammar", "fits", "does_not"),
    [
        pytest.param(
            PATCH,
            [
                "*** Begin Patch\n*** Add File: a b.py\n+x\n+\n*** End Patch",
                "*** Begin Patch\n*** Update File: a\n*** Move to: b\n@@\n-é\n+<\n c\n*** End Patch",
            ],
            ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: a\nx\n*** End Patch", "a"],
            id="patch",
        ),
        pytest.param(
            SUMS,
            ["1", " 1 + 2.50*( a-ABS )", "a - b\t- c"],
            ["", "1+", "1 2", "1.500", "(1", "d", "1+\n2", "a b s"],
            id="sums",
        ),
        pytest.param(
            LISTS,
            ["[x/1]", "[X/\u00e9,x/2,x/3]", "[\u00e9A\tx/1]", '{"n": 5};'],
            ["[]", '[x/"]', '{"n": 5}', "x/1", "[" + ",".join(["x/1"] * 10) + "]"],
            id="lists",
        ),
        pytest.param(DOTS, ["a\nbc.d.", "roots"], ["a\nbc\nd.", "a\nbc.dx", "root"], id="dots"),
        pytest.param(
            'start: line name end\nline: "a"\nname: "b"\nend: mark\nmark: "c"', ["abc"], ["ab"], id="names"
        ),
        pytest.param("start: <[7]> A\nA: B\nB: /[a-b]+?/", [], ["a"], id="token"),
    ],
)
def test_texts_are_those_of_the_grammar(grammar: str, fits: list[str], does_not: list[str]) -> None:
    assert is_lark(grammar)
    automaton = make_automaton(gbnf_of(grammar))
    assert [text for text in fits if not matches(automaton, text)] == []
    assert [text for text in does_not if matches(automaton, text)] == []


@pytest.mark.parametrize(
    ("name", "fits", "does_not"),
    [
        ("DIGIT", "7", "77"),
        ("HEXDIGIT", "F", "g"),
        ("INT", "012", "-1"),
        ("SIGNED_INT", "-12", "--1"),
        ("DECIMAL", "1.", "1"),
        ("FLOAT", "1e5", "1"),
        ("SIGNED_FLOAT", "-.5E-1", "-5"),
        ("NUMBER", "1.5e+3", "e3"),
        ("SIGNED_NUMBER", "+1", "+"),
        ("ESCAPED_STRING", '"a\\"b"', '"a"b"'),
        ("LCASE_LETTER", "a", "A"),
        ("UCASE_LETTER", "A", "a"),
        ("LETTER", "z", "1"),
        ("WORD", "ab", "a b"),
        ("CNAME", "_a1", "1a"),
        ("WS_INLINE", " \t", "\n"),
        ("WS", " \r\n\f", ""),
        ("CR", "\r", "\n"),
        ("LF", "\n", "\r"),
        ("NEWLINE", "\r\n\n", "\r"),
        ("SH_COMMENT", "# a", "#\n"),
        ("CPP_COMMENT", "// a", "/ a"),
        ("C_COMMENT", "/* * / **/", "/* */ */"),
        ("SQL_COMMENT", "-- a", "- a"),
    ],
)
def test_terminals_of_lark_s_library(name: str, fits: str, does_not: str) -> None:
    for grammar in (f"start: {name}\n%import common.{name}", f"start: X\n%import common.{name} -> X"):
        automaton = make_automaton(gbnf_of(grammar))
        assert matches(automaton, fits)
        assert not matches(automaton, does_not)


def test_a_grammar_in_gbnf_stays_as_it_is() -> None:
    for grammar in ('root ::= "start: a"', 'root ::= a\na ::= [^:]\n# start: "a"', "nothing"):
        assert not is_lark(grammar)
        assert gbnf_of(grammar) == grammar


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("start: a", "line 1: a is not defined"),
        ('x: "a"', "it has no rule named start"),
        ('start: "a"\nstart: "b"', "line 2: start is defined twice"),
        ("start: /a(?=b)/", "line 1: pattern 'a\\(\\?=b\\)' has a look-around"),
        ("start: /a/x", "line 1: the flag x of a regular expression is not supported"),
        ('start: A\nA: b\nb: "x"', "line 2: a terminal cannot refer to the rule b"),
        ("start: <|im_end|>", "write a control token by its id, such as <\\[7\\]>"),
        ('start: "a', 'line 1: nothing begins with `"` in Lark'),
        ('start: "\\d"', "line 1: an escape in this text is not known"),
        ('start: "\\ud800"', "line 1: half a surrogate pair is no text"),
        ('start: "b".."a"', "line 1: a range goes from one character to a later one"),
        ('start: "a"~3..2', "line 1: 3 to 2 times is impossible"),
        ('start: "a"~99999', "line 1: 99999 times is not possible: 0 to 16384 are"),
        ("%declare A\nstart: A", "line 1: %declare is not supported"),
        ("%import python.X\nstart: X", "line 1: only terminals of `common` can be imported"),
        ("%import common.X\nstart: X", "line 1: common.X is not known"),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "line 1: options of %llguidance are not supported"),
        ('start: x\nx[stop="a"]: /b/', "line 2: the attribute stop of a rule is not supported"),
        ('start: f{"a"}\nf{x}: x', "line 1: templates are not supported: write the rule out"),
        ("start: %regex", "line 1: %regex is not supported here"),
        ("start: %json {", "line 1: JSON must follow %json"),
        ('start: %json {"not": {}}', "line 1: %json.*not"),
        ("start: %json false", "line 1: %json: it allows no value at all"),
        ('start: ("a"\nb: "c"', "line 2: \\) must be here"),
        ('start: "a" )', "line 1: this does not belong to a rule, at `\\)`"),
        (f'start: {"(" * 65}"a"{")" * 65}', "line 1: groups nest deeper than 64"),
        pytest.param("start:" + '"a"' * 80_000 + "(" * 20_001, "parts: at most 100000 work", id="parts"),
        pytest.param(f"start: /{'a' * 300_000}/", "bytes: at most 262144 work", id="bytes"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(grammar: str, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        lark_rules(grammar)


def test_a_rule_that_begins_with_itself_elsewhere_is_refused_by_the_grammar() -> None:
    with pytest.raises(InvalidRequest, match="left-recursive"):
        make_automaton(gbnf_of('start: a\na: b "x" | "y"\nb: a'))
