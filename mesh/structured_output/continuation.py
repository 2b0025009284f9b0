"""Continuation of a text under a grammar: the grammar of what may follow its beginning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mesh.structured_output.free_text import within
from mesh.structured_output.gbnf import NOTHING, either, seq
from stages.grammar.gbnf_parser import Chars, Choice, Expression, Literal, Ref, Repeat, Sequence

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT: Final = "root"
_REST: Final = "rest-"
# A longer beginning would make as many rules.
_MOST_CHARS: Final = 4096


class _Derivation:
    """Derivatives of expressions.

    Args:
        rules: Rules that they refer to.
    """

    def __init__(self, rules: Mapping[str, Expression]) -> None:
        self._rules = dict(rules)
        self._known: dict[tuple[str, str], Expression | None] = {}
        self._empty: dict[str, bool] = {}

    def after(self, expression: Expression, letter: str) -> Expression | None:
        """What may follow a character; None if none of the expression's texts begins with it."""
        found: Expression | None = None
        match expression:
            case Literal(text) if text.startswith(letter):
                found = Literal(text[1:])
            case Chars(ranges) if any(low <= ord(letter) <= high for low, high in ranges):
                found = NOTHING
            case Ref(name):
                found = self._after_rule(name, letter)
            case Sequence(items):
                found = self._after_items(items, letter)
            case Choice(options):
                rests = [self.after(option, letter) for option in options]
                found = _any_of([rest for rest in rests if rest is not None])
            case Repeat(item, least, most) if most != 0:
                rest = self.after(item, letter)
                more = Repeat(item, max(0, least - 1), None if most is None else most - 1)
                found = None if rest is None else _joined([rest, more])
        return found

    def reached_from(self, root: Expression) -> dict[str, Expression]:
        """An expression as a grammar's root, and the rules that it needs."""
        found = {ROOT: root}
        todo = [root]
        while todo:
            for name in _names(todo.pop()):
                if name not in found:
                    found[name] = self._rules[name]
                    todo.append(self._rules[name])
        return found

    def _after_rule(self, name: str, letter: str) -> Expression | None:
        key = (name, letter)
        if key not in self._known:
            found = self.after(self._rules[name], letter)
            if found is not None:
                own = f"{_REST}{len(self._rules)}"
                self._rules[own] = found
                found = Ref(own)
            self._known[key] = found
        return self._known[key]

    def _after_items(self, items: tuple[Expression, ...], letter: str) -> Expression | None:
        options = []
        for place, item in enumerate(items):
            rest = self.after(item, letter)
            if rest is not None:
                options.append(_joined([rest, *items[place + 1 :]]))
            if not self._may_be_empty(item):
                break
        return _any_of(options)

    def _may_be_empty(self, expression: Expression) -> bool:
        match expression:
            case Literal(text):
                return not text
            case Ref(name):
                if name not in self._empty:
                    self._empty[name] = self._may_be_empty(self._rules[name])
                return self._empty[name]
            case Sequence(items):
                return all(map(self._may_be_empty, items))
            case Choice(options):
                return any(map(self._may_be_empty, options))
            case Repeat(item, least, _):
                return least == 0 or self._may_be_empty(item)
            case _:
                return False


def rest_of(rules: Mapping[str, Expression], beginning: str) -> dict[str, Expression] | None:
    """Rules of what may follow the beginning of a text; None if no text of a grammar begins so.

    The derivative by one character after the other (Brzozowski 1964).

    Args:
        rules: The grammar, without left recursion, one of its rules named `root`.
        beginning: The beginning.
    """
    if len(beginning) > _MOST_CHARS:
        return None
    own = within(rules, NOTHING)
    derivation = _Derivation(own)
    rest = own[ROOT]
    for letter in beginning:
        found = derivation.after(rest, letter)
        if found is None:
            return None
        rest = found
    return derivation.reached_from(rest)


def _joined(items: list[Expression]) -> Expression:
    """A sequence without items that are nothing."""
    some = [item for item in items if item != NOTHING]
    return seq(*some) if some else NOTHING


def _any_of(options: list[Expression]) -> Expression | None:
    return either(*dict.fromkeys(options)) if options else None


def _names(expression: Expression) -> list[str]:
    """Names of the rules that an expression refers to."""
    match expression:
        case Ref(name):
            return [name]
        case Sequence(items) | Choice(items):
            return [name for item in items for name in _names(item)]
        case Repeat(item, _, _):
            return _names(item)
        case _:
            return []
