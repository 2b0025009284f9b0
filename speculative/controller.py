"""Speculation controller: number of tokens to propose, its options and shared measurements.

Three criteria, from fast to slow. The acceptance probability of each proposed token must exceed the cost of
its row (`acceptance.Calibration`, `cost_model.row_price`). Widths and depth are those with the most expected
tokens per second (`cost_model.best_rate`). And measurements decide last: the payoff of a session, or of the
group where several sessions share the ring, stops speculation that brings fewer tokens than plain windows,
and retries ever more rarely.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any, Final

from speculative.acceptance import AcceptanceTable, Calibration, Decision, ProposalContext, WindowOutcome
from speculative.cost_model import DecodeTimeModel, Timing, WindowPlanRate, best_rate, row_ms, row_price
from speculative.payoff import SHORT_WAIT, GroupPayoff, SessionPayoff
from speculative.proposer import CONFIRMED_SHARE, is_drafter

if TYPE_CHECKING:
    from speculative.payoff import PayoffRecord
    from speculative.proposer import Proposal

_ACCEPTANCE_MEMORY: Final = 200.0
# Most proposed rows of all sessions together in one batch.
_ROW_BUDGET: Final = 48
# Judged windows between two computations of the best rate.
_PACE_EVERY: Final = 8
# Plain windows of the first session, before anything is proposed.
_NUM_FIRST_PLAIN: Final = 2
# Tokens that a draft model may still draft after nothing is wanted any more.
_NUM_DRAFTED_ON: Final = 8
# Tokens before that from which they are wanted at once: features of a few windows are on their way.
_FEATURES_SOON: Final = 8
# Share of a drafter's luck that the payoff does not see; the rest guards against a wrong calibration.
_LUCK_SHARE: Final = 0.8
# A drafted token may be likelier than the mean by this factor; and the bounds of its hoped-for acceptance.
_HOPE: Final = 1.5
_MOST_HOPE: Final = 0.95
_FIRST_PROBE: Final = 32
_MAX_PROBE: Final = 512


@dataclass(frozen=True)
class ControllerOptions:
    """Limits and switches of a controller.

    Raises:
        ValueError: If a value is out of range.
    """

    max_width: int = 16
    """Most proposed tokens in one window."""
    max_depth: int = 24
    """Most windows of a session in flight; 1 sends one at a time."""
    fixed_width: int | None = None
    """Always this many proposed tokens, or as many as there are; 0 for no speculation."""
    fixed_depth: int | None = None
    """Always this many windows in flight, as far as there are proposals."""
    p_min: float | None = None
    """Least acceptance probability of a token that is sent; None leaves it to the controller."""
    is_recurrent: bool = False
    """Whether the model goes back to checkpoints, and computes accepted tokens again."""

    def __post_init__(self) -> None:
        if self.max_width < 1 or self.max_depth < 1:
            raise ValueError(f"{self}: max_width and max_depth must be 1 or more")
        if (self.fixed_width or 0) < 0 or (self.fixed_depth is not None and self.fixed_depth < 1):
            raise ValueError(f"{self}: fixed_width must not be negative, fixed_depth 1 or more")
        if self.p_min is not None and not 0.0 <= self.p_min <= 1.0:
            raise ValueError(f"{self}: p_min must lie in [0, 1]")


@dataclass
class SharedMeasures:
    """Measurements shared by all sessions of a coordinator."""

    timing: Timing = field(default_factory=Timing)
    """Times of the ring."""
    acceptance: AcceptanceTable = field(default_factory=lambda: AcceptanceTable(_ACCEPTANCE_MEMORY))
    """Acceptance rates by confidence."""
    group_payoff: GroupPayoff = field(default_factory=GroupPayoff)
    """Payoff of speculation while several sessions run."""
    decode_time: DecodeTimeModel = field(default_factory=DecodeTimeModel)
    """Time of a plain window of a session that runs alone without speculation."""
    records: dict[str, PayoffRecord] = field(default_factory=dict)
    """Payoff of former sessions, by proposers."""

    def record(self, proposers: str) -> PayoffRecord | None:
        """Payoff of former sessions with these proposers; None if there is none for this ring."""
        record, plain_ms = self.records.get(proposers), self.decode_time.ms(0)
        return record if record and plain_ms and record.holds_at(plain_ms) else None

    def waited(self, proposers: str, num_tokens: int) -> None:
        """Shorten the pause of proposers by the tokens of a session that did without them."""
        if (record := self.records.get(proposers)) is not None:
            self.records[proposers] = record.waited(num_tokens)

    def forget_ring(self) -> None:
        """Drop all times, for a new ring. Acceptance rates do not depend on it."""
        self.timing.forget_ring()
        self.group_payoff = GroupPayoff()
        self.decode_time = DecodeTimeModel()

    def add_plain(self, outcome: WindowOutcome) -> None:
        """Record a plain window that had the ring to itself."""
        self.timing.add(outcome, is_alone=True)
        self.add_plain_time(outcome)

    def add_plain_time(self, outcome: WindowOutcome) -> None:
        """Record its time as a plain window, but not the stages' times."""
        computed_ms = sum(stage.compute_ms for stage in outcome.stages)
        self.decode_time.add(outcome.position, outcome.arrived_ms - outcome.sent_ms, computed_ms)


