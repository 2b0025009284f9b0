"""GBNF: grammar expressions as text, and schema errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from stages.grammar.gbnf_parser import (
    Chars,
    Choice,
    Expression,
    Literal,
    Ref,
    Repeat,
    Sequence,
    Token,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_ESCAPES: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\"}
_IN_CLASS: Final = {**_ESCAPES, '"': '"', "[": "\\[", "]": "\\]", "-": "\\-", "^": "\\x5E"}
NOTHING: Final = Literal("")
DIGIT: Final = Chars(((0x30, 0x39),))
HEX_DIGIT: Final = Chars(((0x30, 0x39), (0x41, 0x46), (0x61, 0x66)))


class SchemaError(Exception):
    """A part of a schema that no grammar can express; the reader adds the place.

    Args:
        reason: Reason, beginning with the keyword.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.where = ""


class InvalidSchemaError(SchemaError):
    """A part of a schema that is invalid."""


def to_gbnf(rules: Mapping[str, Expression]) -> str:
    """The text of some rules, one a line."""
    return "".join(f"{name} ::= {_alternatives(expression)}\n" for name, expression in rules.items())


def _alternatives(expression: Expression) -> str:
    """Text as a rule or the inside of a group."""
    if isinstance(expression, Choice):
        return " | ".join(_sequence(option) for option in expression.options)
    return _sequence(expression)


def _sequence(expression: Expression) -> str:
    if isinstance(expression, Sequence) and expression.items:
        return " ".join(_item(item) for item in expression.items)
    return _item(expression)


def _item(expression: Expression) -> str:
    """Text as one item, to which a repetition may be attached."""
    match expression:
        case Literal(text):
            return '"' + "".join(_letter(letter, _ESCAPES) for letter in text) + '"'
        case Chars(ranges):
            return "[" + "".join(_range(low, high) for low, high in ranges) + "]"
        case Token(number):
            return f"<[{number}]>"
        case Ref(name):
            return name
        case Repeat(item, least, most):
            inner = f"({_item(item)})" if isinstance(item, Repeat) else _item(item)
            return inner + _times(least, most)
        case _:
            return f"({_alternatives(expression)})" if expression != Sequence(()) else '""'


def _times(least: int, most: int | None) -> str:
    short = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((least, most))
    if short is not None:
        return short
    if most is None:
        return f"{{{least},}}"
    return f"{{{least}}}" if least == most else f"{{{least},{most}}}"


def _range(low: int, high: int) -> str:
    first = _letter(chr(low), _IN_CLASS)
    return first if low == high else f"{first}-{_letter(chr(high), _IN_CLASS)}"


def _letter(letter: str, escapes: Mapping[str, str]) -> str:
    if letter in escapes:
        return escapes[letter]
    if letter.isprintable() and letter != "#":
        return letter
    code = ord(letter)
    return f"\\x{code:02X}" if code < 0x100 else f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


def mapped(expression: Expression, change: Callable[[Expression], Expression]) -> Expression:
    """An expression with a change of all that has no parts: texts, characters, tokens and references."""
    match expression:
        case Sequence(items):
            return Sequence(tuple(mapped(item, change) for item in items))
        case Choice(options):
            return Choice(tuple(mapped(option, change) for option in options))
        case Repeat(item, least, most):
            return Repeat(mapped(item, change), least, most)
        case _:
            return change(expression)


def seq(*items: Expression | str) -> Expression:
    """A sequence."""
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
    """An item repeated."""
    return Repeat(item, least, most)


def chars(*ranges: str) -> Chars:
    """One character of ranges such as `az`, or single ones."""
    return Chars(tuple(sorted((ord(each[0]), ord(each[-1])) for each in ranges)))
