"""Crash suspects: which running session made the process of a stage crash.

When a stage's process ends, any session with a window in flight may have caused it, or none. The first time
all are replayed together. A session that is at the same position when a stage crashes again is on trial
from then on: it replays alone, while all others wait. A session that was alone in flight at this many
crashes in a row, always at the same position, is taken for the cause.

So no session fails for what another did. Crashes without relation to any input, such as a killed process,
would have to meet the same session at the same position as often, while it is alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class CrashHistory:
    """Crashes of stages during one session."""

    num_crashes: int = 0
    """Crashes in a row with a window of it in flight and no token committed between them."""
    num_alone: int = 0
    """Latest of those in a row at which no other session had a window in flight."""
    position: int = 0
    """Number of its prompt and committed tokens at the latest."""

    def add(self, position: int, *, is_alone: bool) -> None:
        """Record a crash of a stage with a window of it in flight."""
        if position != self.position:
            self.num_crashes = self.num_alone = 0
        self.num_crashes += 1
        self.num_alone = self.num_alone + 1 if is_alone else 0
        self.position = position

    @property
    def is_suspect(self) -> bool:
        """Whether it must replay alone."""
        return self.num_crashes > 1


def crash_suspect(under_way: Sequence[CrashHistory], most_crashes: int) -> CrashHistory | None:
    """The session that caused a crash, now recorded for all with a window in flight; None if unknown.

    Args:
        under_way: Histories of all these sessions.
        most_crashes: Crashes alone after which a session is the cause.
    """
    return next((each for each in under_way if each.num_alone >= most_crashes), None)