class Controller:
    """Controller of one session.

    Args:
        options: Limits and switches.
        shared: Measurements shared by the sessions of a coordinator.
        proposers: Names of its proposers, under which its payoff is recorded.

    Attributes:
        is_resting: Whether no proposals will be wanted for a while.
    """

    def __init__(self, options: ControllerOptions, shared: SharedMeasures, proposers: str = "") -> None:
        self._options = options
        self._shared = shared
        self._timing = shared.timing
        self._calibration = Calibration(shared.acceptance)
        self._proposers = proposers
        self._num_sessions = 1
        self._position = 0
        self._payoff = SessionPayoff(record=shared.record(proposers))
        # Acceptance probability of each window in flight, given those ahead of it.
        self._flying: deque[float] = deque()
        self._last_arrived_ms: float | None = None
        self._last_behind_ms = -math.inf
        self._is_after_stale = False
        self._is_plain_turn = True
        # Of a prompt no features are of use then, either.
        self.is_resting = options.fixed_width is None and not self._payoff.is_open
        # Whether a drafter computes for this session, which may slow plain windows.
        self._is_drafting = False
        # Tokens committed since proposals were last wanted.
        self._num_plain = 0
        self._rates: dict[tuple[int, float], WindowPlanRate] = {}
        self._num_judged = 0
        self._probe_in = self._probe_every = _FIRST_PROBE
        self._rate: WindowPlanRate | None = None
        self._width = 0
        self._reason = "no decision yet"

    def wanted(self, context: ProposalContext) -> int:
        """Number of tokens to request from the proposer now; 0 for none."""
        self._num_sessions = context.num_sessions
        self._position = context.position
        if context.num_in_flight == 0:
            self._flying.clear()
        options = self._options
        if options.fixed_width is not None:
            self._is_plain_turn = options.fixed_width == 0
            limit = options.fixed_depth or options.max_depth
            width = options.fixed_width
            self._reason = f"width is fixed at {width}"
        else:
            closed = self._why_closed()
            self._is_plain_turn = self.is_resting = closed is not None
            if closed is not None:
                self._reason = closed
                return 0
            limit = options.fixed_depth or options.max_depth
            width = min(options.max_width, max(1, _ROW_BUDGET // context.num_sessions))
        if context.num_in_flight >= limit:
            self._reason = f"{context.num_in_flight} windows fill the ring"
            return 0
        return max(0, min(width, context.room))

    def draft_limit(self, proposer: str) -> int:
        """Number of tokens worth drafting now, behind those in flight; after `wanted`.

        Further ones would hardly be likely enough to be sent, and drafting takes time of the coordinator's
        host, which may be a stage's as well.

        Args:
            proposer: Name of the drafter.
        """
        # A drafter that is too slow for this ring proposes nothing, and may slow plain windows all the same.
        self._is_drafting = True
        if self._options.fixed_width is not None:
            return self._options.fixed_width
        hope = min(_HOPE * self._calibration.expected_mean(proposer), _MOST_HOPE)
        reached = math.prod(self._flying) * hope
        price = max(self._price(0, is_behind=True), self._drafting_price())
        # One is always drafted behind the committed token: the likeliest, and what shows a change.
        count = int(len(self._flying) <= 1)
        while count < self._options.max_width and reached * hope**count >= price:
            count += 1
        return count

    def decide(self, context: ProposalContext, proposal: Proposal) -> Decision:
        """Number of the proposed tokens to send now."""
        limit = min(self.wanted(context), len(proposal.tokens))
        self._is_drafting = self._is_drafting or is_drafter(proposal.proposer)
        if limit == 0:
            width = 0
        elif self._options.fixed_width is not None and self._options.p_min is None:
            width = limit
        else:
            width = self._worthwhile(context, proposal, limit)
        if width or context.num_in_flight == 0:
            sure = self._calibration.acceptances(proposal.first(width))
            self._flying.append(math.prod(sure))
        if width and context.num_in_flight:
            self._last_behind_ms = context.now_ms
        self._width = width or self._width
        return Decision(width, self._reason)

    def landed(self, *, is_void: bool) -> None:
        """The oldest window came back. To be told at once, before the next is decided on.

        Args:
            is_void: Whether all that flew behind it is void.
        """
        if self._flying:
            self._flying.popleft()
        if is_void:
            self._flying.clear()

    def judged(self, outcome: WindowOutcome) -> None:
        """Learn from a judged window; may wait until the next has left."""
        is_alone = (
            outcome.num_in_flight == 0
            and outcome.sent_ms > self._last_behind_ms
            and not self._is_after_stale
            and self._num_sessions == 1
        )
        self._num_judged += 1
        if self._num_judged % _PACE_EVERY == 0:
            self._rates.clear()
        self._timing.add(outcome, is_alone=is_alone)
        luck = self._luck(outcome)
        self._note_drafting(outcome)
        self._calibration.judged(outcome.proposal, outcome.judgement.num_accepted)
        self._update_payoff(outcome, luck, is_alone=is_alone)
        self._last_arrived_ms = outcome.arrived_ms
        self._is_after_stale = outcome.num_stale > 0

    @property
    def rests_long(self) -> bool:
        """Whether no proposals will be wanted for so long that features of the text would be of no use."""
        return self.is_resting and self._payoff.wait > SHORT_WAIT

    @property
    def rests_awhile(self) -> bool:
        """Whether no proposals will be wanted before the verdicts of the next windows."""
        return self.is_resting and self._payoff.wait > _FEATURES_SOON

    def acceptances(self, proposal: Proposal) -> tuple[float, ...]:
        """The chance of each token, given that those before it are right, as experience has it."""
        return self._calibration.acceptances(proposal)

    def close(self) -> None:
        """The session is over: what it learned about speculating stays."""
        record = self._payoff.record
        if self._num_sessions == 1 and record is not None:
            self._shared.records[self._proposers] = record

    def summary(self) -> dict[str, Any]:
        """For `timings`: what the controller does, and why."""
        payoff, plain_ms = self._payoff, self._plain_ms()
        measured = 1000 * payoff.num_tokens / payoff.elapsed_ms if payoff.elapsed_ms else None
        return {
            "policy": "auto" if self._options.fixed_width is None else "fixed",
            "width": self._width,
            "depth": self._options.fixed_depth or (self._rate.depth if self._rate else None),
            "expected_tokens_per_s": _rounded(self._rate.tokens_per_s if self._rate else None),
            "measured_tokens_per_s": _rounded(measured),
            "plain_tokens_per_s": _rounded(1000 / plain_ms if plain_ms else None),
            "won_tokens": _rounded(payoff.num_tokens - payoff.num_plain_tokens),
            "contention": _rounded(self._timing.contention),
            "reason": self._reason,
        }

    def _why_closed(self) -> str | None:
        """Reason why nothing is proposed now; None if something may be."""
        if self._num_sessions > 1:
            group_payoff = self._shared.group_payoff
            if not group_payoff.allows(self._num_sessions):
                if group_payoff.gain is None:
                    return f"measuring plain windows of {self._num_sessions} sessions"
                gain = f"{group_payoff.gain:.2f}"
                return f"{self._num_sessions} sessions got {gain} times the plain tokens: waiting"
        elif self._shared.decode_time.num_measured < _NUM_FIRST_PLAIN:
            return "measuring a plain window first"
        if not self._payoff.is_open:
            return f"proposing lost time: trying again in {self._payoff.wait} tokens"
        return None

    def _worthwhile(self, context: ProposalContext, proposal: Proposal, limit: int) -> int:
        """Number of the first `limit` tokens that are likely enough, and fit the best pace."""
        options = self._options
        sure = self._calibration.acceptances(proposal)[:limit]
        is_behind = context.num_in_flight > 0
        if options.fixed_width is None:
            drafting_ms = self._timing.draft_ms_per_token if is_drafter(proposal.proposer) else None
            # The mean that a run of such tokens would have.
            rate = self._rate = self._best_rate(math.prod(sure) ** (1 / len(sure)), drafting_ms or 0.0)
            if options.fixed_depth is None and context.num_in_flight >= rate.depth:
                self._reason = f"{context.num_in_flight} windows of {rate.width} fill the ring"
                return 0
            limit = min(limit, rate.width if is_behind else rate.front)
            if limit == 0:
                self._reason = "more tokens per second if proposed ones follow in windows of their own"
                return 0
        reached = math.prod(self._flying) if is_behind else 1.0
        rival = self._rival(proposal)
        for index in range(limit):
            if sure[index] < rival:
                self._reason = (
                    f"{proposal.proposer}: the draft model is right more often than {sure[index]:.2f}"
                )
                return index
            reached *= sure[index]
            price = self._price(index, is_behind=is_behind)
            if reached < price:
                if index == 0 and self._is_probe_due(context, proposal, price):
                    self._reason = f"probing {proposal.proposer}, which was right too rarely"
                    return 1
                self._reason = (
                    f"{proposal.proposer}: token {index + 1} is likely to {reached:.2f}, costs {price:.2f}"
                )
                return index
        self._reason = f"{proposal.proposer}: {limit} tokens, all of them likely to {reached:.2f}"
        return limit

    def _rival(self, proposal: Proposal) -> float:
        """Least probability of a token that is taken, since a draft model would have to start anew."""
        if is_drafter(proposal.proposer) or self._options.p_min is not None:
            return 0.0
        return CONFIRMED_SHARE * self._calibration.best_mean(is_drafter)

    def _price(self, index: int, *, is_behind: bool) -> float:
        if self._options.p_min is not None:
            return self._options.p_min
        plain_ms = self._plain_ms()
        if plain_ms is None:
            return 0.5
        # Behind others the first token makes a window necessary; in front a committed token has made it so.
        others = self._num_sessions - 1
        num_rows = index + 1 + others if is_behind else index + 2 + others
        is_new_window = is_behind and index == 0 and others == 0
        tokens_per_ms = self._num_sessions / plain_ms
        return row_price(
            self._timing,
            tokens_per_ms,
            num_rows=num_rows,
            is_new_window=is_new_window,
            position=self._position,
        )

    def _drafting_price(self) -> float:
        """Tokens that plain windows bring while one more row of a block is computed."""
        plain_ms, row_ms = self._plain_ms(), self._timing.draft_row_ms
        return row_ms / plain_ms if row_ms is not None and plain_ms else 0.0

    def _is_probe_due(self, context: ProposalContext, proposal: Proposal, price: float) -> bool:
        """Whether to send a token that its proposer believes in and experience does not."""
        if self._probe_in > 0 or context.num_in_flight != 1 or proposal.confidences[0] < price:
            return False
        self._probe_every = min(2 * self._probe_every, _MAX_PROBE)
        self._probe_in = self._probe_every
        return True

    def _best_rate(self, acceptance: float, token_ms: float = 0.0) -> WindowPlanRate:
        # A little coarse, so that few paces need working out.
        key = (round(20 * acceptance), token_ms)
        if key not in self._rates:
            options = self._options
            self._rates[key] = best_rate(
                self._timing,
                key[0] / 20,
                max_width=min(options.max_width, max(1, _ROW_BUDGET // self._num_sessions)),
                max_depth=options.fixed_depth or options.max_depth,
                position=self._position,
                token_ms=token_ms,
                is_recurrent=options.is_recurrent,
            )
        return self._rates[key]

    def _plain_ms(self) -> float | None:
        if self._num_sessions > 1:
            return self._shared.group_payoff.plain_ms
        return self._shared.decode_time.ms(self._position)

    def _luck(self, outcome: WindowOutcome) -> float:
        """Tokens that a window won beyond what the calibrated acceptance of its drafter lets expect.

        A drafter that reads features proposes one or two tokens a window, right now and then: the sum of what
        is won varies far more than its mean, and would end most runs by chance.
        """
        proposal, plain_ms = outcome.proposal, self._plain_ms()
        if not proposal.depths or plain_ms is None:
            return 0.0
        expected: float = sum(accumulate(self._calibration.acceptances(proposal), mul))
        # An accepted token saves a plain window, and its own window takes a stage's time.
        value = max(0.0, 1.0 - row_ms(self._timing, 1, self._position) / plain_ms)
        return _LUCK_SHARE * value * (outcome.judgement.num_accepted - expected)

    def _update_payoff(self, outcome: WindowOutcome, luck: float, *, is_alone: bool) -> None:
        num_tokens = len(outcome.judgement.committed)
        shared, payoff = self._shared, self._payoff
        self._probe_in -= num_tokens
        self._num_plain = self._num_plain + num_tokens if self._is_plain_turn else 0
        # Windows in flight behind the prompt waited for it, for an unknown time.
        since_ms = outcome.sent_ms if outcome.num_in_flight == 0 else math.inf
        if self._last_arrived_ms is not None:
            since_ms = max(outcome.sent_ms, self._last_arrived_ms)
        elapsed_ms = outcome.arrived_ms - since_ms
        # One that computes rows again is a cost of speculation.
        is_plain = not outcome.proposal.tokens and not outcome.num_recomputed
        if self._num_sessions > 1 and elapsed_ms >= 0.0:
            added_ms = row_ms(self._timing, self._num_sessions + 1, self._position)
            shared.group_payoff.add(num_tokens, elapsed_ms, row_ms=added_ms)
        elif is_plain and is_alone and elapsed_ms > 0.0:
            self._note_plain(outcome)
        plain_ms = self._plain_ms()
        # Silence is neither gain nor loss, unless a draft model works meanwhile. With others about, what
        # slows a plain window is their doing.
        is_idle = is_plain and is_alone and not self._is_drafting
        is_others = is_plain and self._num_sessions > 1
        if self._is_plain_turn:
            payoff.add_plain(num_tokens)
        elif plain_ms is not None and elapsed_ms >= 0.0 and not is_idle and not is_others:
            payoff.add(
                num_tokens,
                elapsed_ms,
                plain_ms,
                is_run_over=outcome.num_behind == 0,
                is_silent=is_plain and is_alone,
                luck=luck,
            )

    def _note_drafting(self, outcome: WindowOutcome) -> None:
        """Learn what the drafter brings, where no other proposer was quicker."""
        proposal = outcome.proposal
        if self._is_drafting and not self._is_plain_turn and not proposal.tokens:
            self._payoff.add_drafting(len(outcome.judgement.committed), 0)
        elif proposal.tokens and is_drafter(proposal.proposer):
            self._payoff.add_drafting(len(outcome.judgement.committed), outcome.judgement.num_accepted)

    def _note_plain(self, outcome: WindowOutcome) -> None:
        """Learn what a plain window takes where nothing is proposed."""
        if not self._is_drafting or self._num_plain >= _NUM_DRAFTED_ON:
            self._shared.add_plain_time(outcome)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
