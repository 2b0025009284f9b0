"""Strings as JSON writes them: each character as it stands or escaped."""

from __future__ import annotations

import json
from typing import Final

from mesh.json_grammar.expressions import HEX_DIGIT, chars, either, seq, times
from stages.grammar.gbnf_parser import (
    MAX_CODE_POINT,
    Chars,
    Choice,
    Expression,
    Literal,
    Ref,
    Repeat,
    Sequence,
    complement,
    merged,
)

# What stands for itself between quotes. JSON allows DEL, but terminals do not show it.
_PLAIN: Final = complement([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F)])

# A unit of UTF-16 that is no half of a surrogate pair, as escapes write it.
_ESCAPED_UNIT: Final = either(
    seq(chars("09", "ac", "ef", "AC", "EF"), times(HEX_DIGIT, 3, 3)),
    seq(chars("d", "D"), chars("07"), times(HEX_DIGIT, 2, 2)),
)

CHAR: Final[Expression] = either(
    Chars(_PLAIN), seq("\\", either(chars('"', "\\", "b", "f", "n", "r", "t"), seq("u", _ESCAPED_UNIT)))
)
"""Any one character of a string."""


def quoted(text: str) -> str:
    """A text as a JSON string, non-ASCII characters as they are."""
    return json.dumps(text, ensure_ascii=False)


def in_string(expression: Expression) -> Expression:
    """What an expression over characters is when each is written as JSON writes it."""
    match expression:
        case Literal(text):
            return Literal(quoted(text)[1:-1])
        case Chars(ranges):
            return _one_of(ranges)
        case Sequence(items):
            return Sequence(tuple(in_string(item) for item in items))
        case Choice(options):
            return Choice(tuple(in_string(option) for option in options))
        case Repeat(item, least, most):
            return Repeat(in_string(item), least, most)
        case Ref():
            return expression


def _one_of(ranges: tuple[tuple[int, int], ...]) -> Expression:
    plain = _intersection(ranges, _PLAIN)
    special = _intersection(ranges, complement(_PLAIN))
    escaped = [quoted(chr(code))[1:-1] for low, high in special for code in range(low, high + 1)]
    return either(*([Chars(plain)] if plain else []), *escaped)


def _intersection(
    left: tuple[tuple[int, int], ...], right: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], ...]:
    both = [
        (max(low, other_low), min(high, other_high))
        for low, high in merged(left)
        for other_low, other_high in right
        if max(low, other_low) <= min(high, other_high) <= MAX_CODE_POINT
    ]
    return merged(both)
