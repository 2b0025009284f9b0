"""How many characters an expression stands for."""

from __future__ import annotations

from stages.grammar.gbnf_parser import Chars, Choice, Expression, Literal, Repeat, Sequence


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
