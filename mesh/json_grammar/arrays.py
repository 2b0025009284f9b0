"""Arrays: first the items that have a schema of their own, then as many others as may come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh.json_grammar.errors import SchemaError
from mesh.json_grammar.expressions import NOTHING, maybe, seq, times
from stages.grammar.gbnf_parser import MAX_REPEATS, Expression

if TYPE_CHECKING:
    from mesh.json_grammar.flatten import Flat
    from mesh.json_grammar.objects import Convert, Name


def array_of(flat: Flat, convert: Convert, name: Name, space: Expression) -> Expression | None:
    """What an array schema allows; None if nothing.

    Raises:
        SchemaError: If a grammar cannot say it.
    """
    least, most = flat.get("minItems", 0), flat.get("maxItems")
    if flat.get("uniqueItems") and (most is None or most > 1):
        raise SchemaError("uniqueItems cannot be said by a grammar: leave it out")
    if max(least, most or 0) > MAX_REPEATS:
        raise SchemaError(f"{max(least, most or 0)} items are too many: at most {MAX_REPEATS} work")
    first = [
        convert(schema, f"prefixItems/{place}") for place, schema in enumerate(flat.get("prefixItems", ()))
    ]
    others = flat.get("items", not first)
    other = None if others is False or most == 0 else convert(others, "items")
    known: list[Expression] = []
    for item in first if most is None else first[:most]:
        if item is None:
            break
        known.append(item)
    if other is None or len(known) < len(first):
        # Behind an item that cannot be there is none.
        other, most = None, len(known) if most is None else min(most, len(known))
    if most is not None and least > most:
        return None
    body = _body(known, other, (least, most), name, space)
    if body is None:
        return seq("[", space, "]")
    return seq("[", space, seq(body, space) if least else maybe(body, space), "]")


def _body(
    known: list[Expression],
    other: Expression | None,
    counts: tuple[int, int | None],
    name: Name,
    space: Expression,
) -> Expression | None:
    """The items and the commas between them, at least one item; None if there can be none."""
    least, most = counts
    comma = seq(",", space)
    rest: Expression = NOTHING
    if other is not None:
        # Behind all the known ones, or behind the first other.
        num_before = max(1, len(known))
        rest = times(
            seq(comma, other), max(0, least - num_before), None if most is None else max(0, most - num_before)
        )
    for place in reversed(range(1, len(known))):
        here = seq(comma, known[place], rest)
        rest = here if place < least else name(maybe(here))
    if known:
        return seq(known[0], rest)
    return None if other is None else seq(other, rest)
