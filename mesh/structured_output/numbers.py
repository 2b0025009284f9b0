"""Grammars of bounded integers and numbers.

Bounded numbers are written without an exponent, and with at most as many digits as a double distinguishes.
Minus zero is never written.
"""

from __future__ import annotations

from decimal import Decimal
from itertools import groupby
from typing import Final

from mesh.structured_output.gbnf import DIGIT, SchemaError, chars, either, maybe, seq, times
from stages.grammar.gbnf_parser import Expression, Literal

_MAX_DIGITS: Final = 16
_LARGEST: Final = 10**_MAX_DIGITS - 1
# The precision of `Decimal` arithmetic: longer bounds would be rounded, at times to the wrong side.
_MOST_BOUND_DIGITS: Final = 28
_MOST_MULTIPLES: Final = 1000
Bound = tuple[Decimal, bool]
"""A number, and whether it is itself out of bounds."""
ANY_INTEGER: Final = seq(maybe("-"), either("0", seq(chars("19"), times(DIGIT, 0, _MAX_DIGITS - 1))))
ANY_NUMBER: Final = seq(
    ANY_INTEGER,
    maybe(".", times(DIGIT, 1, _MAX_DIGITS)),
    maybe(chars("e", "E"), maybe(chars("+", "-")), times(DIGIT, 1, 2)),
)
_Side = tuple[str, bool] | None
"""Digits behind the point, and whether what they say is itself out of bounds; None is no bound."""


def integer_between(least: int | None, most: int | None, multiple_of: int = 1) -> Expression | None:
    """Integers from `least` to `most`, both included; None if there are none.

    Raises:
        SchemaError: If the bounds have too many digits, or there are too many multiples to name each.
    """
    if least is None and most is None and multiple_of == 1:
        return ANY_INTEGER
    low = min(-_LARGEST, most or 0) if least is None else least
    high = max(_LARGEST, least or 0) if most is None else most
    _refuse_long(low)
    _refuse_long(high)
    if low > high:
        return None
    if multiple_of != 1:
        first = -(-low // multiple_of) * multiple_of
        count = (high - first) // multiple_of + 1
        if count > _MOST_MULTIPLES:
            raise SchemaError(
                f"multipleOf is supported where bounds leave at most {_MOST_MULTIPLES} multiples: "
                f"here are {count}"
            )
        return either(*(str(first + step * multiple_of) for step in range(count))) if count > 0 else None
    parts: list[Expression] = []
    if low < 0:
        parts.append(seq("-", _natural(max(1, -high), -low)))
    if high >= 0:
        parts.append(_natural(max(0, low), high))
    return either(*parts)


def number_between(least: Bound | None, most: Bound | None) -> Expression | None:
    """Numbers within bounds; None if there are none.

    Raises:
        SchemaError: If the bounds have too many digits.
    """
    if least is None and most is None:
        return ANY_NUMBER
    parts: list[Expression | None] = []
    zero = Decimal(0)
    if least is None or least[0] < 0:
        above = (-most[0], most[1]) if most is not None and most[0] < 0 else (zero, True)
        inner = _decimal(above, None if least is None else (-least[0], least[1]))
        parts.append(None if inner is None else seq("-", inner))
    if most is None or most[0] >= 0:
        above = least if least is not None and least[0] >= 0 else (zero, False)
        parts.append(_decimal(above, most))
    found = [part for part in parts if part is not None]
    return either(*found) if found else None


def _refuse_long(bound: int) -> None:
    if len(str(abs(bound))) > _MOST_BOUND_DIGITS:
        raise SchemaError(f"a bound of {len(str(abs(bound)))} digits: at most {_MOST_BOUND_DIGITS} work")


def _natural(low: int, high: int) -> Expression:
    """Integers from `low` to `high`, 0 <= low <= high."""
    parts: list[Expression] = []
    full: list[int] = []  # lengths whose numbers are all within the bounds
    for length in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (length - 1) if length > 1 else 0)
        last = min(high, 10**length - 1)
        if (first, last) == (10 ** (length - 1), 10**length - 1):
            full.append(length)
        else:
            parts.append(_same_length(str(first), str(last)))
    if full:
        parts.append(seq(chars("19"), times(DIGIT, full[0] - 1, full[-1] - 1)))
    return either(*parts)


