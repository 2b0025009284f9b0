"""Whether proposing pays, by the time it took: an account of milliseconds won and lost.

A window of committed and proposed tokens is worth what its tokens would have cost one by one; what it took
beyond that is a loss. The account starts even. Once it is overdrawn the gate shuts, plain windows go on,
and after a pause one draft may try again; each try in vain doubles the pause. So speculation that does not
pay costs a few windows per answer, and text that turns repetitive is noticed.

This is a brake for in-step windows. A controller that chooses width, depth and proposer by expected tokens
per second takes its place when windows fly.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GateOptions:
    """How patient the gate is. Amounts are in plain windows: the time one takes, or their number.

    Attributes:
        max_loss: The gate shuts when the account falls this far below zero.
        max_credit: Gains beyond this are not remembered, or a good start would pay for a long bad end.
        first_pause: Windows to wait before the first new try.
        max_pause: The longest wait.
        plain_weight: Weight of the newest plain window in the running mean of their time.
    """

    max_loss: float = 2.0
    max_credit: float = 4.0
    first_pause: int = 8
    max_pause: int = 64
    plain_weight: float = 0.25


@dataclass(frozen=True)
class GateDecision:
    """What the next window may carry.

    Attributes:
        width: At most this many proposed tokens.
        reason: Why, for logs and status.
    """

    width: int
    reason: str


class Gate:
    """One session's account.

    Args:
        options: How patient it is.
    """

    def __init__(self, options: GateOptions | None = None) -> None:
        self._options = options or GateOptions()
        self._plain_ms: float | None = None
        self._balance = 0.0
        self._pause = self._options.first_pause
        self._wait = 0

    def decide(self, max_width: int) -> GateDecision:
        """How many tokens the next window may propose, and why.

        Args:
            max_width: What the window has room for.
        """
        if self._plain_ms is None:
            return GateDecision(0, "measuring a plain window first")
        if self._wait:
            return GateDecision(0, f"proposing lost time: trying again in {self._wait} windows")
        return GateDecision(max_width, f"open, {self._balance:+.1f} plain windows won")

    def record(self, num_proposed: int, num_committed: int, elapsed_ms: float) -> None:
        """Enter a judged window.

        Args:
            num_proposed: Proposed tokens that it carried.
            num_committed: Tokens that it committed, at least one.
            elapsed_ms: From sending it to its verdict.
        """
        self._wait = max(0, self._wait - 1)
        if num_proposed == 0:
            weight = 1.0 if self._plain_ms is None else self._options.plain_weight
            self._plain_ms = weight * elapsed_ms + (1.0 - weight) * (self._plain_ms or 0.0)
        elif self._plain_ms:
            won = num_committed - elapsed_ms / self._plain_ms
            self._balance = min(self._balance + won, self._options.max_credit)
            self._settle()

    def _settle(self) -> None:
        if self._balance >= 0.0:
            self._pause = self._options.first_pause
        elif self._balance <= -self._options.max_loss:
            self._wait = self._pause
            self._pause = min(2 * self._pause, self._options.max_pause)
            # The next try starts overdrawn: one more loss of any size to speak of shuts the gate again.
            self._balance = -self._options.max_loss / 2
