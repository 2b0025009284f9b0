"""How many proposed tokens to send now: width and depth of speculation, zero included."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speculative.moment import Decision, Moment, Outcome, StageMeasure
from speculative.shared import SharedMeasures
from speculative.timing import Timing

if TYPE_CHECKING:
    from speculative.proposal import Proposal

__all__ = [
    "Controller",
    "ControllerOptions",
    "Decision",
    "Moment",
    "Outcome",
    "SharedMeasures",
    "StageMeasure",
    "Timing",
]


@dataclass(frozen=True)
class ControllerOptions:
    """Limits, and switches that take a mechanism away to find a fault.

    Attributes:
        max_width: Most proposed tokens in one window.
        max_depth: Most windows of a session under way; 1 keeps them in step.
        fixed_width: Always this many proposed tokens, or as many as there are; 0 speculates never.
        fixed_depth: Always this many windows under way.
        p_min: Tokens that are likely to be reached with less than this are not sent; None leaves it to the
            controller.

    Raises:
        ValueError: If a value is out of range.
    """

    max_width: int = 16
    max_depth: int = 16
    fixed_width: int | None = None
    fixed_depth: int | None = None
    p_min: float | None = None

    def __post_init__(self) -> None:
        if self.max_width < 1 or self.max_depth < 1:
            raise ValueError(f"{self}: max_width and max_depth must be 1 or more")
        if (self.fixed_width or 0) < 0 or (self.fixed_depth is not None and self.fixed_depth < 1):
            raise ValueError(f"{self}: fixed_width must not be negative, fixed_depth 1 or more")
        if self.p_min is not None and not 0.0 <= self.p_min <= 1.0:
            raise ValueError(f"{self}: p_min must lie in [0, 1]")


class Controller:
    """One session's controller.

    Args:
        options: Limits and switches.
        shared: What the sessions of a coordinator learn together.
    """

    def __init__(self, options: ControllerOptions, shared: SharedMeasures) -> None:
        self._options = options
        self._timing = shared.timing
        self._balance = 0.0
        self._wait = 0
        self._pause = 8
        self._last_arrived_ms = float("-inf")
        self._pending: deque[bool] = deque()
        self._reason = "nothing decided yet"

    def wanted(self, moment: Moment) -> int:
        """How many tokens to ask the proposer for now; 0: none are wanted."""
        options = self._options
        if moment.num_in_flight >= (options.fixed_depth or options.max_depth):
            self._reason = f"{moment.num_in_flight} windows are under way"
            return 0
        if options.fixed_width is None:
            if self._timing.plain_ms is None:
                self._reason = "measuring a plain window first"
                return 0
            if self._wait:
                self._reason = f"proposing lost time: trying again in {self._wait} windows"
                return 0
        width = options.max_width if options.fixed_width is None else options.fixed_width
        return max(0, min(width, moment.room))

    def decide(self, moment: Moment, proposal: Proposal) -> Decision:
        """How many of the proposed tokens to send now."""
        width = min(self.wanted(moment), len(proposal.tokens))
        if width and self._options.fixed_width is None:
            width = self._worthwhile(proposal, width)
            self._reason = f"{width} of {len(proposal.tokens)} proposed by {proposal.proposer}"
        return Decision(width, self._reason)

    def judged(self, outcome: Outcome) -> None:
        """Learn from a judged window."""
        is_alone = outcome.num_in_flight == 0 and outcome.num_stale == 0
        if not outcome.proposal.tokens and is_alone:
            self._timing.add_plain(outcome)
            self._wait = max(0, self._wait - 1)
        elif self._timing.plain_ms:
            elapsed_ms = outcome.arrived_ms - max(outcome.sent_ms, self._last_arrived_ms)
            won = len(outcome.judgement.committed) - elapsed_ms / self._timing.plain_ms
            self._balance = min(self._balance + won, 4.0)
            if self._balance < -2.0:
                self._balance, self._wait, self._pause = -1.0, self._pause, min(2 * self._pause, 256)
            elif self._balance >= 0.0:
                self._pause = 8
        self._last_arrived_ms = outcome.arrived_ms

    def close(self) -> None:
        """The session is over."""

    def summary(self) -> dict[str, Any]:
        """For `timings`: what the controller does, and why."""
        return {"mode": "auto", "reason": self._reason}

    def _worthwhile(self, proposal: Proposal, width: int) -> int:
        p_min = 0.3 if self._options.p_min is None else self._options.p_min
        reached = 1.0
        for index, confidence in enumerate(proposal.confidences[:width]):
            reached *= confidence
            if reached < p_min:
                return index
        return width
