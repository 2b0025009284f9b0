"""What one session sends beyond its committed tokens: its proposer, as far as its controller lets it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from speculative.controller import Controller
from speculative.outcome import Decision, Moment
from speculative.proposer import EMPTY, ChainProposer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from mesh.coordinator.generation import Generation
    from mesh.coordinator.guarded_proposer import GuardedProposer
    from speculative.controller import ControllerOptions, SharedMeasures
    from speculative.outcome import Outcome
    from speculative.proposer import Proposal, Proposer

log = structlog.get_logger()


class Speculator:
    """Asks the controller, then the proposer, then the controller again.

    Args:
        proposers: Cheapest first, at least one.
        options: The controller's, for this session.
        shared: What the sessions of the coordinator learn together.
        end_tokens: Ids that end the answer.
        num_sessions: How many run now.
        clock_ms: Monotonic.
    """

    def __init__(
        self,
        proposers: Sequence[GuardedProposer],
        options: ControllerOptions,
        shared: SharedMeasures,
        *,
        end_tokens: Collection[int],
        num_sessions: Callable[[], int],
        clock_ms: Callable[[], float],
    ) -> None:
        self._guarded = tuple(proposers)
        self._controller = Controller(options, shared, "+".join(proposer.name for proposer in proposers))
        self._proposer: Proposer = (
            proposers[0] if len(proposers) == 1 else ChainProposer(proposers, self._controller.acceptances)
        )
        self._timing = shared.timing
        self._end_tokens = end_tokens
        self._num_sessions = num_sessions
        self._clock_ms = clock_ms
        self._untold: list[int] = []
        # Until it is first asked the proposer rests anyway.
        self._is_resting = True
        self._decision = Decision(0, "nothing decided yet")

    def listen(self, on_ready: Callable[[], None]) -> None:
        """Name what to call, from any thread, when the proposer knows more."""
        self._proposer.listen(on_ready)

    def begin(self, prompt: Sequence[int]) -> None:
        """Show the proposer the prompt."""
        self._proposer.extend(prompt)

    def next_proposal(self, generation: Generation) -> Proposal:
        """The proposed tokens that should leave now; none are a reason to wait, or to send a plain window."""
        room = generation.room
        if room < 1:
            return EMPTY
        moment = Moment(
            now_ms=self._clock_ms(),
            num_in_flight=generation.num_in_flight,
            position=generation.position,
            room=room,
            num_sessions=self._num_sessions(),
        )
        wanted = min(self._controller.wanted(moment), room)
        if wanted < 1:
            self._controller.decide(moment, EMPTY)
            self._rest(generation)
            return EMPTY
        # While no tokens are wanted the proposer need not follow: speculation that is off costs nothing.
        self._is_resting = False
        self._catch_up()
        proposal = self._without_end(self._proposer.propose(wanted, generation.ahead))
        decision = self._controller.decide(moment, proposal)
        if decision != self._decision:
            self._decision = decision
            log.debug(
                "speculation_decided",
                width=decision.width,
                reason=decision.reason,
                proposer=proposal.proposer,
                in_flight=moment.num_in_flight,
            )
        return proposal.first(decision.width) if decision.width > 0 else EMPTY

    def landed(self, *, is_void: bool) -> None:
        """Take note that the oldest window came back, before the next proposal is asked for.

        Args:
            is_void: Whether all that flew behind it is void.
        """
        self._controller.landed(is_void=is_void)

    def committed(self, tokens: Sequence[int]) -> None:
        """Take note of tokens for the proposer; it hears of them when it is asked again."""
        self._untold.extend(tokens)

    def learn(self, outcomes: Iterable[Outcome]) -> None:
        """Tell the controller what became of windows."""
        self._timing.draft_ms_per_token = self.draft_ms_per_token() or self._timing.draft_ms_per_token
        for outcome in outcomes:
            self._controller.judged(outcome)

    def draft_ms_per_token(self) -> float | None:
        """What a token costs the draft model now; None without one."""
        costs = (proposer.draft_ms_per_token for proposer in self._guarded)
        return next((cost for cost in costs if cost is not None), None)

    def summary(self) -> Mapping[str, Any]:
        """What the controller does, and why."""
        return self._controller.summary()

    def close(self) -> None:
        """The session is over."""
        self._catch_up()
        self._proposer.close()
        self._controller.close()

    def _rest(self, generation: Generation) -> None:
        """Have a draft model stop too: it would slow the plain windows of a stage on its host."""
        if self._controller.is_resting and not self._is_resting:
            self._is_resting = True
            self._catch_up()
            self._proposer.propose(0, generation.ahead)

    def _catch_up(self) -> None:
        if self._untold:
            self._proposer.extend(self._untold)
            self._untold = []

    def _without_end(self, proposal: Proposal) -> Proposal:
        """Nothing follows an end token, and the row before it tells whether it comes."""
        for index, token in enumerate(proposal.tokens):
            if token in self._end_tokens:
                return proposal.first(index)
        return proposal
