"""Free text of a custom tool's call, out of the JSON arguments in which the model writes it."""

from __future__ import annotations

import json
import re
from typing import Final

# Up to the text: an object with one member, whatever the model calls it.
_HEAD: Final = re.compile(r'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*"')
_PAIR_CHARS: Final = 12
_UNIT_CHARS: Final = 6


class FreeTextReader:
    r"""Reads the text of one call incrementally.

    Arguments that are no object with a text are passed on as they are.

    Example:
        >>> reader = FreeTextReader()
        >>> reader.push('{"input": "a'), reader.push('\\u0062"'), reader.push("}"), reader.flush()
        ('a', 'b', '', '')
    """

    def __init__(self) -> None:
        self._head = ""
        self._escape = ""
        self._is_inside = False
        self._is_over = False

    def push(self, arguments: str) -> str:
        """More of the arguments; returns the text that becomes final."""
        return "".join(map(self._read, arguments))

    def flush(self) -> str:
        """The text held back, at the end."""
        held, self._head, self._escape = self._head + self._escape, "", ""
        return held

    def _read(self, char: str) -> str:
        if self._is_over:
            return ""
        if not self._is_inside:
            self._head += char
            if _HEAD.fullmatch(self._head):
                self._is_inside, self._head = True, ""
            return ""
        if self._escape:
            return self._escaped(char)
        if char == "\\":
            self._escape = char
            return ""
        self._is_over = char == '"'
        return "" if self._is_over else char

    def _escaped(self, char: str) -> str:
        self._escape += char
        found = self._escape
        is_unit = found[1] == "u"
        if is_unit and len(found) < _UNIT_CHARS:
            return ""
        if is_unit and found[2:4].lower() in ("d8", "d9", "da", "db") and len(found) < _PAIR_CHARS:
            return ""
        self._escape = ""
        try:
            text: str = json.loads(f'"{found}"')
        except ValueError:
            return found
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def free_text(arguments: str) -> str:
    """The text of a whole call."""
    reader = FreeTextReader()
    return reader.push(arguments) + reader.flush()
