"""Grammars of objects and arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from mesh.structured_output.gbnf import NOTHING, SchemaError, either, maybe, seq, times
from stages.grammar.gbnf_parser import MAX_REPEATS, Expression

if TYPE_CHECKING:
    from mesh.structured_output.notations import Notation
    from mesh.structured_output.schema_resolver import Flat

Convert = Callable[[Any, str], Expression | None]
Name = Callable[[Expression], Expression]
_MAX_PROPERTIES: Final = 1000


def free_object(value: Expression, notation: Notation) -> Expression:
    """Any names, each with such a value."""
    space = notation.space
    pair = seq(notation.any_key() or NOTHING, ":", space, value)
    return seq("{", space, maybe(pair, times(seq(",", space, pair), 0, None), space), "}")


def object_of(flat: Flat, convert: Convert, name: Name, notation: Notation) -> Expression | None:
    """Grammar of an object schema; None if nothing is valid.

    Args:
        flat: The schema.
        convert: Returns the grammar of a schema, given its path from here.
        name: Makes a rule of an expression, and returns a reference to it.
        notation: Notation of values.

    Raises:
        SchemaError: If a grammar cannot express it.
    """
    space = notation.space
    schemas, others = properties_of(flat)
    required = set(flat.get("required", ()))
    pairs: list[tuple[Expression, bool]] = []
    for key, schema in schemas.items():
        value = convert(schema, f"properties/{key}")
        if value is not None:
            pairs.append((seq(notation.key(key), ":", space, value), key in required))
        elif key in required:
            return None
    other = None if others is False else convert(others, "additionalProperties")
    other_key = None if other is None else notation.other_key(schemas, name)
    extra = None if other is None or other_key is None else seq(other_key, ":", space, other)
    most = most_extras(flat, pairs, has_extras=extra is not None)
    body = joined_pairs(pairs, extra, most, name, comma=seq(",", space), space=space)
    return seq("{", space, "}") if body == NOTHING else seq("{", space, body, "}")


def properties_of(flat: Flat) -> tuple[dict[str, Any], Any]:
    """The named properties, required ones without a schema too, and the schema of all others.

    Raises:
        SchemaError: If they are too many.
    """
    schemas = dict(flat.get("properties", {}))
    # If others are not mentioned, none are written beside named ones, nor if they were to be "evaluated".
    others = flat.get("additionalProperties", not schemas and "unevaluatedProperties" not in flat)
    for name in flat.get("required", ()):
        schemas.setdefault(name, flat.get("additionalProperties", True))
    if len(schemas) > _MAX_PROPERTIES:
        raise SchemaError(f"properties names {len(schemas)}: at most {_MAX_PROPERTIES} work")
    return schemas, others


def most_extras(flat: Flat, pairs: list[tuple[Expression, bool]], *, has_extras: bool) -> int | None:
    """Most other properties; None is no bound.

    Raises:
        SchemaError: If the number of properties would have to be counted among optional ones.
    """
    num_required = sum(is_required for _, is_required in pairs)
    least, most = flat.get("minProperties", 0), flat.get("maxProperties")
    if least > num_required:
        raise SchemaError(
            f"minProperties is {least}, but {num_required} are required: a grammar cannot count optional ones"
        )
    if most is None:
        return None
    if len(pairs) > num_required and (most < len(pairs) or has_extras):
        raise SchemaError(f"maxProperties is {most}: a grammar cannot count optional properties")
    if most < num_required:
        raise SchemaError(f"maxProperties is {most}, but {num_required} are required")
    return int(most) - len(pairs)


def joined_pairs(
    pairs: list[tuple[Expression, bool]],
    extra: Expression | None,
    most: int | None,
    name: Name,
    *,
    comma: Expression,
    space: Expression = NOTHING,
) -> Expression:
    """Everything between the braces, the last space included.

    Built from the last pair to the first, in two forms: `rest` follows a pair, comma first; `first` is used
    where there is no pair before.

    Args:
        pairs: Known properties, and whether each is required.
        extra: Any other property; None for none.
        most: Most other properties; None is no bound.
        name: Makes a rule of an expression, and returns a reference to it.
        comma: What is between two properties.
        space: What is behind the last one.
    """
    rest: Expression = NOTHING
    firsts: list[Expression] = []
    may_be_empty = True
    if extra is not None and most != 0:
        rest = name(times(seq(comma, extra), 0, most))
        firsts = [seq(extra, times(seq(comma, extra), 0, None if most is None else most - 1))]
    for pair, is_required in reversed(pairs):
        here = seq(pair, rest)
        if is_required:
            rest, firsts, may_be_empty = seq(comma, here), [here], False
        else:
            firsts = [here, *firsts]
            rest = maybe(comma, here) if rest == NOTHING else either(seq(comma, here), rest)
        # Each is referred to twice.
        rest = name(rest)
    if not firsts:
        return NOTHING
    whole = seq(either(*firsts), space)
    return maybe(whole) if may_be_empty else whole


def array_of(flat: Flat, convert: Convert, name: Name, space: Expression) -> Expression | None:
    """Grammar of an array schema; None if nothing is valid.

    Raises:
        SchemaError: If a grammar cannot express it.
    """
    least, most = flat.get("minItems", 0), flat.get("maxItems")
    if flat.get("uniqueItems") and (most is None or most > 1):
        raise SchemaError("uniqueItems cannot be expressed by a grammar: leave it out")
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
        # No item follows one that is impossible.
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
    """Items and commas between them, at least one item; None if there can be none."""
    least, most = counts
    comma = seq(",", space)
    rest: Expression = NOTHING
    if other is not None:
        # After all known ones, or after the first other.
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
