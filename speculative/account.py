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
_NUM_TELLING: Final = 16
# What the newest session says counts for so much.
_NEWEST_SHARE: Final = 0.5
# Most tokens that a session waits because of the one before: its text is another.
_MAX_CARRIED: Final = 96
# Plain windows that take so many times longer, or shorter, are another ring's.
_OTHER_RING: Final = 1.4


@dataclass(frozen=True)
class Standing:
    """How speculating came out so far.

    Attributes:
        won_share: Tokens won for each that plain windows would have brought; below zero if they were lost.
        plain_ms: What a plain window took then.
        pause: How long the next pause will be, in tokens.
        wait: Tokens left of the latest one.
    """

    won_share: float
    plain_ms: float
    pause: int
    wait: int

    def holds_at(self, plain_ms: float) -> bool:
        """Whether the ring is much the same still: another wire, or another split, is another question."""
        return max(plain_ms, self.plain_ms) <= _OTHER_RING * min(plain_ms, self.plain_ms)


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
        standing: How the session before came out: a gain opens the account with a credit; after a loss this
            one has less to lose, and goes on with the pause. None if nothing is known.

    Attributes:
        balance: Tokens won (above zero) or lost, as far as remembered.
        wait: Tokens until the next try; 0 while speculating is allowed.
        num_tokens: Committed while speculating was allowed.
        num_plain_tokens: What plain windows would have brought in the same time.
        elapsed_ms: That time.
    """

    def __init__(self, options: AccountOptions | None = None, *, standing: Standing | None = None) -> None:
        self._options = options or AccountOptions()
        self._before = standing
        self._pause = self._options.first_pause
        self._plain_ms = 0.0 if standing is None else standing.plain_ms
        self.balance = 0.0
        self.wait = 0
        if standing is not None and standing.won_share >= 0.0:
            self.balance = min(_CREDIT * standing.won_share, self._options.max_credit)
        elif standing is not None:
            self.balance = self._overdrawn
            self._pause = standing.pause
            self.wait = min(standing.wait, _MAX_CARRIED)
        self.num_tokens = 0
        self.num_plain_tokens = 0.0
        self.elapsed_ms = 0.0

    @property
    def standing(self) -> Standing | None:
        """What the next session should know; None if this one did not speculate enough to tell."""
        share = None if self._before is None else self._before.won_share
        if self.num_tokens >= _NUM_TELLING:
            own = self.num_tokens / self.num_plain_tokens - 1.0
            share = own if share is None else share + _NEWEST_SHARE * (own - share)
        return None if share is None else Standing(share, self._plain_ms, self._pause, self.wait)

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
        self._plain_ms = plain_ms
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

    @property
    def _overdrawn(self) -> float:
        return self._options.retry_loss - self._options.max_loss
