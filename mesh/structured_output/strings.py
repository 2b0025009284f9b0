"""Grammars of strings by length and format."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from mesh.structured_output.gbnf import HEX_DIGIT, SchemaError, chars, either, seq, times
from mesh.structured_output.regex import parse_pattern
from stages.grammar.gbnf_parser import (
    MAX_CODE_POINT,
    MAX_REPEATS,
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

if TYPE_CHECKING:
    from mesh.structured_output.schema_resolver import Flat

# Characters without escapes. JSON allows DEL, but terminals do not show it.
_PLAIN: Final = complement([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F)])
# A UTF-16 code unit that is no surrogate, as an escape.
_ESCAPED_UNIT: Final = either(
    seq(chars("09", "ac", "ef", "AC", "EF"), times(HEX_DIGIT, 3, 3)),
    seq(chars("d", "D"), chars("07"), times(HEX_DIGIT, 2, 2)),
)
CHAR: Final[Expression] = either(
    Chars(_PLAIN), seq("\\", either(chars('"', "\\", "b", "f", "n", "r", "t"), seq("u", _ESCAPED_UNIT)))
)
"""Any one character of a string."""
_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_DATE: Final = (
    "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME: Final = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL: Final = "[a-z](?:[a-z0-9-]{0,30}[a-z0-9])?"
_HOST: Final = rf"{_LABEL}(?:\.{_LABEL}){{1,3}}"
PATTERNS: Final = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": "^P(?:[1-9][0-9]{0,3}W|[1-9][0-9]{0,3}D(?:T[1-9][0-9]{0,3}[HMS])?|T[1-9][0-9]{0,3}[HMS])$",
    "uuid": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "ipv4": rf"^(?:{_BYTE}\.){{3}}{_BYTE}$",
    "ipv6": "^(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}$",
    "hostname": f"^{_HOST}$",
    "email": rf"^[a-z0-9](?:[a-z0-9_-]{{0,30}}[a-z0-9])?@{_HOST}$",
    "uri": rf"^https?://{_HOST}(?:/[A-Za-z0-9_~.-]{{1,40}}){{0,6}}/?$",
}


def quoted(text: str) -> str:
    """A text as a JSON string, non-ASCII characters as they are."""
    return json.dumps(text, ensure_ascii=False)


def in_string(expression: Expression) -> Expression:
    """An expression over characters with each character as JSON writes it."""
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


def text_length(expression: Expression) -> tuple[int, int | None]:
    """The least and the most characters, None without a bound; for expressions that refer to no rule."""
    match expression:
        case Literal(text):
            return len(text), len(text)
        case Chars():
            return 1, 1
        case Sequence(items):
            return _total([text_length(item) for item in items])
        case Choice(options):
            spans = [text_length(option) for option in options]
            mosts = [most for _, most in spans]
            known = [most for most in mosts if most is not None]
            return min(least for least, _ in spans), max(known) if len(known) == len(mosts) else None
        case Repeat(item, least, most):
            inner_least, inner_most = text_length(item)
            bound = None if most is None or inner_most is None else most * inner_most
            return least * inner_least, 0 if inner_most == 0 or most == 0 else bound
        case _:
            raise TypeError(expression)


def _total(spans: list[tuple[int, int | None]]) -> tuple[int, int | None]:
    known = [most for _, most in spans if most is not None]
    return sum(least for least, _ in spans), sum(known) if len(known) == len(spans) else None


def string_of(flat: Flat) -> Expression | None:
    """Grammar of a string schema, quotes included; None if nothing is valid. Unknown formats have no effect.

    Raises:
        SchemaError: If a grammar cannot express it.
    """
    least, most = lengths_of(flat)
    if most is not None and least > most:
        return None
    pattern = pattern_of(flat)
    if pattern is None:
        return seq('"', times(CHAR, least, most), '"')
    return seq('"', in_string(of_length(pattern, least, most)), '"')


def lengths_of(flat: Flat) -> tuple[int, int | None]:
    """The least and the most characters of a string schema, None without a bound.

    Raises:
        SchemaError: If a grammar cannot count so many.
    """
    least, most = flat.get("minLength", 0), flat.get("maxLength")
    if (most is None or least <= most) and max(least, most or 0) > MAX_REPEATS:
        raise SchemaError(
            f"{'maxLength' if most else 'minLength'} is {max(least, most or 0)}: at most "
            f"{MAX_REPEATS} is supported"
        )
    return least, most


def pattern_of(flat: Flat) -> Expression | None:
    """Grammar of the pattern or the format of a string schema, over characters; None if it has neither.

    Raises:
        SchemaError: If it has both, or a grammar cannot express it.
    """
    form = PATTERNS.get(flat.get("format", ""))
    if "pattern" in flat and form is not None:
        raise SchemaError("pattern and format cannot be enforced together: leave one out")
    pattern = flat.get("pattern", form)
    return None if pattern is None else parse_pattern(pattern)


def of_length(expression: Expression, least: int, most: int | None) -> Expression:
    """The strings of an expression with this many characters.

    Raises:
        SchemaError: If that takes more than bounds on one repetition of single characters.
    """
    shortest, longest = text_length(expression)
    if least <= shortest and (most is None or (longest is not None and longest <= most)):
        return expression
    items = expression.items if isinstance(expression, Sequence) else (expression,)
    varying = [place for place, item in enumerate(items) if len({*text_length(item)}) > 1]
    if len(varying) == 1:
        [place] = varying
        item = items[place]
        if isinstance(item, Repeat) and text_length(item.item) == (1, 1):
            beside = shortest - item.least
            low = max(item.least, least - beside)
            highs = [
                each for each in (item.most, None if most is None else most - beside) if each is not None
            ]
            if not highs or low <= min(highs):
                bounded = Repeat(item.item, low, min(highs, default=None))
                return seq(*items[:place], bounded, *items[place + 1 :])
    raise SchemaError(
        "pattern and minLength or maxLength cannot be enforced together here: give the length in the pattern"
    )
