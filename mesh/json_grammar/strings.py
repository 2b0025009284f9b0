"""Strings: any, of so many characters, of a pattern, or of a format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh.json_grammar.errors import SchemaError
from mesh.json_grammar.expressions import seq, times
from mesh.json_grammar.formats import PATTERNS
from mesh.json_grammar.regular_expression import parse_pattern
from mesh.json_grammar.string_grammar import CHAR, in_string
from mesh.json_grammar.text_length import text_length
from stages.grammar.gbnf_parser import MAX_REPEATS, Expression, Repeat, Sequence

if TYPE_CHECKING:
    from mesh.json_grammar.flatten import Flat


def string_of(flat: Flat) -> Expression | None:
    """What a string schema allows, quotes included; None if nothing. Formats that are not known say nothing.

    Raises:
        SchemaError: If a grammar cannot say it.
    """
    least, most = flat.get("minLength", 0), flat.get("maxLength")
    if most is not None and least > most:
        return None
    if max(least, most or 0) > MAX_REPEATS:
        raise SchemaError(
            f"{'maxLength' if most else 'minLength'} is {max(least, most or 0)}: at most {MAX_REPEATS} works"
        )
    form = PATTERNS.get(flat.get("format", ""))
    if "pattern" in flat and form is not None:
        raise SchemaError("pattern and format cannot be enforced together: leave one out")
    pattern = flat.get("pattern", form)
    if pattern is None:
        return seq('"', times(CHAR, least, most), '"')
    return seq('"', in_string(_of_length(parse_pattern(pattern), least, most)), '"')


def _of_length(expression: Expression, least: int, most: int | None) -> Expression:
    """The part of an expression with so many characters.

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
        "pattern and minLength or maxLength cannot be enforced together here: say the length in the pattern"
    )
