"""In which order sessions go on after a repair. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Replayed = TypeVar("Replayed")


class ReplayLine(Generic[Replayed]):
    """Begins one session after another: the next as soon as the one before has sent all that it replays.

    So the pipeline stays full, and no chunk of a later session comes between those of an earlier one. The
    first of the line are those with the least to compute, which keeps most pauses short (shortest processing
    time first: Smith 1956).

    Args:
        sessions: In that order.
        begin: Begins a session; given what to call when it has sent all, or ended.
        on_end: Called when the last one has.
    """

    def __init__(
        self,
        sessions: Iterable[Replayed],
        begin: Callable[[Replayed, Callable[[], None]], None],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._waiting = deque(sessions)
        self._begin = begin
        self._on_end = on_end
        self._is_going = False
        self._is_busy = False

    def go_on(self) -> None:
        """Begin the next session, and those after it for as long as each has sent all at once."""
        self._is_busy = False
        if self._is_going:
            return
        self._is_going = True
        try:
            while self._waiting and not self._is_busy:
                self._is_busy = True
                self._begin(self._waiting.popleft(), self.go_on)
        finally:
            self._is_going = False
        if not self._is_busy:
            self._on_end()

    def drop(self) -> None:
        """Begin nobody any more: the ring broke again."""
        self._waiting.clear()
