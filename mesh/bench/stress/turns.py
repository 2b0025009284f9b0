"""Which request comes next. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Self

from mesh.bench.serve.load import Job
from mesh.bench.stress.script import prompt_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh.bench.serve.record import Record


class Turns:
    """An iterator over jobs: chats in their order, all over again from the first, turn after turn.

    A chat's next turn comes up once the one before it has ended, ahead of chats that have not begun.

    Args:
        ids: Of the chats.
        bodies: Of each chat, its requests.
        is_over: Asked with the number of jobs given so far; once it says so there are no more.
    """

    def __init__(
        self, ids: Sequence[str], bodies: Sequence[Sequence[bytes]], is_over: Callable[[int], bool]
    ) -> None:
        self._ids = ids
        self._bodies = bodies
        self._is_over = is_over
        self._num_given = 0
        self._num_begun = 0
        self._ready: deque[tuple[int, int]] = deque()
        self._under_way: dict[int, tuple[int, int]] = {}

    def __iter__(self) -> Self:
        """Itself: its users share it."""
        return self

    def __next__(self) -> Job:
        """The next job; raises StopIteration when it is over."""
        if self._is_over(self._num_given):
            raise StopIteration
        if self._ready:
            chat, turn = self._ready.popleft()
        else:
            chat, turn = self._num_begun % len(self._ids), 0
            self._num_begun += 1
        number = self._num_given
        self._num_given += 1
        self._under_way[number] = chat, turn
        return Job(number, prompt_id(self._ids[chat], turn), self._bodies[chat][turn])

    def ended(self, record: Record) -> None:
        """A job is over, in whatever way."""
        chat, turn = self._under_way.pop(record.number)
        if turn + 1 < len(self._bodies[chat]):
            self._ready.append((chat, turn + 1))
