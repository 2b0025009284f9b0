"""Whether proposing pays, by the time it took: an account of milliseconds won and lost.

A window of committed and proposed tokens is worth what its tokens would have cost one by one; what it took
beyond that is a loss. The account starts even. Once it is overdrawn the gate shuts, plain windows go on,
and after a pause one draft may try again; each try in vain doubles the pause. So speculation that does not
pay costs a few windows per answer, and text that turns repetitive is noticed.

This is a brake for in-step windows. A controller that chooses width, depth and proposer by expected tokens
per second takes its place when windows fly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


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
    max_pause: int = 256
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


@dataclass(frozen=True)
class GateAccount:
    """Where a session's account stands.

    Attributes:
        plain_ms: Running mean of a plain window's time; None before the first.
        balance: Won (above zero) or lost by proposing, in plain windows.
        pause: Windows that the gate stays shut the next time.
        wait: Windows that it still stays shut now.
    """

    plain_ms: float | None
    balance: float
    pause: int
    wait: int


class Gate:
    """One session's gate.

    Args:
        options: How patient it is.
        prior: Where the account of an earlier session on the same stages stood: a new one starts with its
            measure of a plain window, its doubts and its pause, but without its credit: its text earned that.
    """

    def __init__(self, options: GateOptions | None = None, prior: GateAccount | None = None) -> None:
        self._options = options or GateOptions()
        start = prior or GateAccount(plain_ms=None, balance=0.0, pause=self._options.first_pause, wait=0)
        self.account = replace(start, balance=min(0.0, start.balance))

    def decide(self, max_width: int) -> GateDecision:
        """How many tokens the next window may propose, and why.

        Args:
            max_width: What the window has room for.
        """
        if self.account.plain_ms is None:
            return GateDecision(0, "measuring a plain window first")
        if self.account.wait:
            return GateDecision(0, f"proposing lost time: trying again in {self.account.wait} windows")
        return GateDecision(max_width, f"open, {self.account.balance:+.1f} plain windows won")

    def record(self, num_proposed: int, num_committed: int, elapsed_ms: float) -> None:
        """Enter a judged window.

        Args:
            num_proposed: Proposed tokens that it carried.
            num_committed: Tokens that it committed, at least one.
            elapsed_ms: From sending it to its verdict.
        """
        account = replace(self.account, wait=max(0, self.account.wait - 1))
        if num_proposed == 0:
            account = replace(account, plain_ms=self._mean(account.plain_ms, elapsed_ms))
        elif account.plain_ms:
            won = num_committed - elapsed_ms / account.plain_ms
            account = self._settle(replace(account, balance=account.balance + won))
        self.account = account

    def _mean(self, mean_ms: float | None, newest_ms: float) -> float:
        return newest_ms if mean_ms is None else mean_ms + self._options.plain_weight * (newest_ms - mean_ms)

    def _settle(self, account: GateAccount) -> GateAccount:
        options = self._options
        if account.balance >= 0.0:
            return replace(
                account, balance=min(account.balance, options.max_credit), pause=options.first_pause
            )
        if account.balance > -options.max_loss:
            return account
        # The next try starts overdrawn: one more loss to speak of shuts the gate again.
        return replace(
            account,
            balance=-options.max_loss / 2,
            wait=account.pause,
            pause=min(2 * account.pause, options.max_pause),
        )