def _same_length(low: str, high: str) -> Expression:
    """Digits from `low` to `high`, of equal length; neither bound where all digits are possible."""
    if not low:
        return Literal("")
    if set(low) == {"0"} and set(high) == {"9"}:
        return times(DIGIT, len(low), len(low))
    if low[0] == high[0]:
        return seq(low[0], _same_length(low[1:], high[1:]))
    rest = len(low) - 1
    parts = [seq(low[0], _same_length(low[1:], "9" * rest))]
    if int(high[0]) - int(low[0]) > 1:
        between = chars(f"{int(low[0]) + 1}{int(high[0]) - 1}")
        parts.append(seq(between, times(DIGIT, rest, rest)) if rest else between)
    parts.append(seq(high[0], _same_length("0" * rest, high[1:])))
    return either(*parts)


def _decimal(least: Bound, most: Bound | None) -> Expression | None:
    """Non-negative numbers within bounds."""
    most = (Decimal(max(_LARGEST, int(least[0]) + 1)), False) if most is None else most
    if least[0] > most[0]:
        return None
    low, low_fraction = _split(least[0])
    high, high_fraction = _split(most[0])
    parts: list[Expression | None] = []
    if low == high:
        inner = _fraction((low_fraction, least[1]), (high_fraction, most[1]))
        parts.append(None if inner is None else seq(str(low), inner))
    else:
        inner = _fraction((low_fraction, least[1]), None)
        parts.append(None if inner is None else seq(str(low), inner))
        if high - low > 1:
            parts.append(seq(_natural(low + 1, high - 1), maybe(".", times(DIGIT, 1, _MAX_DIGITS))))
        inner = _fraction(None, (high_fraction, most[1]))
        parts.append(None if inner is None else seq(str(high), inner))
    found = [part for part in parts if part is not None]
    return either(*found) if found else None


def _split(number: Decimal) -> tuple[int, str]:
    """Integer part and digits of the fraction, without zeros at the end."""
    whole = int(number)
    _refuse_long(whole)
    digits = f"{number - whole:f}".partition(".")[2].rstrip("0")
    if len(digits) > _MOST_BOUND_DIGITS:
        raise SchemaError(f"a bound of {len(digits)} decimal places: at most {_MOST_BOUND_DIGITS} work")
    return whole, digits


def _fraction(low: _Side, high: _Side) -> Expression | None:
    """The point and what follows it, or nothing where that is within bounds."""
    room = max(_MAX_DIGITS, *(len(side[0]) + 1 for side in (low, high) if side), 0)
    some = _digits(low, high, room)
    if _may_be_zero(low, high):
        return maybe(".", some) if some is not None else Literal("")
    return None if some is None else seq(".", some)


def _may_be_zero(low: _Side, high: _Side) -> bool:
    """Whether an end here, which means zeros, is within bounds."""
    above = low is None or (not low[0] and not low[1])
    return above and (high is None or bool(high[0]) or not high[1])


def _digits(low: _Side, high: _Side, room: int) -> Expression | None:
    """One digit or more, at most `room`; None if none fit."""
    if low is not None and not low[0] and not low[1]:
        low = None
    if low is None and high is None:
        return times(DIGIT, 1, room) if room else None
    if not room or high == ("", True):
        return None
    if low is None and high == ("", False):
        return times(Literal("0"), 1, room)
    nexts = [(digit, _below(low, digit), _above(high, digit)) for digit in range(10)]
    possible = [(digit, under[0], over[0]) for digit, under, over in nexts if under and over]
    parts: list[Expression] = []
    for (under, over), group in groupby(possible, key=lambda each: each[1:]):
        digits = [digit for digit, _, _ in group]
        first = chars(f"{digits[0]}{digits[-1]}")
        some = _digits(under, over, room - 1)
        if _may_be_zero(under, over):
            parts.append(first if some is None else seq(first, maybe(some)))
        elif some is not None:
            parts.append(seq(first, some))
    return either(*parts) if parts else None


def _below(low: _Side, digit: int) -> tuple[_Side] | None:
    """The lower bound after a digit, wrapped; None if the digit is too small."""
    if low is None:
        return (None,)
    first = int(low[0][:1] or "0")
    return None if digit < first else (None,) if digit > first else ((low[0][1:], low[1]),)


def _above(high: _Side, digit: int) -> tuple[_Side] | None:
    """The upper bound after a digit, wrapped; None if the digit is too large."""
    if high is None:
        return (None,)
    first = int(high[0][:1] or "0")
    return None if digit > first else (None,) if digit < first else ((high[0][1:], high[1]),)
