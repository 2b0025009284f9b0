"""Rules of tuning in the background: when to begin, which candidate to choose, and when to go back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mesh.tuning.acceptance import acceptance_of, gain, paired
from mesh.tuning.jobs import Schedule

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from mesh.tuning.acceptance import AnswerDrafts, Gain
    from mesh.tuning.conversation_file import Api

_APIS: Final[tuple[Api, ...]] = ("chat", "raw")
# Fewer held-out prompts tell nothing of others.
_LEAST_HELD: Final = 8
_MOST_LOSS: Final = 0.02
_LEAST_SHARE: Final = 0.9


@dataclass(frozen=True)
class TuningBounds:
    """When a drafter is tuned, and for how long."""

    idle_s: float = 60.0
    """Time without a request before it computes."""
    least_tokens: int = 5000
    """New tokens of answers."""
    least_prompts: int = 60
    """Prompts from which the drafter has not learned: enough of them are held out."""
    schedule: Schedule = field(default_factory=lambda: Schedule(minutes=20.0))
    """How it learns, and for how long: of time in which it computes."""
    least_windows: int = 2000
    """Served windows after which two drafters are compared."""


@dataclass(frozen=True)
class Verdict:
    """Judgement of a candidate."""

    gain: Gain | None
    """Over the drafter that it was tuned from, on answers that neither has learned from; None without any."""
    refusal: str | None
    """Why it is not chosen; None if it is."""


class IdleClock:
    """Time since the last request, or since requests can be answered. All times are monotonic seconds."""

    def __init__(self) -> None:
        self._running: set[Hashable] = set()
        self._latest_s: float | None = None

    def came(self, now_s: float) -> None:
        """A request has come, or the first one can."""
        self._latest_s = now_s

    def began(self, session: Hashable, now_s: float) -> None:
        """A session runs, again perhaps."""
        self._running.add(session)
        self._latest_s = now_s

    def ended(self, session: Hashable, now_s: float) -> None:
        """A session has ended; does nothing for one that does not run."""
        if session in self._running:
            self._running.remove(session)
            self._latest_s = now_s

    def idle_s(self, now_s: float) -> float:
        """Seconds since the last request ended; 0 while one runs, and before any can come."""
        return 0.0 if self._running or self._latest_s is None else now_s - self._latest_s


@dataclass
class ServedAcceptance:
    """First drafted tokens of served windows, by the number of the drafter: the latest ones.

    Of longer drafts the controller decides by what the drafter is worth, so they do not compare.
    """

    least_windows: int
    """So many are compared."""
    _latest: dict[int, deque[bool]] = field(default_factory=dict)

    def add(self, number: int, *, is_accepted: bool) -> None:
        """Record the first drafted token of a window."""
        latest = self._latest.setdefault(number, deque(maxlen=self.least_windows))
        latest.append(is_accepted)

    def rate(self, number: int) -> float | None:
        """Share that was accepted; None if there are too few windows to tell."""
        latest = self._latest.get(number, ())
        return sum(latest) / len(latest) if len(latest) == self.least_windows else None

    def has_fallen(self, number: int, former_rate: float | None) -> bool:
        """Whether a drafter is right clearly less often than the one before it was, if both are known."""
        rate = self.rate(number)
        return rate is not None and former_rate is not None and rate < _LEAST_SHARE * former_rate


def judged(before: Sequence[AnswerDrafts], after: Sequence[AnswerDrafts]) -> Verdict:
    """Judge a candidate, which has to be right more often for sure, and less often in no kind of requests.

    Args:
        before: Drafts of the drafter that it was tuned from, on answers that were held out.
        after: Drafts of the candidate, on the same.
    """
    before, after = paired(before, after)
    found, whole = gain(before, after), acceptance_of(before)
    if found is None or whole is None or whole.num_prompts < _LEAST_HELD:
        count = 0 if whole is None else whole.num_prompts
        return Verdict(found, f"{count} held-out prompts are too few to tell, need {_LEAST_HELD}")
    if found.per_window.low <= 0:
        low, high = found.per_window.low, found.per_window.high
        shown = f"{found.per_window.value:+.3f} [{low:+.3f}, {high:+.3f}] accepted tokens a window"
        return Verdict(found, f"its gain is not sure: {shown}")
    for api in _APIS:
        parts = ([each for each in answers if each.api == api] for answers in (before, after))
        of_kind = gain(*parts)
        if of_kind is not None and of_kind.first.value < -_MOST_LOSS:
            lost = f"{of_kind.first.value:+.3f} at the first token"
            return Verdict(found, f"it is right less often in {api}: {lost}")
    return Verdict(found, None)
