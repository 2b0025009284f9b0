"""Whose input crashes stages. Pure.

When a stage's process dies, any session with a window under way may have killed it, or none. The first time
all are replayed together. A session that is still at the same place when a stage crashes again is on trial
from then on: it replays alone, while all others wait. Who is alone under way at a crash, and not at the
first, is the culprit.

So no session fails for what another did, and a single session fails at its second crash. Crashes that have
nothing to do with any input, such as a killed process, would have to hit the same session at the same place
twice, the second time while it is alone.
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
        position: Its prompt and committed tokens at the latest.
    """

    num_crashes: int = 0
    position: int = 0

    def add(self, position: int) -> None:
        """A stage crashed with a window of it under way."""
        self.num_crashes = self.num_crashes + 1 if position == self.position else 1
        self.position = position

    @property
    def is_on_trial(self) -> bool:
        """Whether it must replay alone."""
        return self.num_crashes > 1


def culprit(under_way: Sequence[Suspicion]) -> Suspicion | None:
    """Whose doing a crash was, now that all with a window under way know of it; None if that is open."""
    return under_way[0] if len(under_way) == 1 and under_way[0].is_on_trial else None
