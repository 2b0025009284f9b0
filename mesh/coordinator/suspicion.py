"""Whose input crashes stages. Pure.

When a stage's process dies, any session with a window under way may have killed it, or none. The first time
all are replayed together. A session that is still at the same place when a stage crashes again is on trial
from then on: it replays alone, while all others wait. Who is alone under way at so many crashes in a row, at
the same place each time, is the culprit.

So no session fails for what another did. Crashes that have nothing to do with any input, such as a killed
process, would have to hit the same session at the same place as often, while it is alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class Suspicion:
    """Of one session.

    Attributes:
        num_crashes: Crashes in a row with a window of it under way and no token committed between them.
        num_alone: Those of them, the latest in a row, at which nobody else had one.
        position: Its prompt and committed tokens at the latest.
    """

    num_crashes: int = 0
    num_alone: int = 0
    position: int = 0

    def add(self, position: int, *, is_alone: bool) -> None:
        """A stage crashed with a window of it under way."""
        if position != self.position:
            self.num_crashes = self.num_alone = 0
        self.num_crashes += 1
        self.num_alone = self.num_alone + 1 if is_alone else 0
        self.position = position

    @property
    def is_on_trial(self) -> bool:
        """Whether it must replay alone."""
        return self.num_crashes > 1


def culprit(under_way: Sequence[Suspicion], most_crashes: int) -> Suspicion | None:
    """Whose doing a crash was, now that all with a window under way know of it; None if that is open.

    Args:
        under_way: Of all these sessions.
        most_crashes: A session that was alone at so many is the culprit.
    """
    return next((each for each in under_way if each.num_alone >= most_crashes), None)
