"""Where each run of tokens occurred last: a hash index of a growing text, bounded in memory.

For a few lengths the index keeps, of every n-gram, the place of its latest occurrence. The longest match of a
context is found by trying the lengths upwards and reading on backwards from there. Tokens are entered in bulk
by `dict.update`, which costs a fraction of what a suffix automaton does in Python, and text that was copied
from elsewhere in the index is not entered again. Old text is forgotten one generation at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

ORDERS: Final = (2, 4, 8)
# Matches are told apart up to this length.
MAX_ORDER: Final = 16
_STEPS_BACK: Final = (8, 4, 2, 1, 1)
# So many n-grams and fewer are entered one by one: for them that is quicker than in bulk.
_FEW: Final = 4


class Occurrence(NamedTuple):
    """Where a context was found.

    Attributes:
        end: Position of the token that followed it.
        length: Tokens of the context that agree, at most `MAX_ORDER`.
    """

    end: int
    length: int


class GramIndex:
    """The tokens of a text by position, and where n-grams ended last.

    Positions count from the text's first token and stay what they are when old text is forgotten.

    Args:
        max_tokens: How much text is kept: at least half of this, at most all of it.

    Attributes:
        first: Position of the first token that is kept.
        young_first: Position of the first token that will be kept when old text is forgotten next.

    Raises:
        ValueError: If `max_tokens` is below 2.
    """

    def __init__(self, max_tokens: int) -> None:
        if max_tokens < 2:
            raise ValueError(f"max_tokens is {max_tokens}: an index keeps at least 2 tokens")
        self.first = 0
        self.young_first = 0
        self._generation = max_tokens // 2
        self._tokens: list[int] = []
        self._young: tuple[dict[int, int], ...] = tuple({} for _ in ORDERS)
        self._old: tuple[dict[int, int], ...] = tuple({} for _ in ORDERS)
        # Where the copied text that the index ends with began; None if it does not end with any.
        self._copied_from: int | None = None

    @property
    def stop(self) -> int:
        """Position behind the last token."""
        return self.first + len(self._tokens)

    def read(self, start: int, stop: int) -> list[int]:
        """The tokens at positions `[start, stop)`; `start` is not before `first`."""
        return self._tokens[start - self.first : stop - self.first]

    def extend(self, tokens: Sequence[int], num_copied: int = 0) -> None:
        """Add text.

        Args:
            tokens: What to add.
            num_copied: So many of the first are what followed in the younger half of the index, too: there is
                no need to find them here as well.
        """
        begin = 0
        while begin < len(tokens):
            room = self.young_first + self._generation - self.stop
            part = tokens[begin : begin + room]
            self._append(part, min(max(num_copied - begin, 0), len(part)))
            begin += len(part)
            if len(part) == room:
                self._forget()

    def find(self, context: list[int]) -> Occurrence | None:
        """The latest occurrence of the longest n-gram at the end of `context`; two tokens at least."""
        found = None
        for order, young, old in zip(ORDERS, self._young, self._old, strict=True):
            key = hash(tuple(context[-order:]))
            end = young.get(key)
            if end is None:
                end = old.get(key)
            if end is None:
                break
            found = end
        length = 0 if found is None else self.agreement(found, context)
        return Occurrence(found, length) if found is not None and length >= ORDERS[0] else None

    def find_near(self, token: int, start: int, stop: int) -> int | None:
        """Position of the first `token` in `[start, stop)`."""
        try:
            return self.first + self._tokens.index(
                token, max(start - self.first, 0), max(stop - self.first, 0)
            )
        except ValueError:
            return None

    def agreement(self, end: int, context: list[int]) -> int:
        """How many tokens before position `end` agree with the end of `context`, at most `MAX_ORDER`."""
        tokens, place = self._tokens, end - self.first
        length = 0
        # Halving steps: their sum is `MAX_ORDER`, and each is one comparison.
        for step in _STEPS_BACK:
            upto = place - length
            left = len(context) - length
            if step <= upto and step <= left and tokens[upto - step : upto] == context[left - step : left]:
                length += step
        return length

    def _append(self, tokens: Sequence[int], num_copied: int) -> None:
        start = self.first + len(self._tokens)
        self._tokens.extend(tokens)
        stop = start + len(tokens)
        news = start + num_copied
        if num_copied and self._copied_from is None:
            self._copied_from = start
        if self._copied_from is None:
            self._enter(start, stop)
            return
        # N-grams that lie within a copy are known from where it was copied.
        if start < self._copied_from + ORDERS[-1]:
            self._enter(start, news, self._copied_from)
        if news < stop:
            self._enter(news, stop)
            self._copied_from = None

    def _enter(self, start: int, stop: int, copied_from: int | None = None) -> None:
        """Note the n-grams that end before the positions `[start, stop)`, but none within a copy."""
        tokens, first = self._tokens, self.first
        for order, young in zip(ORDERS, self._young, strict=True):
            begin = max(start - first, order)
            end = (stop if copied_from is None else min(stop, copied_from + order)) - first
            if end - begin > _FEW:
                grams = zip(*(tokens[begin - back : end - back] for back in range(order, 0, -1)), strict=True)
                young.update(zip(map(hash, grams), range(begin + first, end + first), strict=True))
            else:
                for place in range(begin, end):
                    young[hash(tuple(tokens[place - order : place]))] = place + first

    def _forget(self) -> None:
        """Drop the older generation; the younger one takes its place."""
        del self._tokens[: self.young_first - self.first]
        self.first = self.young_first
        self.young_first = self.stop
        self._old, self._young = self._young, tuple({} for _ in ORDERS)
