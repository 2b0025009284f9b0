"""Free text of a custom tool's call, out of the JSON arguments in which the model writes it."""

from __future__ import annotations

import json
import re
from typing import Final

# Up to the text: an object with one member, whatever the model calls it.
_HEAD: Final = re.compile(r'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*"')
_MOST_HEAD_CHARS: Final = 256
# Of an escape by number, and of the two that stand for one character.
_UNIT_CHARS: Final = 6
_PAIR_CHARS: Final = 12
_HIGH: Final = ("d8", "d9", "da", "db")


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
        # Whether the arguments are passed on as they are.
        self._is_raw = False

    def push(self, arguments: str) -> str:
        """More of the arguments; returns the text that becomes final."""
        return "".join(map(self._read, arguments))

    def flush(self) -> str:
        """The text held back, at the end."""
        held, self._head, self._escape = self._head + self._escape, "", ""
        return held

    def _read(self, char: str) -> str:
        if self._is_raw:
            return char
        if self._is_over:
            return ""
        if not self._is_inside:
            return self._begin(char)
        if self._escape:
            return self._escaped(char)
        if char == "\\":
            self._escape = char
            return ""
        self._is_over = char == '"'
        return "" if self._is_over else char

    def _begin(self, char: str) -> str:
        self._head += char
        self._is_inside = _HEAD.fullmatch(self._head) is not None
        self._is_raw = not self._is_inside and len(self._head) >= _MOST_HEAD_CHARS
        if not (self._is_inside or self._is_raw):
            return ""
        held, self._head = self._head, ""
        return held if self._is_raw else ""

    def _escaped(self, char: str) -> str:
        found = self._escape + char
        behind = found[_UNIT_CHARS:]
        if behind and len(behind) <= 2 and not "\\u".startswith(behind):
            # Half a pair, and something else.
            self._escape = ""
            return "\ufffd" + "".join(map(self._read, behind))
        is_unit = found[1] == "u"
        is_pair = is_unit and found[2:4].lower() in _HIGH
        if is_unit and len(found) < (_PAIR_CHARS if is_pair else _UNIT_CHARS):
            self._escape = found
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
