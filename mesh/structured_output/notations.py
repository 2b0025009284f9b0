"""Notations of values: JSON, JSON with bare keys and texts between marks, and Python's literals."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mesh.structured_output.free_text import any_but
from mesh.structured_output.gbnf import NOTHING, SchemaError, chars, either, mapped, maybe, seq, times
from mesh.structured_output.strings import CHAR, in_string, lengths_of, of_length, pattern_of, quoted
from stages.grammar.gbnf_parser import Chars, Expression, Literal, Ref, complement

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from mesh.structured_output.schema_resolver import Flat

    Rule = Callable[[Expression], Expression]

SPACE: Final = Ref("space")
SPACE_RULE: Final = maybe(either(" ", seq("\n", times(chars(" ", "\t"), 0, 20))))
"""At most a space, or a line break and blanks."""
BARE_KEY: Final = times(chars("az", "AZ", "09", "_", "-"), 1, 64)
"""A name that stands without quotes, or in a tag."""
_BARE: Final = re.compile(r"[\w.$-]{1,64}")
_MAX_NAME_CHARS: Final = 256
_ESCAPED: Final = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F))
_SHORT_ESCAPES: Final = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_PYTHON_QUOTE: Final = "'"
_PYTHON_PLAIN: Final = complement([(0, 0x1F), (0x27, 0x27), (0x5C, 0x5C), (0x7F, 0x7F)])
_PYTHON_CHAR: Final = either(Chars(_PYTHON_PLAIN), seq("\\", chars(_PYTHON_QUOTE, "\\", "n", "r", "t")))
_PYTHON_ESCAPES: Final = {_PYTHON_QUOTE: "\\'", "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


@dataclass(frozen=True)
class RawText:
    """Texts as they are, without escapes, up to a mark."""

    whole: Expression
    """Grammar of any text that holds no mark."""
    starts: frozenset[str]
    """Characters with which marks begin."""

    def string_of(self, flat: Flat) -> Expression | None:
        """Grammar of a string schema; None if nothing is valid.

        Raises:
            SchemaError: If a grammar cannot express it.
        """
        least, most = lengths_of(flat)
        if most is not None and least > most:
            return None
        pattern = pattern_of(flat)
        if pattern is not None:
            return self._without_starts(of_length(pattern, least, most))
        return self.whole if (least, most) == (0, None) else times(any_but(self.starts), least, most)

    def letters(self, expression: Expression) -> Expression:
        """A part of a text, given as an expression over its characters.

        Raises:
            SchemaError: If a mark could begin in it.
        """

        def require_none(each: Expression) -> Expression:
            if isinstance(each, Literal) and self.starts & set(each.text):
                raise SchemaError(reason)
            return each

        starts = " ".join(sorted(self.starts))
        reason = f"texts in which {starts} may be cannot be held to a grammar in this model's format of calls"
        if self._without_starts(mapped(expression, require_none)) != expression:
            raise SchemaError(reason)
        return expression

    def _without_starts(self, expression: Expression) -> Expression:
        """An expression without beginnings of marks where it allows other characters in their place."""
        allowed = any_but(self.starts)

        def change(each: Expression) -> Expression:
            if not isinstance(each, Chars):
                return each
            rest = [
                (max(low, first), min(high, last))
                for low, high in each.ranges
                for first, last in allowed.ranges
                if max(low, first) <= min(high, last)
            ]
            return Chars(tuple(rest)) if rest else each

        return mapped(expression, change)


class Notation(ABC):
    """How values are written."""

    true = "true"
    false = "false"
    null = "null"
    space: Expression = SPACE
    """White space between tokens."""

    @abstractmethod
    def text(self, flat: Flat) -> Expression | None:
        """Grammar of a string schema; None if nothing is valid.

        Raises:
            SchemaError: If a grammar cannot express it.
        """

    @abstractmethod
    def text_of(self, value: str) -> Expression | str:
        """One text.

        Raises:
            SchemaError: If it cannot be written.
        """

    @abstractmethod
    def letters(self, expression: Expression) -> Expression:
        """A part of a text, given as an expression over its characters.

        Raises:
            SchemaError: If it cannot be written.
        """

    @abstractmethod
    def enclosed(self, letters: Expression) -> Expression:
        """A text of such parts, with what is around it."""

    def key(self, name: str) -> Expression | str:
        """Name of a property.

        Raises:
            SchemaError: If it cannot be written.
        """
        return self.text_of(name)

    def any_key(self) -> Expression | None:
        """Any name of a property."""
        return self.text({})

    def other_key(self, names: Collection[str], rule: Rule) -> Expression | None:  # noqa: ARG002 - JSON's does
        """Name of a property that is none of some; None if no grammar tells them apart.

        Args:
            names: The known names.
            rule: Makes a rule of an expression, and returns a reference to it.

        Raises:
            SchemaError: If a name is too long for a grammar.
        """
        return None if names else self.any_key()

    def constant(self, value: Any) -> Expression:
        """One value, with optional white space.

        Raises:
            SchemaError: If it cannot be written.
        """
        match value:
            case None:
                return seq(self.null)
            case bool():
                return seq(self.true if value else self.false)
            case str():
                return seq(self.text_of(value))
            case dict():
                items = [
                    seq(self.key(key), ":", self.space, self.constant(item)) for key, item in value.items()
                ]
                return self._container("{", items, "}")
            case list():
                return self._container("[", [self.constant(item) for item in value], "]")
            case _:
                return seq(quoted(value))

    def _container(self, begin: str, items: list[Expression], end: str) -> Expression:
        separated = [part for item in items for part in (seq(",", self.space), item)][1:]
        return seq(begin, self.space, *separated, *([self.space] if items else []), end)


class _Json(Notation):
    def text(self, flat: Flat) -> Expression | None:
        least, most = lengths_of(flat)
        if most is not None and least > most:
            return None
        pattern = pattern_of(flat)
        if pattern is None:
            return self.enclosed(times(CHAR, least, most))
        return self.enclosed(self.letters(of_length(pattern, least, most)))

    def text_of(self, value: str) -> str:
        return quoted(value)

    def letters(self, expression: Expression) -> Expression:
        return in_string(expression)

    def enclosed(self, letters: Expression) -> Expression:
        return seq('"', letters, '"')

    def other_key(self, names: Collection[str], rule: Rule) -> Expression:
        return seq('"', _any_name_but(names, rule), '"')


JSON: Final[Notation] = _Json()


class _Python(Notation):
    true, false, null = "True", "False", "None"

    def text(self, flat: Flat) -> Expression | None:
        least, most = lengths_of(flat)
        if most is not None and least > most:
            return None
        pattern = pattern_of(flat)
        if pattern is None:
            return self.enclosed(times(_PYTHON_CHAR, least, most))
        return self.enclosed(self.letters(of_length(pattern, least, most)))

    def text_of(self, value: str) -> str:
        return f"{_PYTHON_QUOTE}{_python_letters(value)}{_PYTHON_QUOTE}"

    def letters(self, expression: Expression) -> Expression:
        return in_string(expression, _python_letters, _PYTHON_PLAIN)

    def enclosed(self, letters: Expression) -> Expression:
        return seq(_PYTHON_QUOTE, letters, _PYTHON_QUOTE)


PYTHON: Final[Notation] = _Python()


@dataclass(frozen=True)
class BareKeys(Notation):
    """Objects with bare keys, and texts as they are between two equal marks; no white space."""

    quote: str
    """The mark around texts."""
    quote_rule: Expression
    """Grammar of the mark, which may be a control token."""
    raw: RawText
    """Texts between marks."""
    space: Expression = NOTHING

    def text(self, flat: Flat) -> Expression | None:
        """See `Notation`."""
        found = self.raw.string_of(flat)
        return None if found is None else self.enclosed(found)

    def text_of(self, value: str) -> Expression:
        """See `Notation`."""
        if self.quote in value:
            raise SchemaError(f"enum: {value[:64]!r} cannot be written between {self.quote}")
        return seq(self.quote_rule, value, self.quote_rule)

    def letters(self, expression: Expression) -> Expression:
        """See `Notation`."""
        return self.raw.letters(expression)

    def enclosed(self, letters: Expression) -> Expression:
        """See `Notation`."""
        return seq(self.quote_rule, letters, self.quote_rule)

    def key(self, name: str) -> str:
        """See `Notation`."""
        if _BARE.fullmatch(name) is None:
            raise SchemaError(f"properties: the name {name[:64]!r} cannot be written without quotes")
        return name

    def any_key(self) -> Expression:
        """See `Notation`."""
        return BARE_KEY


def _python_letters(text: str) -> str:
    return "".join(
        _PYTHON_ESCAPES.get(letter, letter if letter >= " " and letter != "\x7f" else f"\\x{ord(letter):02x}")
        for letter in text
    )


def _any_name_but(names: Collection[str], rule: Rule) -> Expression:
    """A name other than these. Each letter has a single form, so no name can be written with escapes."""
    tree: dict[str, Any] = {}
    for known in names:
        if len(known) > _MAX_NAME_CHARS:
            raise SchemaError(f"properties has a name of more than {_MAX_NAME_CHARS} characters")
        node = tree
        for letter in known:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _not_in(tree, rule(times(_letter_but(()), 0, None)), rule)


def _not_in(tree: dict[str, Any], any_letters: Expression, rule: Rule) -> Expression:
    letters = [letter for letter in tree if letter]
    options: list[Expression] = [seq(_letter_but(letters), any_letters)]
    if "" not in tree:
        options.append(NOTHING)
    options += [seq(quoted(letter)[1:-1], _not_in(tree[letter], any_letters, rule)) for letter in letters]
    return rule(either(*options))


def _letter_but(letters: Collection[str]) -> Expression:
    """A letter other than these; those without a short escape are left out."""
    plain = Chars(complement([*_ESCAPED, *((ord(letter), ord(letter)) for letter in letters)]))
    signs = [sign for letter, sign in _SHORT_ESCAPES.items() if letter not in letters]
    return either(plain, seq("\\", chars(*signs))) if signs else plain
