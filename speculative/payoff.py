"""Payoff of speculation, of one session and of all sessions together.

While a session speculates, what it commits is set against what plain windows would have committed in the
same time. The account starts even. Once it is overdrawn the session goes on plainly, and after a pause it
may try again; each try in vain doubles the pause. So speculation that does not pay costs a few tokens per
answer whatever a model of it may have promised, and text that turns predictable is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
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
class PayoffRecord:
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
class PayoffOptions:
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


class SessionPayoff:
    """One session's account.

    Args:
        options: How patient it is.
        record: How the session before came out: a gain opens the account with a credit; after a loss this
            one has less to lose, and goes on with the pause. None if nothing is known.

    Attributes:
        balance: Tokens won (above zero) or lost, as far as remembered.
        wait: Tokens until the next try; 0 while speculating is allowed.
        num_tokens: Committed while speculating was allowed.
        num_plain_tokens: What plain windows would have brought in the same time.
        elapsed_ms: That time.
    """

    def __init__(self, options: PayoffOptions | None = None, *, record: PayoffRecord | None = None) -> None:
        self._options = options or PayoffOptions()
        self._before = record
        self._pause = self._options.first_pause
        self._plain_ms = 0.0 if record is None else record.plain_ms
        self.balance = 0.0
        self.wait = 0
        if record is not None and record.won_share >= 0.0:
            self.balance = min(_CREDIT * record.won_share, self._options.max_credit)
        elif record is not None:
            self.balance = self._overdrawn
            self._pause = record.pause
            self.wait = min(record.wait, _MAX_CARRIED)
        self.num_tokens = 0
        self.num_plain_tokens = 0.0
        self.elapsed_ms = 0.0

    @property
    def record(self) -> PayoffRecord | None:
        """What the next session should know; None if this one did not speculate enough to tell."""
        share = None if self._before is None else self._before.won_share
        if self.num_tokens >= _NUM_TELLING:
            own = self.num_tokens / self.num_plain_tokens - 1.0
            share = own if share is None else share + _NEWEST_SHARE * (own - share)
        return None if share is None else PayoffRecord(share, self._plain_ms, self._pause, self.wait)

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


# A row that one session wastes is a row that another waits for, so with several at once no session's own
# account tells the truth. Here they take turns together: plainly for a while, speculating for a while,
# plainly again, and the time that a token took each of them decides. What does not pay pauses, each time for
# longer; what pays goes on, each time for longer.
class GroupPhase(StrEnum):
    """What all sessions do now.

    Attributes:
        BEFORE: Plain, to know what a token takes.
        TRIAL: Speculating, to compare.
        AFTER: Plain once more: what changed meanwhile must not pass for a gain.
        ON: Speculating, for it pays.
        OFF: Plain, for it does not.
    """

    BEFORE = "before"
    TRIAL = "trial"
    AFTER = "after"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True)
class GroupPayoffOptions:
    """How long turns are: measured ones in tokens of all sessions, the others in tokens of each.

    Attributes:
        before: Tokens of the plain turn before a trial.
        trial: Of a trial.
        after: Of the plain turn behind it.
        settle: Tokens of each after a change of turn that are not counted: windows of the old turn still fly.
        first_run: Tokens of each in the turn that follows the first verdict in favour.
        max_run: In the longest such turn.
        first_pause: In the turn that follows the first verdict against.
        max_pause: In the longest such turn.
        min_gain: How many times more tokens than plain windows speculation must bring.
        max_row_price: Where a row takes as long as this many tokens of all sessions do, stages have no time
            to spare: no trial is made.
    """

    before: int = 64
    trial: int = 16
    after: int = 16
    settle: int = 1
    first_run: int = 16
    max_run: int = 128
    first_pause: int = 64
    max_pause: int = 1024
    min_gain: float = 1.05
    max_row_price: float = 0.22


@dataclass
class _GroupRecord:
    """What is known for about so many sessions."""

    phase: GroupPhase = GroupPhase.BEFORE
    length: int = 0
    gain: float | None = None
    plain_ms: float | None = None
    trial_ms: float = 0.0


class GroupPayoff:
    """The turns of all sessions of a coordinator. What is learned is kept for 2, 3 to 4, 5 to 8 … sessions.

    Args:
        options: How long turns are.
    """

    def __init__(self, options: GroupPayoffOptions | None = None) -> None:
        self._options = options or GroupPayoffOptions()
        self._records: dict[int, _GroupRecord] = {}
        self._num_sessions = 2
        self._begin()

    @property
    def gain(self) -> float | None:
        """Tokens with speculation over tokens without, as last compared; None before that."""
        return self._record.gain

    @property
    def phase(self) -> GroupPhase:
        """What all sessions do now."""
        return self._record.phase

    @property
    def plain_ms(self) -> float | None:
        """What a token took each session when none speculated; None before that was measured."""
        return self._record.plain_ms

    def allows(self, num_sessions: int) -> bool:
        """Whether sessions may speculate now.

        Args:
            num_sessions: How many there are.
        """
        if num_sessions != self._num_sessions:
            self._num_sessions = num_sessions
            if self.phase in {GroupPhase.TRIAL, GroupPhase.AFTER}:
                # With others about nothing can be compared.
                self._record.phase = GroupPhase.BEFORE
            self._begin()
        return self.phase in {GroupPhase.TRIAL, GroupPhase.ON}

    def add(self, num_tokens: int, elapsed_ms: float, *, row_ms: float = 0.0) -> None:
        """A session committed tokens.

        Args:
            num_tokens: How many.
            elapsed_ms: Since those before.
            row_ms: What one more row adds to a batch, as far as is known.
        """
        if self._settling > 0:
            self._settling -= num_tokens
            return
        self._num_tokens += num_tokens
        self._elapsed_ms += elapsed_ms
        if self._num_tokens >= self._length():
            self._finish(self._elapsed_ms / self._num_tokens, row_ms)
            self._begin()

    def _finish(self, token_ms: float, row_ms: float) -> None:
        record = self._record
        match record.phase:
            case GroupPhase.BEFORE | GroupPhase.OFF:
                record.plain_ms = token_ms
                if self._num_sessions * row_ms <= self._options.max_row_price * token_ms:
                    record.phase = GroupPhase.TRIAL
                else:
                    self._pause()
            case GroupPhase.TRIAL:
                record.trial_ms = token_ms
                record.phase = GroupPhase.AFTER
            case GroupPhase.AFTER:
                record.plain_ms = (record.plain_ms or token_ms) / 2 + token_ms / 2
                self._conclude(record.plain_ms / max(record.trial_ms, 1e-6))
            case GroupPhase.ON:
                if record.length >= self._options.max_run:
                    record.phase = GroupPhase.BEFORE
                else:
                    self._conclude((record.plain_ms or 0.0) / max(token_ms, 1e-6))

    def _conclude(self, gain: float) -> None:
        record, options = self._record, self._options
        record.gain = gain
        was_on = record.phase is GroupPhase.ON
        if gain >= options.min_gain:
            record.phase = GroupPhase.ON
            record.length = min(2 * record.length, options.max_run) if was_on else options.first_run
        else:
            self._pause(is_first=was_on)

    def _pause(self, *, is_first: bool = False) -> None:
        record, options = self._record, self._options
        record.phase = GroupPhase.OFF
        is_first = is_first or record.length < options.first_pause
        record.length = options.first_pause if is_first else min(2 * record.length, options.max_pause)

    def _begin(self) -> None:
        self._settling = self._options.settle * self._num_sessions
        self._num_tokens = 0
        self._elapsed_ms = 0.0

    def _length(self) -> int:
        options = self._options
        match self.phase:
            case GroupPhase.BEFORE:
                return options.before
            case GroupPhase.TRIAL:
                return options.trial
            case GroupPhase.AFTER:
                return options.after
            case GroupPhase.ON | GroupPhase.OFF:
                return self._record.length * self._num_sessions

    @property
    def _record(self) -> _GroupRecord:
        return self._records.setdefault((self._num_sessions - 1).bit_length(), _GroupRecord())
