"""Grammars of objects whose values are written between tags, texts without quotes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mesh.structured_output.gbnf import NOTHING, SchemaError, chars, either, maybe, seq, times
from mesh.structured_output.objects import most_extras, properties_of
from mesh.structured_output.strings import lengths_of, of_length, pattern_of
from stages.grammar.gbnf_parser import Chars, Choice, Expression, Repeat, Sequence, complement

if TYPE_CHECKING:
    from collections.abc import Collection

    from mesh.structured_output.objects import Convert
    from mesh.structured_output.schema_resolver import Flat

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
        return self.closed(times(_but(_TAG_START), least, most))


def text_without(marks: Collection[str]) -> Expression:
    """Any text in which none of the marks occurs.

    Args:
        marks: Each begins with `<` and has no other one.
    """
    tree: dict[str, Any] = {}
    for mark in marks:
        node = tree
        for letter in mark[1:]:
            node = node.setdefault(letter, {})
        node[""] = {}
    plain = times(_but(_TAG_START), 0, None)
    return seq(plain, times(seq(_TAG_START, _behind(tree, plain)), 0, None))


def _behind(node: dict[str, Any], plain: Expression) -> Expression:
    """What may follow the beginning of a mark: nothing more of it, or more that is not all of it."""
    longer = [
        seq(letter, _behind(inner, plain)) for letter, inner in node.items() if letter and "" not in inner
    ]
    # Nothing follows before the end, or before the beginning of another.
    return either(NOTHING, seq(_but(_TAG_START, *filter(None, node)), plain), *longer)


def _but(*letters: str) -> Chars:
    return Chars(complement([(ord(letter), ord(letter)) for letter in letters]))


def _without_tags(expression: Expression) -> Expression:
    """An expression without `<` where it allows other letters in its place."""
    match expression:
        case Chars(ranges):
            start = ord(_TAG_START)
            rest = [
                part
                for low, high in ranges
                for part in ((low, min(high, start - 1)), (max(low, start + 1), high))
                if part[0] <= part[1]
            ]
            return Chars(tuple(rest)) if rest else expression
        case Sequence(items):
            return Sequence(tuple(_without_tags(item) for item in items))
        case Choice(options):
            return Choice(tuple(_without_tags(option) for option in options))
        case Repeat(item, least, most):
            return Repeat(_without_tags(item), least, most)
        case _:
            return expression


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
