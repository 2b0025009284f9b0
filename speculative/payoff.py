"""Payoff of speculation: for one session, and for all sessions together.

While a session speculates, its committed tokens are compared with those that plain windows would have
committed in the same time. The balance starts at zero. Once it is overdrawn the session continues with plain
windows, and after a pause it may try again; each failed try doubles the pause. So speculation that does not
pay costs a few tokens per answer, whatever the model predicts, and text that becomes predictable is noticed.
A drafter that brings hardly any token is left out of whole answers: it takes time even where it is silent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

SHORT_WAIT: Final = 32
"""Tokens before speculation is tried again from which drafters read the text."""

# Factor of the allowed loss while a run lasts.
_MID_RUN: Final = 2.0
# Tokens of initial credit for each token won per plain token.
_CREDIT: Final = 5.0
# A record over fewer tokens is not significant, unless they took the time of so many plain ones: where little
# is committed in a long time, what is remembered never has as many.
_NUM_TELLING: Final = 16
_NUM_TELLING_PLAIN: Final = 32.0
# Or unless speculation stopped so often and won nothing in between: of short answers each loses a token, most
# of it in one window.
_NUM_TELLING_STOPS: Final = 3
# Plain tokens of former sessions that count together.
_NUM_REMEMBERED: Final = 64.0
# Least share of tokens that a drafter is to have drafted: even where it proposes nothing, what it reads and
# computes takes the time of one or two plain tokens in a hundred.
_LEAST_DRAFTED: Final = 0.02
# Tokens behind which fewer are no chance, and those of former sessions that count together.
_NUM_TELLING_DRAFTING: Final = 96.0
_NUM_DRAFTING_REMEMBERED: Final = 128.0
# Those that count after a wait: a short answer more tells.
_NUM_KEPT_BEHIND_WAIT: Final = 64.0
# Tokens of answers without such a drafter: the first time, and at most.
_FIRST_LEFT_OUT: Final = 256
_MAX_LEFT_OUT: Final = 2048
# Longest wait caused by the session before, in tokens: its text is another.
_MAX_CARRIED: Final = 96
# A plain window time that differs by this factor belongs to another ring.
_OTHER_RING: Final = 1.4


@dataclass(frozen=True)
class DraftingRecord:
    """What drafters brought to former sessions, in tokens: other than times, these are certain."""

    num_tokens: float = 0.0
    """Tokens committed while a drafter drafted, of the latest sessions."""
    num_drafted: float = 0.0
    """Those of them that it had drafted."""
    wait: int = 0
    """Tokens left for which sessions do without drafters."""
    pause: int = _FIRST_LEFT_OUT
    """Length of the next such wait."""

    def after(self, num_tokens: int, num_drafted: int) -> DraftingRecord:
        """The record after one more session.

        Args:
            num_tokens: Tokens committed in it while a drafter drafted, perhaps none.
            num_drafted: Those of them that it had drafted.
        """
        tokens, drafted = self.num_tokens + num_tokens, self.num_drafted + num_drafted
        if drafted >= _LEAST_DRAFTED * tokens:
            kept = min(1.0, _NUM_DRAFTING_REMEMBERED / max(tokens, 1.0))
            return DraftingRecord(kept * tokens, kept * drafted)
        if tokens < _NUM_TELLING_DRAFTING:
            return replace(self, num_tokens=tokens, num_drafted=drafted)
        kept = _NUM_KEPT_BEHIND_WAIT / tokens
        return DraftingRecord(kept * tokens, kept * drafted, self.pause, min(2 * self.pause, _MAX_LEFT_OUT))


@dataclass(frozen=True)
class PayoffRecord:
    """Payoff of former sessions."""

    num_tokens: float
    """Tokens committed while speculating, of the latest sessions."""
    num_plain_tokens: float
    """Tokens of plain windows in the same time."""
    plain_ms: float
    """Time of a plain window then."""
    pause: int
    """Length of the next pause, in tokens."""
    wait: int
    """Tokens left of the current pause."""
    num_stops: int = 0
    """How often speculation stopped since it last won."""
    drafting: DraftingRecord = DraftingRecord()
    """What drafters brought."""

    @property
    def won_share(self) -> float | None:
        """Tokens won per plain token; negative if they were lost; None if too few are known."""
        is_short = self.num_tokens < _NUM_TELLING and self.num_plain_tokens < _NUM_TELLING_PLAIN
        if is_short and self.num_stops < _NUM_TELLING_STOPS:
            return None
        return self.num_tokens / self.num_plain_tokens - 1.0

    @property
    def rests_long(self) -> bool:
        """Whether sessions are to do without what takes time even while nothing is proposed."""
        stops_often = self.num_stops >= _NUM_TELLING_STOPS and (self.won_share or 0.0) < 0.0
        return (stops_often and self.wait > SHORT_WAIT) or self.drafting.wait > SHORT_WAIT

    def waited(self, num_tokens: int) -> PayoffRecord:
        """The record after a session of so many tokens that did without drafters."""
        drafting = replace(self.drafting, wait=max(0, self.drafting.wait - num_tokens))
        return replace(self, wait=max(0, self.wait - num_tokens), drafting=drafting)

    def holds_at(self, plain_ms: float) -> bool:
        """Whether the ring is about the same, by the time of a plain window."""
        return max(plain_ms, self.plain_ms) <= _OTHER_RING * min(plain_ms, self.plain_ms)


@dataclass(frozen=True)
class PayoffOptions:
    """Patience of a session. Amounts are tokens, or plain windows, which bring one token each."""

    max_loss: float = 0.6
    """Speculation stops when the balance is this far below zero at the end of a run, or twice as far within
    one."""
    retry_loss: float = 0.4
    """And again when a new try has lost this much."""
    max_credit: float = 2.0
    """Bound of the balance, so that a good start does not pay for a long bad end."""
    first_pause: int = 48
    """Tokens to wait before the first new try."""
    max_pause: int = 512
    """Longest wait."""
    premium: float = 1.04
    """Factor of elapsed time, since the time of plain windows is not known exactly."""
    silent_slack: float = 0.02
    """Excess of a window without proposals over a plain one that counts as none."""
    max_excess: float = 2.5
    """Bound of the wait for one verdict, which may be disturbed."""


class SessionPayoff:
    """Balance of one session.

    Args:
        options: Patience.
        record: Payoff of former sessions: after a gain the balance starts with a credit; after a loss with
            less to lose, and with the rest of the pause. None without a record.

    Attributes:
        balance: Tokens won (above zero) or lost, within the bounds.
        wait: Tokens until the next try; 0 while speculation is allowed.
        num_tokens: Tokens committed while speculation was allowed.
        num_plain_tokens: Tokens of plain windows in the same time.
        elapsed_ms: That time.
    """

    def __init__(self, options: PayoffOptions | None = None, *, record: PayoffRecord | None = None) -> None:
        self._options = options or PayoffOptions()
        self._before = record
        self._pause = self._options.first_pause
        self._num_stops = 0 if record is None else record.num_stops
        self._drafting_before = DraftingRecord() if record is None else record.drafting
        self._plain_ms = 0.0 if record is None else record.plain_ms
        self.balance = 0.0
        self.wait = 0
        share = None if record is None else record.won_share
        if share is not None and share >= 0.0:
            self.balance = min(_CREDIT * share, self._options.max_credit)
        elif record is not None:
            self._pause = record.pause
        if record is not None and share is not None and share < 0.0:
            self.balance = self._overdrawn
            self.wait = min(record.wait, _MAX_CARRIED)
        self.num_tokens = 0
        self.num_plain_tokens = 0.0
        self.elapsed_ms = 0.0
        self._num_drafting = 0
        self._num_drafted = 0

    @property
    def record(self) -> PayoffRecord | None:
        """Payoff for the next session; None if none has speculated yet.

        Each session counts by its tokens: those that lose end after a few, so a mean over sessions would make
        a loss of what pays. And those few count once they are significant together.
        """
        before = self._before
        num_tokens, num_plain_tokens = float(self.num_tokens), self.num_plain_tokens
        if before is not None:
            num_tokens += before.num_tokens
            num_plain_tokens += before.num_plain_tokens
        if not num_plain_tokens:
            return None
        kept = min(1.0, _NUM_REMEMBERED / num_plain_tokens)
        return PayoffRecord(
            kept * num_tokens,
            kept * num_plain_tokens,
            self._plain_ms,
            self._pause,
            self.wait,
            self._num_stops,
            self._drafting_before.after(self._num_drafting, self._num_drafted),
        )

    @property
    def is_open(self) -> bool:
        """Whether speculation is allowed now."""
        return self.wait == 0

    def add_plain(self, num_tokens: int) -> None:
        """Record tokens committed while it was not allowed."""
        self.wait = max(0, self.wait - num_tokens)

    def add_drafting(self, num_tokens: int, num_drafted: int) -> None:
        """Record tokens of a window that a drafter might have proposed, and those that it had."""
        self._num_drafting += num_tokens
        self._num_drafted += num_drafted

    def add(
        self,
        num_tokens: int,
        elapsed_ms: float,
        plain_ms: float,
        *,
        is_run_over: bool = True,
        is_silent: bool = False,
        luck: float = 0.0,
    ) -> None:
        """Record tokens committed while speculating.

        Args:
            num_tokens: Committed tokens, perhaps none.
            elapsed_ms: Time since the verdict before.
            plain_ms: Time of a plain window.
            is_run_over: Whether no window is in flight. A run costs time at its start, until the first
                verdict, and gains later: in the middle it would seem to lose.
            is_silent: Whether nothing was proposed; a drafter that only computes may still slow a window.
            luck: Tokens among them that were won by chance, or that chance cost if negative.
        """
        options = self._options
        self._plain_ms = plain_ms
        self.num_tokens += num_tokens
        self.elapsed_ms += elapsed_ms
        self.num_plain_tokens += elapsed_ms / plain_ms
        cost = options.premium * elapsed_ms / plain_ms
        if is_silent:
            # Nothing was won that an uncertain time of plain windows could feign; and that time is of the
            # quicker ones.
            cost = max(num_tokens, elapsed_ms / plain_ms - options.silent_slack)
        self.balance += max(num_tokens - luck - cost, -options.max_excess)
        if self.balance >= options.max_credit:
            self.balance = options.max_credit
            self._pause = options.first_pause
            self._num_stops = 0
        elif self.balance <= -options.max_loss * (1.0 if is_run_over else _MID_RUN):
            # The next try starts overdrawn: a little more loss stops it again.
            self.balance = self._overdrawn
            self.wait = self._pause
            self._num_stops += 1
            self._pause = min(2 * self._pause, options.max_pause)

    @property
    def _overdrawn(self) -> float:
        return self._options.retry_loss - self._options.max_loss


# A row that one session wastes delays another, so with several at once no session's own balance is right.
# Here all take turns: plain windows for a while, speculation for a while, plain windows again, and the
# measured times of a token decide. What does not pay pauses, each time for longer; what pays continues, each
# time for longer.
class GroupPhase(StrEnum):
    """Current turn of all sessions."""

    BEFORE = "before"
    """Plain windows, to measure the time of a token."""
    TRIAL = "trial"
    """Speculation, to compare."""
    AFTER = "after"
    """Plain windows again: other changes meanwhile must not count as a gain."""
    ON = "on"
    """Speculation, which pays."""
    OFF = "off"
    """Plain windows, as speculation does not pay."""


@dataclass(frozen=True)
class GroupPayoffOptions:
    """Lengths of turns: measured ones in tokens of all sessions, the others in tokens of each."""

    before: int = 64
    """Tokens of the plain turn before a trial."""
    trial: int = 16
    """Tokens of a trial."""
    after: int = 16
    """Tokens of the plain turn after it."""
    settle: int = 1
    """Tokens of each session after a change of turn that are not counted: old windows are in flight."""
    first_run: int = 16
    """Tokens of each session in the turn after the first decision for speculation."""
    max_run: int = 128
    """Tokens in the longest such turn."""
    first_pause: int = 64
    """Tokens of each session in the turn after the first decision against it."""
    max_pause: int = 1024
    """Tokens in the longest such turn."""
    min_gain: float = 1.05
    """Least ratio of tokens to those of plain windows."""
    max_row_price: float = 0.22
    """If a row takes as long as this many tokens of all sessions, stages have no time to spare: no trial is
    made."""


@dataclass
class _GroupRecord:
    """State for about this many sessions."""

    phase: GroupPhase = GroupPhase.BEFORE
    length: int = 0
    gain: float | None = None
    plain_ms: float | None = None
    trial_ms: float = 0.0


class GroupPayoff:
    """Turns of all sessions of a coordinator, with a state for each of 2, 3 to 4, 5 to 8 … sessions.

    Args:
        options: Lengths of turns.
    """

    def __init__(self, options: GroupPayoffOptions | None = None) -> None:
        self._options = options or GroupPayoffOptions()
        self._records: dict[int, _GroupRecord] = {}
        self._num_sessions = 2
        self._begin()

    @property
    def gain(self) -> float | None:
        """Ratio of tokens with and without speculation, as last measured; None before that."""
        return self._record.gain

    @property
    def phase(self) -> GroupPhase:
        """Current turn."""
        return self._record.phase

    @property
    def plain_ms(self) -> float | None:
        """Time of a token of each session without speculation; None before it was measured."""
        return self._record.plain_ms

    def allows(self, num_sessions: int) -> bool:
        """Whether sessions may speculate now.

        Args:
            num_sessions: Running sessions.
        """
        if num_sessions != self._num_sessions:
            self._num_sessions = num_sessions
            if self.phase in {GroupPhase.TRIAL, GroupPhase.AFTER}:
                # Other sessions make the comparison meaningless.
                self._record.phase = GroupPhase.BEFORE
            self._begin()
        return self.phase in {GroupPhase.TRIAL, GroupPhase.ON}

    def add(self, num_tokens: int, elapsed_ms: float, *, row_ms: float = 0.0) -> None:
        """Record tokens committed by a session.

        Args:
            num_tokens: Number of tokens.
            elapsed_ms: Time since those before.
            row_ms: Time that one more row adds to a batch, if known.
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
