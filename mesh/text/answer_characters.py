"""Characters of an answer, taken one at a time: JSON values among them, and escapes that such values lack."""

from __future__ import annotations

import json
import string
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator

SPACE: Final = " \t\r\n"
_CLOSING: Final = {"{": "}", "[": "]"}
# Behind a value, or instead of one; a tag ends what a model has forgotten to end.
_ENDS_BARE: Final = ",}]<" + SPACE
_ESCAPABLE: Final = frozenset('"\\/bfnrt')
_CONTROLS: Final = {chr(code): json.dumps(chr(code))[1:-1] for code in range(0x20)}
_NUM_UNICODE_CHARS: Final = 5


# Parsers take characters with `yield from`; an exception marks the end. Their result cannot depend on how the
# text was cut, since they never see the chunks.
class EndOfText(Exception):
    """There are no more characters."""


class Characters:
    """Buffer between the pusher and the consumer of characters, with lookahead."""

    def __init__(self) -> None:
        self._ahead: deque[str] = deque()
        self._is_over = False

    def peek(self) -> Generator[None, str, str]:
        """The next character, without consuming it.

        Raises:
            EndOfText: If there is none.
        """
        if not self._ahead:
            if self._is_over:
                raise EndOfText
            self._ahead.extend((yield))
        return self._ahead[0]

    def take(self) -> Generator[None, str, str]:
        """Consume the next character.

        Raises:
            EndOfText: If there is none.
        """
        yield from self.peek()
        return self._ahead.popleft()

    def match(self, texts: Collection[str]) -> Generator[None, str, str | None]:
        """Consume the longest of these texts that comes next; returns which, or None.

        Args:
            texts: Not empty.

        Raises:
            EndOfText: If the text ends with the beginning of one, which is left there.
        """
        taken, found = "", None
        try:
            while any(text.startswith(taken) for text in texts if text != found):
                taken += yield from self.take()
                if taken in texts:
                    found = taken
        except EndOfText:
            if found is None:
                self.unread(taken)
                raise
        self.unread(taken[len(found or "") :])
        return found

    def unread(self, text: str) -> None:
        """Put characters back before the next one."""
        self._ahead.extendleft(reversed(text))

    def end(self) -> None:
        """Note that no characters follow: from now on taking one raises `EndOfText`."""
        self._is_over = True

    def rest(self) -> str:
        """Consume the characters that were put back."""
        rest = "".join(self._ahead)
        self._ahead.clear()
        return rest


class UnexpectedText(Exception):
    """The text goes on otherwise than it must at this place."""


class UnclosedJson(UnexpectedText):
    """A tag begins within an object or an array.

    Args:
        closing: Brackets that would close it.
    """

    def __init__(self, closing: str) -> None:
        super().__init__()
        self.closing = closing


class StringEscaper:
    """Escapes what JSON wants escaped within strings, in one JSON text that comes in pieces.

    Models write line breaks of files and backslashes of patterns as they are. A backslash that begins no
    escape stands for itself.
    """

    def __init__(self) -> None:
        self._is_in_string = False
        self._is_after_backslash = False
        # Of an escape by number, what follows the backslash.
        self._unicode = ""

    @property
    def is_in_string(self) -> bool:
        """Whether the text so far ends within a string."""
        return self._is_in_string

    def escaped(self, text: str) -> str:
        """More of the text; an escape by number only once it is whole."""
        return "".join(map(self._escaped, text))

    def _escaped(self, char: str) -> str:
        if not self._is_in_string:
            self._is_in_string = char == '"'
            return char
        if self._unicode:
            return self._in_unicode(char)
        if self._is_after_backslash:
            self._is_after_backslash = False
            if char == "u":
                self._unicode = char
                return ""
            # The backslash has been passed on: a second one makes it a letter.
            return char if char in _ESCAPABLE else f"\\{_CONTROLS.get(char, char)}"
        return self._plain(char)

    def _in_unicode(self, char: str) -> str:
        found = self._unicode
        if char in string.hexdigits:
            found += char
            self._unicode = "" if len(found) == _NUM_UNICODE_CHARS else found
            return "" if self._unicode else found
        self._unicode = ""
        return f"\\{found}{self._plain(char)}"

    def _plain(self, char: str) -> str:
        self._is_after_backslash = char == "\\"
        self._is_in_string = char != '"'
        return _CONTROLS.get(char, char)


def skip_space(characters: Characters, pass_on: Callable[[str], None]) -> Generator[None, str, str]:
    """Consume white space; returns the next character, without consuming it."""
    while (char := (yield from characters.peek())) in SPACE:
        pass_on((yield from characters.take()))
    return char


def read_text(characters: Characters, pass_on: Callable[[str], None]) -> Generator[None, str, str]:
    """Consume a JSON string; returns its value.

    Args:
        characters: The next one is the quote.
        pass_on: Called with each character, quotes too.

    Raises:
        UnexpectedText: If it is no JSON string.
    """
    raw: list[str] = []

    def keep(char: str) -> None:
        raw.append(char)
        pass_on(char)

    yield from _pass_text(characters, keep)
    try:
        text: str = json.loads(StringEscaper().escaped("".join(raw)))
    except ValueError:
        raise UnexpectedText from None
    return text


def pass_value(characters: Characters, pass_on: Callable[[str], None]) -> Generator[None, str, None]:
    """Consume a JSON value of any kind. Brackets are counted and strings recognised; no more is checked.

    Args:
        characters: The next one is the first of the value.
        pass_on: Called with each character.

    Raises:
        UnexpectedText: If no value begins there.
        UnclosedJson: If a tag begins within it.
    """
    char = yield from characters.peek()
    if char == '"':
        yield from _pass_text(characters, pass_on)
    elif char in _CLOSING:
        yield from _pass_container(characters, pass_on)
    else:
        is_empty = True
        while (yield from characters.peek()) not in _ENDS_BARE:
            is_empty = False
            pass_on((yield from characters.take()))
        if is_empty:
            raise UnexpectedText


def _pass_container(characters: Characters, pass_on: Callable[[str], None]) -> Generator[None, str, None]:
    closing: list[str] = []
    while True:
        char = yield from characters.peek()
        if char == '"':
            yield from _pass_text(characters, pass_on)
            continue
        if char == "<":
            raise UnclosedJson("".join(reversed(closing)))
        pass_on((yield from characters.take()))
        if char in _CLOSING:
            closing.append(_CLOSING[char])
        elif char in _CLOSING.values():
            closing.pop()
        if not closing:
            return


def _pass_text(characters: Characters, pass_on: Callable[[str], None]) -> Generator[None, str, None]:
    if (yield from characters.peek()) != '"':
        raise UnexpectedText
    pass_on((yield from characters.take()))
    while True:
        char = yield from characters.take()
        pass_on(char)
        if char == '"':
            return
        if char == "\\":
            pass_on((yield from characters.take()))
