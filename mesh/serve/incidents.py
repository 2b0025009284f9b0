"""What went wrong lately, and what became of it; for `mesh status`."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_FAILURES: Final = 20


@dataclass(frozen=True)
class Failure:
    """A stage that was lost.

    Attributes:
        at_s: When, Unix seconds.
        host: Where it was.
        layers: What it held, `[start, stop)`.
        reason: Why, as far as anybody knows; one line.
    """

    at_s: float
    host: str
    layers: str
    reason: str


class Incidents:
    """The latest failures, and a count of repairs.

    Args:
        clock_s: Unix seconds.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._failures: deque[Failure] = deque(maxlen=_MOST_FAILURES)
        self._num_losses = 0
        self._num_repairs = 0
        self._num_moves = 0
        self._last_repair_s: float | None = None

    def failed(self, host: str, layers: str, reason: str) -> Failure:
        """Note a lost stage."""
        failure = Failure(self._clock_s(), host, layers, reason)
        self._failures.append(failure)
        self._num_losses += 1
        return failure

    def explain(self, failure: Failure, more: str) -> None:
        """Add to a failure's reason what was found out later; one that was forgotten meanwhile stays so."""
        explained = Failure(failure.at_s, failure.host, failure.layers, f"{failure.reason}: {more}")
        self._failures = deque(
            (explained if each is failure else each for each in self._failures), maxlen=_MOST_FAILURES
        )

    def repaired(self, took_s: float) -> None:
        """Note that the ring is whole again, and how long it was not."""
        self._num_repairs += 1
        self._last_repair_s = took_s

    def moved(self) -> None:
        """Note that layers moved from one host to another while all was well."""
        self._num_moves += 1

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the latest failure last."""
        return {
            "failures": [asdict(failure) for failure in self._failures],
            "repairs": {
                "losses": self._num_losses,
                "count": self._num_repairs,
                "last_s": None if self._last_repair_s is None else round(self._last_repair_s, 3),
                "moves": self._num_moves,
            },
        }
