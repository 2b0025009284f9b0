"""Whether speculating pays, by the time it took: an account of tokens won and lost.

While a session speculates, what it commits is set against what plain windows would have committed in the
same time. The account starts even. Once it is overdrawn the session goes on plainly, and after a pause it
may try again; each try in vain doubles the pause. So speculation that does not pay costs a few tokens per
answer whatever a model of it may have promised, and text that turns predictable is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# How many times more a run may owe while it lasts.
_MID_RUN: Final = 2.0
# Tokens of credit for each token that was won for one.
_CREDIT: Final = 5.0
# An account of fewer tokens tells nothing.
_NUM_TELLING: Final = 24


@dataclass(frozen=True)
class AccountOptions:
    """How patient it is. Amounts are tokens, or plain windows, which bring one token each.

    Attributes:
        max_loss: Speculation stops when the account is this far below zero at the end of a run, or twice as
            far within one.
        retry_loss: And again when a new try has lost this much.
        max_credit: Gains beyond this are not remembered, or a good start would pay for a long bad end.
        first_pause: Tokens to wait before the first new try.
        max_pause: The longest wait.
        premium: Time counts for so much more than it is: what plain windows take is not known exactly either.
        max_excess: Waiting longer for one verdict is a hiccup of the machine; it counts as this much.
    """

    max_loss: float = 0.6
    retry_loss: float = 0.4
    max_credit: float = 2.0
    first_pause: int = 48
    max_pause: int = 512
    premium: float = 1.04
    max_excess: float = 2.5


class Account:
    """One session's account.

    Args:
        options: How patient it is.
        won_share: Tokens that sessions before won by speculating, for each that plain windows would have
            brought: a gain opens the account with a credit, a loss leaves this one less to lose. None if
            nothing is known.

    Attributes:
        balance: Tokens won (above zero) or lost, as far as remembered.
        wait: Tokens until the next try; 0 while speculating is allowed.
        num_tokens: Committed while speculating was allowed.
        num_plain_tokens: What plain windows would have brought in the same time.
        elapsed_ms: That time.
    """

    def __init__(self, options: AccountOptions | None = None, *, won_share: float | None = None) -> None:
        self._options = options or AccountOptions()
        self._pause = self._options.first_pause
        self.balance = self._opening_balance(won_share)
        self.wait = 0
        self.num_tokens = 0
        self.num_plain_tokens = 0.0
        self.elapsed_ms = 0.0

    @property
    def won_share(self) -> float | None:
        """Tokens won for each that plain windows would have brought, below zero if lost; None if unknown."""
        if self.num_tokens < _NUM_TELLING:
            return None
        return self.num_tokens / self.num_plain_tokens - 1.0

    @property
    def is_open(self) -> bool:
        """Whether speculating is allowed now."""
        return self.wait == 0

    def add_plain(self, num_tokens: int) -> None:
        """Tokens were committed while it was not."""
        self.wait = max(0, self.wait - num_tokens)

    def add(self, num_tokens: int, elapsed_ms: float, plain_ms: float, *, is_run_over: bool = True) -> None:
        """Enter what was committed while speculating.

        Args:
            num_tokens: Committed, perhaps none.
            elapsed_ms: Since the verdict before.
            plain_ms: What a plain window takes.
            is_run_over: Whether nothing more flies. A run pays at its start, waiting for the first verdict,
                and earns behind it: in the middle it would seem to lose.
        """
        options = self._options
        self.num_tokens += num_tokens
        self.elapsed_ms += elapsed_ms
        self.num_plain_tokens += elapsed_ms / plain_ms
        cost = options.premium * elapsed_ms / plain_ms
        self.balance += max(num_tokens - cost, -options.max_excess)
        if self.balance >= options.max_credit:
            self.balance = options.max_credit
            self._pause = options.first_pause
        elif self.balance <= -options.max_loss * (1.0 if is_run_over else _MID_RUN):
            # The next try starts overdrawn: a little more loss stops it again.
            self.balance = self._overdrawn
            self.wait = self._pause
            self._pause = min(2 * self._pause, options.max_pause)

    def _opening_balance(self, won_share: float | None) -> float:
        if won_share is None:
            return 0.0
        if won_share < 0.0:
            return self._overdrawn
        return min(_CREDIT * won_share, self._options.max_credit)

    @property
    def _overdrawn(self) -> float:
        return self._options.retry_loss - self._options.max_loss
