"""Grammars of free texts: any text without some marks, and what comes behind reasoning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mesh.structured_output.gbnf import NOTHING, chars, mapped, seq, times
from stages.grammar.gbnf_parser import Chars, Choice, Expression, Literal, Ref, complement

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

SPACES: Final = times(chars(" ", "\n"), 0, 4)
"""White space between parts of an answer."""
_THOUGHTS: Final = "thoughts"
_BEHIND: Final = "behind-"


def text_rules(name: str, marks: Collection[str]) -> dict[str, Expression]:
    """Rules of any text in which none of some marks occurs; the first one is the whole.

    A rule for each beginning of a mark with which the text so far may end (Aho and Corasick 1975).

    Args:
        name: Name of the first rule, and beginning of the others' names.
        marks: None of them is empty, or begins as it ends: the text may end within one that follows it.
    """
    begins = dict.fromkeys(mark[:length] for mark in marks for length in range(len(mark))) or {"": None}
    names = {begin: f"{name}-{number}" if begin else name for number, begin in enumerate(begins)}
    rules: dict[str, Expression] = {}
    for begin in begins:
        ends = [begin[at:] for at in range(len(begin) + 1) if begin[at:] in names]
        letters = sorted({mark[len(end)] for end in ends for mark in marks if mark.startswith(end)})
        options: list[Expression] = [NOTHING]
        for letter in letters:
            text = begin + letter
            if not text.endswith(tuple(marks)):
                place = next(text[at:] for at in range(len(text) + 1) if text[at:] in names)
                options.append(seq(letter, Ref(names[place])))
        options.append(seq(any_but(letters), Ref(name)))
        rules[names[begin]] = Choice(tuple(options))
    return rules


def any_but(letters: Collection[str]) -> Chars:
    """One character other than these."""
    return Chars(complement([(ord(letter), ord(letter)) for letter in letters]))


def behind_thoughts(
    rules: Mapping[str, Expression], end: str, spelled: Callable[[str], Expression] = Literal
) -> dict[str, Expression]:
    """A grammar's rules, with free reasoning and its end mark ahead of its texts.

    Args:
        rules: The rules, one of them named `root`.
        end: The end mark.
        spelled: Returns the grammar of a mark, which may be a control token.
    """

    def renamed(expression: Expression) -> Expression:
        return Ref(_BEHIND + expression.name) if isinstance(expression, Ref) else expression

    return {
        "root": seq(Ref(_THOUGHTS), spelled(end), SPACES, Ref(f"{_BEHIND}root")),
        **text_rules(_THOUGHTS, (end,)),
        **{_BEHIND + name: mapped(expression, renamed) for name, expression in rules.items()},
    }
