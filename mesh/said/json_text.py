"""JSON values read as they come, without waiting for their end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from mesh.said.characters import Characters

SPACE: Final = " \t\r\n"
_OPENING: Final = "{["
_CLOSING: Final = "}]"
_ENDS_BARE: Final = ",}]" + SPACE


class NotJson(Exception):
    """The text is no JSON here."""


def skip_space(characters: Characters, pass_on: Callable[[str], None]) -> Generator[None, str, str]:
    """Take white space; returns the character behind it, which is not taken."""
    while (char := (yield from characters.peek())) in SPACE:
        pass_on((yield from characters.take()))
    return char


def read_text(characters: Characters, pass_on: Callable[[str], None]) -> Generator[None, str, str]:
    """Take a JSON string; returns what it means.

    Args:
        characters: Their next one is the quote.
        pass_on: Given each character, quotes too.

    Raises:
        NotJson: If it is none.
    """
    raw: list[str] = []

    def keep(char: str) -> None:
        raw.append(char)
        pass_on(char)

    yield from _pass_text(characters, keep)
    try:
        text: str = json.loads("".join(raw), strict=False)
    except ValueError:
        raise NotJson from None
    return text


def pass_value(characters: Characters, pass_on: Callable[[str], None]) -> Generator[None, str, None]:
    """Take a JSON value of any kind. Brackets are counted and strings told apart; no more is checked.

    Args:
        characters: Their next one is the value's first.
        pass_on: Given each character.

    Raises:
        NotJson: If nothing is there that could be a value.
    """
    char = yield from characters.peek()
    if char == '"':
        yield from _pass_text(characters, pass_on)
    elif char in _OPENING:
        yield from _pass_container(characters, pass_on)
    else:
        is_empty = True
        while (yield from characters.peek()) not in _ENDS_BARE:
            is_empty = False
            pass_on((yield from characters.take()))
        if is_empty:
            raise NotJson


def _pass_container(characters: Characters, pass_on: Callable[[str], None]) -> Generator[None, str, None]:
    depth = 0
    while True:
        char = yield from characters.peek()
        if char == '"':
            yield from _pass_text(characters, pass_on)
            continue
        pass_on((yield from characters.take()))
        depth += (char in _OPENING) - (char in _CLOSING)
        if depth == 0:
            return


def _pass_text(characters: Characters, pass_on: Callable[[str], None]) -> Generator[None, str, None]:
    if (yield from characters.peek()) != '"':
        raise NotJson
    pass_on((yield from characters.take()))
    while True:
        char = yield from characters.take()
        pass_on(char)
        if char == '"':
            return
        if char == "\\":
            pass_on((yield from characters.take()))
