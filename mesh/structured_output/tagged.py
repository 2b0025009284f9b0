"""Grammars of arguments that are values between tags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mesh.structured_output.gbnf import SchemaError, either, maybe, seq, times
from mesh.structured_output.notations import BARE_KEY, JSON
from mesh.structured_output.objects import joined_pairs, most_extras, properties_of
from mesh.structured_output.schema_resolver import type_of
from stages.grammar.gbnf_parser import MAX_REPEATS

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.structured_output.notations import Notation, RawText
    from mesh.structured_output.objects import Convert, Name
    from mesh.structured_output.schema_resolver import Flat
    from stages.grammar.gbnf_parser import Expression

_BREAK: Final = "\n"
_NOT_IN_KEYS: Final = frozenset("<>\"'\n")
_MAX_KEY_CHARS: Final = 128


@dataclass(frozen=True)
class TagForm:
    """Form of the arguments of a call."""

    key: Expression
    """Before a name."""
    value: Callable[[str], Expression]
    """Returns what is between a name and its value, by the value's type in JSON."""
    end: Callable[[str], Expression]
    """Returns what is behind a value, by its name."""
    separator: Expression
    """Between arguments."""
    text: RawText | None
    """Texts as they are; None if they are written in the notation, too."""
    notation: Notation = JSON
    """Notation of other values."""
    has_types: bool = False
    """Whether what is before a value tells its type."""
    ends_by_name: bool = False
    """Whether what is behind a value has its name."""
    is_padded: bool = False
    """Whether a line break before and behind a value is no part of it."""
    item: str = ""
    """Name of a list's items, where objects and lists are values between tags in turn; else empty."""

    def padded(self, value: Expression | str, *, is_exact: bool = True) -> Expression:
        """A value with the line breaks around it.

        Args:
            value: Grammar of the value.
            is_exact: Whether a line break that is left out behind it would make a difference.
        """
        if not self.is_padded:
            return seq(value)
        return seq(_BREAK, value, _BREAK if is_exact else maybe(_BREAK))

    def string_of(self, flat: Flat) -> Expression | None:
        """Grammar of a string schema, with what is before its value; None if nothing is valid.

        Raises:
            SchemaError: If a grammar cannot express it.
        """
        found = (self.notation.text if self.text is None else self.text.string_of)(flat)
        if found is None:
            return None
        is_exact = self.text is None or found != self.text.whole
        return seq(self.value("string"), self.padded(found, is_exact=is_exact))

    def constant(self, value: Any) -> Expression:
        """One value, with what is before it.

        Raises:
            SchemaError: If it cannot be written.
        """
        is_raw = self.text is not None and isinstance(value, str)
        written = value if is_raw else self.notation.constant(value)
        return seq(self.value(type_of(value)), self.padded(written))


def tagged_array_of(flat: Flat, convert: Convert, form: TagForm) -> Expression | None:
    """Grammar of an array schema whose items are between tags; None if nothing is valid.

    Args:
        flat: The schema.
        convert: As for `tagged_object_of`.
        form: Form of the arguments, with a name of items.

    Raises:
        SchemaError: If a grammar cannot express it.
    """
    if "prefixItems" in flat or flat.get("uniqueItems"):
        raise SchemaError("prefixItems and uniqueItems cannot be expressed between tags: leave them out")
    least, most = flat.get("minItems", 0), flat.get("maxItems")
    if max(least, most or 0) > MAX_REPEATS:
        raise SchemaError(f"{max(least, most or 0)} items are too many: at most {MAX_REPEATS} work")
    if most is not None and most < least:
        return None
    value = convert(flat.get("items", True), "items")
    if value is None or most == 0:
        return None if least else seq("[]")
    items = times(seq(form.key, form.item, value, form.end(form.item)), max(1, least), most)
    # Of no items nothing is to be seen between tags.
    return items if least else either(items, "[]")


def tagged_object_of(flat: Flat, convert: Convert, name: Name, form: TagForm) -> Expression | None:
    """Grammar of an object schema; None if nothing is valid.

    Names that the schema lacks are written only where it has none at all.

    Args:
        flat: The schema.
        convert: Returns the grammar of a schema's values, with what is before them, given its path from here.
        name: Makes a rule of an expression, and returns a reference to it.
        form: Form of the arguments.

    Raises:
        SchemaError: If a grammar cannot express it.
    """
    schemas, others = properties_of(flat)
    required = set(flat.get("required", ()))
    pairs: list[tuple[Expression, bool]] = []
    for key, schema in schemas.items():
        is_tag = key == key.strip() and len(key) <= _MAX_KEY_CHARS and not _NOT_IN_KEYS & set(key)
        if not key or not (is_tag if form.text is not None else key.isidentifier()):
            raise SchemaError(f"properties: the name {key[:64]!r} cannot be written in a tag")
        value = convert(schema, f"properties/{key}")
        if value is not None:
            pairs.append((seq(form.key, key, value, form.end(key)), key in required))
        elif key in required:
            return None
    other: Any = None
    if not schemas and others is not False and not form.ends_by_name:
        other = convert(others, "additionalProperties")
    most = most_extras(flat, pairs, has_extras=other is not None)
    extra = None if other is None else seq(form.key, BARE_KEY, other, form.end(""))
    return joined_pairs(pairs, extra, most, name, comma=form.separator)
