"""Detokenizer: tokens as text, incrementally, with stop strings."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class StopScanner:
    """Passes text on up to the first stop string, independent of how the text is cut into chunks.

    The longest end of the text that may become a stop string is held back. Of overlapping stop strings the
    one that starts first counts, so the result is always the whole text cut at the smallest
    `text.find(stop)`.

    Example:
        >>> scanner = StopScanner(["END"])
        >>> scanner.push("the E"), scanner.push("N"), scanner.push("Dless")
        ('the ', '', '')
        >>> scanner.stopped
        True

    Args:
        stops: Non-empty strings.
        includes_stop: Whether the stop string that ends the text is passed on as well.

    Attributes:
        found: The stop string that ended the text; None before.
    """

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._includes_stop = includes_stop
        self._held = ""
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.found is not None

    def push(self, text: str) -> str:
        """The text that is now known to be free of stop strings."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        held = self._held + text
        match = self._earliest_match(held)
        begun = self._earliest_begun(held)
        if match is not None and (begun is None or match < begun):
            self._held = ""
            return self._cut(held, match)
        # A match may have to wait for an overlapping stop string that started before it.
        safe = len(held) if begun is None else begun
        self._held = held[safe:]
        return held[:safe]

    def push_mark(self, mark: str) -> str:
        """The text held back, and a mark behind it, in which no stop string is looked for; it may be one."""
        if mark in self._stops:
            return self.push(mark)
        text = self.flush()
        return text if self.stopped else text + mark

    def flush(self) -> str:
        """The text held back, at the end."""
        held, self._held = self._held, ""
        match = self._earliest_match(held)
        return held if match is None else self._cut(held, match)

    def _cut(self, text: str, match: int) -> str:
        self.found = next(stop for stop in self._stops if text.startswith(stop, match))
        return text[: match + len(self.found) * self._includes_stop]

    def _earliest_match(self, text: str) -> int | None:
        return min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=None)

    def _earliest_begun(self, text: str) -> int | None:
        """Start of the longest end of the text that begins some stop string."""
        longest = max(map(len, self._stops)) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            end = text[start:]
            if any(len(stop) > len(end) and stop.startswith(end) for stop in self._stops):
                return start
        return None


class AnswerText:
    """Text of one answer, token by token.

    A character that spans several tokens appears with the last of them; invalid UTF-8 becomes U+FFFD.

    Args:
        piece: Returns the bytes of a token.
        stops: Strings that end the answer; no part of one is passed on, unless the next says so.
        includes_stop: Whether the one that ends the answer is passed on.

    Attributes:
        num_decoded: Number of decoded characters.
        num_passed: Number of those passed on.
    """

    def __init__(
        self, piece: Callable[[int], bytes], stops: Sequence[str] = (), *, includes_stop: bool = False
    ) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._scanner = StopScanner(stops, includes_stop=includes_stop)
        self.num_decoded = 0
        self.num_passed = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._scanner.stopped

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._scanner.found

    @property
    def is_in_character(self) -> bool:
        """Whether the latest token left a character incomplete."""
        return bool(self._decoder.getstate()[0])

    def push(self, token: int, *, is_mark: bool = False) -> str:
        """The text that becomes final with this token, often its own, sometimes none.

        Args:
            token: Its id.
            is_mark: Whether it is no part of a text for the client; see `StopScanner.push_mark`.
        """
        text = self._decoded(self._piece(token))
        return self._passed(self._scanner.push_mark(text) if is_mark else self._scanner.push(text))

    def flush(self) -> str:
        """The text held back, at the end. May find a last stop string."""
        text = self._scanner.push(self._decoded(b"", final=True))
        return self._passed(text + self._scanner.flush())

    def _decoded(self, piece: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(piece, final)
        self.num_decoded += len(text)
        return text

    def _passed(self, text: str) -> str:
        self.num_passed += len(text)
        return text
