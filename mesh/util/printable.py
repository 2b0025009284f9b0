"""Text for terminals, without the characters that control them.

Much of what is printed was chosen by clients, models, their files or other hosts.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

# C0 and C1 controls but for tab and line ends, controls of the writing direction (Unicode's Bidi_Control) and
# their deprecated kin, separators of lines and paragraphs, and surrogates, which no output can encode.
_CONTROLS: Final = re.compile(
    "[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff]|\r(?!\n)"
)


def printable(text: str) -> str:
    """A text with escapes in place of control characters; tabs and line ends stay."""
    return _CONTROLS.sub(lambda found: _escape(found[0]), text)


def one_line(text: str) -> str:
    """A text with escapes in place of all that is not `str.isprintable`, such as tabs and line ends."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def printable_values(fields: Mapping[str, object]) -> dict[str, object]:
    """Fields of a log event whose texts, and representations of other values, are in one line each."""
    return {name: _printable_value(value) for name, value in fields.items()}


def say(text: object, *, err: bool = False) -> None:
    """Print a text and a line end.

    Args:
        text: Its control characters are printed as escapes.
        err: Whether it is for standard error.
    """
    click.echo(printable(str(text)), err=err)


def _printable_value(value: object) -> object:
    if isinstance(value, str):
        return one_line(value)
    shown = repr(value)
    return value if shown.isprintable() else one_line(shown)


def _escape(char: str) -> str:
    # As in JSON and TOML, so that a quoted value stays what it is.
    code = ord(char)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
