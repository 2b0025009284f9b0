"""Proposers that know more, or less, than any real one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from speculative.proposer import EMPTY, Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Oracle:
    """Knows the answer, and errs where it is told to.

    Args:
        text: Prompt and answer.
        errs: Entry `i`: whether to err at position `i`, and so on in turn.
    """

    name = "oracle"

    def __init__(self, text: Sequence[int], errs: Sequence[bool] = (False,)) -> None:
        self.heard: list[int] = []
        self.is_closed = False
        self._text = list(text)
        self._errs = list(errs)

    def extend(self, tokens: Sequence[int]) -> None:
        self.heard.extend(tokens)

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        assert self.heard == self._text[: len(self.heard)]
        start = len(self.heard) + len(after)
        ahead = range(start, min(start + max_tokens, self.num_known))
        tokens = tuple(self._text[place] ^ self._errs[place % len(self._errs)] for place in ahead)
        return Proposal(tokens, (0.9,) * len(tokens), self.name)

    @property
    def num_known(self) -> int:
        return len(self._text)

    def listen(self, on_ready: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class SlowOracle(Oracle):
    """Works its proposals out in a thread of its own, a token at a time, and says so."""

    name = "slow oracle"

    def __init__(self, text: Sequence[int], errs: Sequence[bool] = (False,)) -> None:
        super().__init__(text, errs)
        self._num_known = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def num_known(self) -> int:
        return self._num_known

    def listen(self, on_ready: Callable[[], None]) -> None:
        def work() -> None:
            while self._num_known < len(self._text) and not self._over.wait(0.0005):
                self._num_known += 1
                on_ready()

        self._thread = threading.Thread(target=work)
        self._thread.start()

    def close(self) -> None:
        super().close()
        self._over.set()
        if self._thread is not None:
            self._thread.join()


class Parrot:
    """Says again what followed the last time that the latest token was said: often wrong, never silent."""

    name = "parrot"

    def __init__(self) -> None:
        self._heard: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        self._heard.extend(tokens)

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        text = [*self._heard, *after]
        for end in range(len(text) - 1, 0, -1):
            if text[end - 1] == text[-1]:
                tokens = tuple(text[end : end + max(max_tokens, 0)])
                return Proposal(tokens, (0.5,) * len(tokens), self.name)
        return EMPTY

    def listen(self, on_ready: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        pass
