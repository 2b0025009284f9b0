"""Whether speculating pays for all sessions together, by the tokens that all of them get.

A row that one session wastes is a row that another waits for, so with several at once no session's own
account tells the truth. Here they take turns together: plainly for a while, speculating for a while, plainly
again, and the time that a token took each of them decides. What does not pay pauses, each time for longer;
what pays goes on, each time for longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Turn(StrEnum):
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
class CrowdOptions:
    """How long turns are: measured ones in tokens of all sessions, the others in tokens of each.

    Attributes:
        before: Tokens of the plain turn before a trial.
        trial: Of a trial.
        after: Of the plain turn behind it.
        settle: Tokens of each after a change of turn that are not counted: windows of the old turn still fly.
        first_stay: Tokens of each in the turn that follows the first verdict in favour.
        max_stay: In the longest such turn.
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
    first_stay: int = 16
    max_stay: int = 128
    first_pause: int = 64
    max_pause: int = 1024
    min_gain: float = 1.05
    max_row_price: float = 0.22


@dataclass
class _Standing:
    """What is known for about so many sessions."""

    turn: Turn = Turn.BEFORE
    length: int = 0
    gain: float | None = None
    plain_ms: float | None = None
    trial_ms: float = 0.0


class Crowd:
    """The turns of all sessions of a coordinator. What is learned is kept for 2, 3 to 4, 5 to 8 … sessions.

    Args:
        options: How long turns are.
    """

    def __init__(self, options: CrowdOptions | None = None) -> None:
        self._options = options or CrowdOptions()
        self._standings: dict[int, _Standing] = {}
        self._num_sessions = 2
        self._begin()

    @property
    def gain(self) -> float | None:
        """Tokens with speculation over tokens without, as last compared; None before that."""
        return self._standing.gain

    @property
    def turn(self) -> Turn:
        """What all sessions do now."""
        return self._standing.turn

    @property
    def plain_ms(self) -> float | None:
        """What a token took each session when none speculated; None before that was measured."""
        return self._standing.plain_ms

    def allows(self, num_sessions: int) -> bool:
        """Whether sessions may speculate now.

        Args:
            num_sessions: How many there are.
        """
        if num_sessions != self._num_sessions:
            self._num_sessions = num_sessions
            if self.turn in {Turn.TRIAL, Turn.AFTER}:
                # With others about nothing can be compared.
                self._standing.turn = Turn.BEFORE
            self._begin()
        return self.turn in {Turn.TRIAL, Turn.ON}

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
        standing = self._standing
        match standing.turn:
            case Turn.BEFORE | Turn.OFF:
                standing.plain_ms = token_ms
                if self._num_sessions * row_ms <= self._options.max_row_price * token_ms:
                    standing.turn = Turn.TRIAL
                else:
                    self._pause()
            case Turn.TRIAL:
                standing.trial_ms = token_ms
                standing.turn = Turn.AFTER
            case Turn.AFTER:
                standing.plain_ms = (standing.plain_ms or token_ms) / 2 + token_ms / 2
                self._conclude(standing.plain_ms / max(standing.trial_ms, 1e-6))
            case Turn.ON:
                if standing.length >= self._options.max_stay:
                    standing.turn = Turn.BEFORE
                else:
                    self._conclude((standing.plain_ms or 0.0) / max(token_ms, 1e-6))

    def _conclude(self, gain: float) -> None:
        standing, options = self._standing, self._options
        standing.gain = gain
        was_on = standing.turn is Turn.ON
        if gain >= options.min_gain:
            standing.turn = Turn.ON
            standing.length = min(2 * standing.length, options.max_stay) if was_on else options.first_stay
        else:
            self._pause(is_first=was_on)

    def _pause(self, *, is_first: bool = False) -> None:
        standing, options = self._standing, self._options
        standing.turn = Turn.OFF
        is_first = is_first or standing.length < options.first_pause
        standing.length = options.first_pause if is_first else min(2 * standing.length, options.max_pause)

    def _begin(self) -> None:
        self._settling = self._options.settle * self._num_sessions
        self._num_tokens = 0
        self._elapsed_ms = 0.0

    def _length(self) -> int:
        options = self._options
        match self.turn:
            case Turn.BEFORE:
                return options.before
            case Turn.TRIAL:
                return options.trial
            case Turn.AFTER:
                return options.after
            case Turn.ON | Turn.OFF:
                return self._standing.length * self._num_sessions

    @property
    def _standing(self) -> _Standing:
        return self._standings.setdefault((self._num_sessions - 1).bit_length(), _Standing())
