"""Short ways to say what a grammar is made of."""

from __future__ import annotations

from typing import Final

from stages.grammar.gbnf_parser import Chars, Choice, Expression, Literal, Ref, Repeat, Sequence

NOTHING: Final = Literal("")
DIGIT: Final = Chars(((0x30, 0x39),))
HEX_DIGIT: Final = Chars(((0x30, 0x39), (0x41, 0x46), (0x61, 0x66)))


def seq(*items: Expression | str) -> Expression:
    """One after the other."""
    found = tuple(Literal(item) if isinstance(item, str) else item for item in items)
    return found[0] if len(found) == 1 else Sequence(found)


def either(*options: Expression | str) -> Expression:
    """One of these."""
    found = tuple(Literal(option) if isinstance(option, str) else option for option in options)
    return found[0] if len(found) == 1 else Choice(found)


def maybe(*items: Expression | str) -> Expression:
    """All of these, or nothing."""
    return Repeat(seq(*items), 0, 1)


def times(item: Expression, least: int, most: int | None) -> Expression:
    """An item so often."""
    return Repeat(item, least, most)


def chars(*ranges: str) -> Chars:
    """One character of ranges such as `az`, or single ones."""
    return Chars(tuple(sorted((ord(each[0]), ord(each[-1])) for each in ranges)))


__all__ = [
    "DIGIT",
    "HEX_DIGIT",
    "NOTHING",
    "Chars",
    "Expression",
    "Literal",
    "Ref",
    "chars",
    "either",
    "maybe",
    "seq",
    "times",
]
