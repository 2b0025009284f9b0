"""Text that comes in pieces, read one character at a time by a generator.

Whoever reads takes characters with `yield from`, and is told of the end by an exception. What it makes of a
text cannot depend on how the text was cut, since it never sees the pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import TypeAlias

    Reader: TypeAlias = Generator[None, str, None]


class EndOfText(Exception):
    """No more characters will come."""


class Characters:
    """A place between who brings characters and who takes them, with one character of looking ahead."""

    def __init__(self) -> None:
        self._ahead: str | None = None

    def peek(self) -> Generator[None, str, str]:
        """The next character, which stays the next.

        Raises:
            EndOfText: If there is none.
        """
        if self._ahead is None:
            self._ahead = yield
        return self._ahead

    def take(self) -> Generator[None, str, str]:
        """The next character.

        Raises:
            EndOfText: If there is none.
        """
        char = yield from self.peek()
        self._ahead = None
        return char
