"""Grammars of objects and arrays, in JSON or with values between tags."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mesh.structured_output.free_text import any_but
from mesh.structured_output.gbnf import NOTHING, SchemaError, chars, either, mapped, maybe, seq, times
from mesh.structured_output.strings import CHAR, lengths_of, of_length, pattern_of, quoted
from stages.grammar.gbnf_parser import MAX_REPEATS, Chars, Expression, complement

if TYPE_CHECKING:
    from mesh.structured_output.schema_resolver import Flat

Convert = Callable[[Any, str], Expression | None]
Name = Callable[[Expression], Expression]
_MAX_NAME_CHARS: Final = 256
_MAX_PROPERTIES: Final = 1000
_ESCAPED: Final = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F))
_SHORT_ESCAPES: Final = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_TAG_START: Final = "<"
_BREAK: Final = "\n"
_KEY: Final = times(chars("az", "AZ", "09", "_", "-"), 1, 64)
_NOT_IN_KEYS: Final = frozenset("<>\"'\n")
_MAX_KEY_CHARS: Final = 128


@dataclass(frozen=True)
class TagForm:
    """Form of the arguments of a call."""

    key: str
    """Tag before a name."""
    value: Expression
    """What comes between the name and the value."""
    end: str
    """Tag behind the value."""
    text: Expression
    """Grammar of any text that holds no tag of a call."""
    is_padded: bool
    """Whether a line break before and behind a value is no part of it."""

    def closed(self, value: Expression | str, *, is_exact: bool = True) -> Expression:
        """A value with all that comes before and behind it.

        Args:
            value: Grammar of the value.
            is_exact: Whether a line break that is left out behind it would make a difference.
        """
        padding = _BREAK if self.is_padded else NOTHING
        last = padding if is_exact or not self.is_padded else maybe(_BREAK)
        return seq(padding, value, last, self.end, maybe(_BREAK))

    def string_of(self, flat: Flat) -> Expression | None:
        """Grammar of a string schema, with its end tag; None if nothing is valid.

        Raises:
            SchemaError: If a grammar cannot express it.
        """
        least, most = lengths_of(flat)
        if most is not None and least > most:
            return None
        pattern = pattern_of(flat)
        if pattern is not None:
            return self.closed(_without_tags(of_length(pattern, least, most)))
        if (least, most) == (0, None):
            return self.closed(self.text, is_exact=False)
        return self.closed(times(any_but(_TAG_START), least, most))


def free_object(value: Expression, space: Expression) -> Expression:
    """Any names, each with such a value."""
    pair = seq('"', times(CHAR, 0, None), '":', space, value)
    return seq("{", space, maybe(pair, times(seq(",", space, pair), 0, None), space), "}")


def object_of(flat: Flat, convert: Convert, name: Name, space: Expression) -> Expression | None:
    """Grammar of an object schema; None if nothing is valid.

    Args:
        flat: The schema.
        convert: Returns the grammar of a schema, given its path from here.
        name: Makes a rule of an expression, and returns a reference to it.
        space: Grammar of white space between tokens.

    Raises:
        SchemaError: If a grammar cannot express it.
    """
    schemas, others = properties_of(flat)
    required = set(flat.get("required", ()))
    pairs: list[tuple[Expression, bool]] = []
    for key, schema in schemas.items():
        value = convert(schema, f"properties/{key}")
        if value is not None:
            pairs.append((seq(f"{quoted(key)}:", space, value), key in required))
        elif key in required:
            return None
    other = None if others is False else convert(others, "additionalProperties")
    extra = None if other is None else seq('"', _any_name_but(schemas, name), '":', space, other)
    most = most_extras(flat, pairs, has_extras=extra is not None)
    body = _pairs(pairs, extra, most, name, space)
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


def _pairs(
    pairs: list[tuple[Expression, bool]],
    extra: Expression | None,
    most: int | None,
    name: Name,
    space: Expression,
) -> Expression:
    """Everything between the braces, the last space included.

    Built from the last pair to the first, in two forms: `rest` follows a pair, comma first; `first` is used
    where there is no pair before.
    """
    comma = seq(",", space)
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


def _any_name_but(names: dict[str, Any], name: Name) -> Expression:
    """A name other than these. Each letter has a single form, so no name can be written with escapes."""
    tree: dict[str, Any] = {}
    for known in names:
        if len(known) > _MAX_NAME_CHARS:
            raise SchemaError(f"properties has a name of more than {_MAX_NAME_CHARS} characters")
        node = tree
        for letter in known:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _not_in(tree, name(times(_letter_but(()), 0, None)), name)


def _not_in(tree: dict[str, Any], any_letters: Expression, name: Name) -> Expression:
    letters = [letter for letter in tree if letter]
    options: list[Expression] = [seq(_letter_but(letters), any_letters)]
    if "" not in tree:
        options.append(NOTHING)
    options += [seq(quoted(letter)[1:-1], _not_in(tree[letter], any_letters, name)) for letter in letters]
    return name(either(*options))


def _letter_but(letters: Collection[str]) -> Expression:
    """A letter other than these; those without a short escape are left out."""
    plain = Chars(complement([*_ESCAPED, *((ord(letter), ord(letter)) for letter in letters)]))
    signs = [sign for letter, sign in _SHORT_ESCAPES.items() if letter not in letters]
    return either(plain, seq("\\", chars(*signs))) if signs else plain


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


def _without_tags(expression: Expression) -> Expression:
    """An expression without `<` where it allows other letters in its place."""

    def change(each: Expression) -> Expression:
        if not isinstance(each, Chars):
            return each
        start = ord(_TAG_START)
        rest = [
            part
            for low, high in each.ranges
            for part in ((low, min(high, start - 1)), (max(low, start + 1), high))
            if part[0] <= part[1]
        ]
        return Chars(tuple(rest)) if rest else each

    return mapped(expression, change)


def tagged_object_of(flat: Flat, convert: Convert, form: TagForm) -> Expression | None:
    """Grammar of an object schema; None if nothing is valid.

    Names that the schema lacks are written only where it has none at all.

    Args:
        flat: The schema.
        convert: Returns the grammar of a schema's values, with their tags, given its path from here.
        form: Form of the arguments.

    Raises:
        SchemaError: If a grammar cannot express it.
    """
    schemas, others = properties_of(flat)
    required = set(flat.get("required", ()))
    pairs: list[tuple[Expression, bool]] = []
    for key, schema in schemas.items():
        if not key or key != key.strip() or len(key) > _MAX_KEY_CHARS or _NOT_IN_KEYS & set(key):
            raise SchemaError(f"properties: the name {key[:64]!r} cannot be written in a tag")
        value = convert(schema, f"properties/{key}")
        if value is not None:
            pairs.append((seq(f"{form.key}{key}", form.value, value), key in required))
        elif key in required:
            return None
    other = None if schemas or others is False else convert(others, "additionalProperties")
    most = most_extras(flat, pairs, has_extras=other is not None)
    found = [pair if is_required else maybe(pair) for pair, is_required in pairs]
    if other is not None and most != 0:
        found.append(times(seq(form.key, _KEY, form.value, other), 0, most))
    return seq(*found) if found else NOTHING
