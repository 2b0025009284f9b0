"""Several requests at once."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Crowd:
    """The same requests at once, under `off` and under a setting, one right after the other.

    Attributes:
        num_at_once: Requests under way together.
        delay_ms: One way.
        setting: Name of the setting.
        off_tokens_per_s: All tokens of all answers, by the time from the first request to the end of the
            last answer.
        tokens_per_s: The same under the setting.
        num_forks: Answers whose texts differ.
    """

    num_at_once: int
    delay_ms: float
    setting: str
    off_tokens_per_s: float
    tokens_per_s: float
    num_forks: int

    @property
    def ratio(self) -> float:
        """How many times more tokens per second than under `off`."""
        return self.tokens_per_s / self.off_tokens_per_s


def median_ratio(crowds: Sequence[Crowd], num_at_once: int, setting: str) -> float | None:
    """Over the rounds with so many at once; None without any."""
    found = [crowd.ratio for crowd in crowds if crowd.num_at_once == num_at_once and crowd.setting == setting]
    return median(found) if found else None
