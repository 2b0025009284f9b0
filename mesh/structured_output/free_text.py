"""Grammars of free texts: any text without some marks, and what comes behind reasoning."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from mesh.structured_output.gbnf import NOTHING, chars, either, mapped, maybe, seq, times
from stages.grammar.gbnf_parser import Chars, Choice, Expression, Literal, Ref, Token, complement

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

THOUGHTS: Final = Ref("thoughts")
"""Reasoning, where `Thoughts.rules` are added."""
_SPACES: Final = times(chars(" ", "\n"), 0, 4)
_INNER: Final = "inner-"


@dataclass(frozen=True)
class Spelling:
    """Control tokens of a vocabulary, which marks of answers may be."""

    tokens: tuple[tuple[str, int], ...] = ()
    """Name of each, such as `<|im_end|>`, and its id."""
    end_tokens: frozenset[int] = frozenset()
    """Those of them that end an answer."""

    def ends(self, text: str) -> bool:
        """Whether a control token that ends answers is in a text of a template."""
        return any(self._ids[name] in self.end_tokens for name in self._names.findall(text))

    def of(self, text: str) -> Expression:
        """Grammar of a text of a template, up to a control token that ends answers."""
        items: list[Expression] = []
        at = 0
        for found in self._names.finditer(text):
            items.append(Literal(text[at : found.start()]))
            at = found.end()
            token = self._ids[found[0]]
            if token in self.end_tokens:
                return seq(*items)
            items.append(Token(token))
        return seq(*items, text[at:])

    @cached_property
    def _ids(self) -> dict[str, int]:
        return dict(self.tokens)

    @cached_property
    def _names(self) -> re.Pattern[str]:
        names = sorted(self._ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) if names else "(?!)")


@dataclass(frozen=True)
class Thoughts:
    """Reasoning ahead of an answer."""

    marks: tuple[tuple[str, str], ...] = ()
    """Marks before and behind it, any of them; none where there is no reasoning."""
    is_begun: bool = False
    """Whether the prompt has begun it, so that the mark behind it must follow; else there may be none."""
    others: tuple[str, ...] = ()
    """Other marks that it must not hold."""

    def rules(self, spelling: Spelling) -> dict[str, Expression]:
        """Rules of such reasoning; the first one is the whole.

        Args:
            spelling: Control tokens.
        """
        found: dict[str, Expression] = {}
        options = []
        for number, (begin, end) in enumerate(self.marks):
            name = f"{THOUGHTS.name}-{number}"
            found |= text_rules(name, (end, *self.others))
            opening = [] if self.is_begun else [spelling.of(begin)]
            options.append(seq(*opening, Ref(name), spelling.of(end), _SPACES))
        whole = either(*options) if options else NOTHING
        return {THOUGHTS.name: whole if self.is_begun else maybe(whole), **found}


def text_rules(name: str, marks: Collection[str]) -> dict[str, Expression]:
    """Rules of any text in which none of some marks occurs; the first one is the whole.

    A rule for each beginning of a mark with which the text so far may end (Aho and Corasick 1975).

    Args:
        name: Name of the first rule, and beginning of the others' names.
        marks: None of them is empty, or begins as it ends: the text may end within one that follows it.
    """
    marks = [mark for mark in marks if not any(other != mark and other in mark for other in marks)]
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


def within(
    rules: Mapping[str, Expression], before: Expression, behind: Expression = NOTHING
) -> dict[str, Expression]:
    """A grammar's rules, with something before and behind its texts.

    Args:
        rules: The rules, one of them named `root`.
        before: May refer to rules that are added, none of which begins with `inner-`.
        behind: Likewise.
    """

    def renamed(expression: Expression) -> Expression:
        return Ref(_INNER + expression.name) if isinstance(expression, Ref) else expression

    found = {_INNER + name: mapped(expression, renamed) for name, expression in rules.items()}
    return {"root": seq(before, Ref(f"{_INNER}root"), behind), **found}
