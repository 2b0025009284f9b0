"""Features that are not urgent, until there are enough of them for a message.

A message costs all hosts on its way far more time than the few rows of a window, and so does encoding them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass
class FeatureRun:
    """Features of consecutive rows of one session, of one window or of several with consecutive ids."""

    session: int
    """Id of the session."""
    window_id: int
    """Id of the first window."""
    start: int
    """Position of the first row."""
    window_rows: list[int] = field(default_factory=list)
    """Rows of each window."""
    parts: list[Sequence[NDArray[np.float32]]] = field(default_factory=list)
    """Of each window the rows of each layer, float32 (rows, n_embd)."""
    num_rows: int = 0
    """Rows of all windows."""

    def goes_on(self, window_id: int, start: int) -> bool:
        """Whether a window that begins there follows the last one."""
        return window_id == self.window_id + len(self.window_rows) and start == self.start + self.num_rows

    def add(self, rows: Sequence[NDArray[np.float32]]) -> None:
        """Add the rows of the next window, for each layer."""
        self.window_rows.append(len(rows[0]))
        self.parts.append(rows)
        self.num_rows += len(rows[0])

    def layers(self) -> list[NDArray[np.float32]]:
        """Rows of all windows for each layer, float32 (rows, n_embd)."""
        return [np.concatenate(rows) for rows in zip(*self.parts, strict=True)]


class WaitingFeatures:
    """Features that wait for more. For one thread."""

    def __init__(self) -> None:
        # By session; the last one is what its next window may go on.
        self._runs: dict[int, list[FeatureRun]] = {}
        self._num_rows = 0
        self._together = 0
        self._urgent: set[int] = set()

    def add(
        self, session: int, window_id: int, start: int, rows: Sequence[NDArray[np.float32]], together: int
    ) -> None:
        """Keep rows of a window.

        Args:
            session: Id of the session.
            window_id: Id of the window.
            start: Position of the first row.
            rows: For each layer, float32 (rows, n_embd); of at least one row.
            together: Rows of all sessions that they may wait for; 0: they do not wait.
        """
        runs = self._runs.setdefault(session, [])
        if not runs or not runs[-1].goes_on(window_id, start):
            runs.append(FeatureRun(session, window_id, start))
        runs[-1].add(rows)
        self._together = min(self._together, together) if self._num_rows else together
        self._num_rows += len(rows[0])

    def hurry(self, session: int) -> None:
        """Let those of a session wait no longer."""
        if session in self._runs:
            self._urgent.add(session)

    def take(self) -> list[FeatureRun]:
        """Remove and return those that wait no longer: of a session in the order in which they came."""
        due = list(self._runs) if self._num_rows >= self._together else self._urgent
        found = [run for session in due for run in self._runs.pop(session)]
        self._num_rows -= sum(run.num_rows for run in found)
        self._urgent.clear()
        return found

    def clear(self) -> None:
        """Drop all."""
        self._runs.clear()
        self._urgent.clear()
        self._num_rows = 0
