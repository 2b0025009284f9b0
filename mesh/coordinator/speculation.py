"""Speculation of a session: guarded proposers, controller and limits."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import structlog

from spanmesh_proto.row_ids import num_before_rows, stray_id
from speculative.acceptance import Decision, ProposalContext
from speculative.controller import Controller, SharedMeasures
from speculative.proposer import (
    EMPTY,
    ChainProposer,
    DraftReader,
    FeatureReader,
    PartReader,
    Proposal,
    is_drafter,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from mesh.coordinator.generation import Generation
    from mesh.coordinator.options import CoordinatorOptions
    from mesh.engine import GenerationRequest, SpeculationLimits
    from speculative.acceptance import WindowOutcome
    from speculative.controller import ControllerOptions
    from speculative.cost_model import DraftCost
    from speculative.proposer import Draft, Proposer

log = structlog.get_logger()


class Speculator:
    """Speculation of one session: asks the controller how much to propose, and the proposers for tokens.

    Args:
        proposers: Proposers, cheapest first.
        options: Controller options of this session.
        shared: Measurements shared by all sessions of the coordinator.
        left_out: Names of the request's proposers if its drafters are left out; None if they are not.
        end_tokens: Ids that end the answer.
        num_sessions: Returns the number of running sessions.
        clock_ms: Monotonic clock, milliseconds.
    """

    def __init__(
        self,
        proposers: Sequence[GuardedProposer],
        options: ControllerOptions,
        shared: SharedMeasures,
        *,
        left_out: str | None = None,
        end_tokens: Collection[int],
        num_sessions: Callable[[], int],
        clock_ms: Callable[[], float],
    ) -> None:
        self._guarded = tuple(proposers)
        self._controller = Controller(options, shared, names_of(proposers))
        self._shared = shared
        self._left_out = left_out
        self._num_committed = 0
        self._proposer: Proposer = (
            proposers[0] if len(proposers) == 1 else ChainProposer(proposers, self._controller.acceptances)
        )
        self._timing = shared.timing
        self._end_tokens = end_tokens
        self._num_sessions = num_sessions
        self._clock_ms = clock_ms
        self._untold: list[int] = []
        # A proposer rests until it is first asked.
        self._is_resting = True
        self._is_closed = False
        self._decision = Decision(0, "no decision yet")

    def listen(self, on_ready: Callable[[], None]) -> None:
        """Set the callback, from any thread, for when the proposer has more to propose."""
        self._proposer.listen(on_ready)

    def begin(self, prompt: Sequence[int], call_soon: Callable[[Callable[[], None]], object]) -> None:
        """Pass the prompt to the proposer, which reads a part of long texts in each turn of the event loop.

        Args:
            prompt: Token ids.
            call_soon: Has a function called in the next turn.
        """
        self._proposer.extend(prompt)

        def read_on() -> None:
            if not self._is_closed and any(proposer.read_on() for proposer in self._guarded):
                call_soon(read_on)

        read_on()

    def next_proposal(self, generation: Generation) -> Proposal:
        """Proposed tokens to send now; if there are none the caller waits or sends a plain window."""
        room = generation.room
        if room < 1 and generation.num_in_flight:
            return EMPTY
        context = ProposalContext(
            now_ms=self._clock_ms(),
            num_in_flight=generation.num_in_flight,
            position=generation.position,
            room=max(0, room),
            num_sessions=self._num_sessions(),
        )
        wanted = min(self._controller.wanted(context), room)
        if wanted < 1:
            self._controller.decide(context, EMPTY)
            self._rest(generation)
            return EMPTY
        # While no tokens are wanted the proposer is not updated: speculation that is off costs nothing.
        self._is_resting = False
        self._catch_up()
        for proposer in self._guarded:
            if proposer.takes_features:
                proposer.most_tokens = self._controller.draft_limit(proposer.name)
        proposal = self._without_end(self._proposer.propose(wanted, generation.ahead))
        decision = self._controller.decide(context, proposal)
        if decision != self._decision:
            self._decision = decision
            log.debug(
                "speculation_decided",
                width=decision.width,
                reason=decision.reason,
                proposer=proposal.proposer,
                in_flight=context.num_in_flight,
            )
        return proposal.first(decision.width) if decision.width > 0 else EMPTY

    def landed(self, *, is_void: bool) -> None:
        """Record that the oldest window came back, before the next proposal is asked for.

        Args:
            is_void: Whether all windows behind it are void.
        """
        self._controller.landed(is_void=is_void)

    @property
    def wants_features(self) -> bool:
        """Whether features of windows are of use now."""
        return any(proposer.takes_features for proposer in self._guarded) and not self._controller.rests_long

    @property
    def features_may_wait(self) -> bool:
        """Whether no proposer reads features soon, so that those of several windows may share a message."""
        return self._controller.rests_awhile

    def take_features(self, start: int, rows: NDArray[np.float32]) -> None:
        """Pass features of committed positions to the proposers that read them.

        Args:
            start: Position of the first row.
            rows: float32 (rows, layers × n_embd).
        """
        for proposer in self._guarded:
            if proposer.takes_features:
                proposer.take_features(start, rows)

    @property
    def num_drafted(self) -> int:
        """Most tokens that stages are to draft behind a verdict now; 0 if drafts are of no use."""
        if self._controller.rests_awhile:
            return 0
        return max(
            (
                min(proposer.num_drafted, self._controller.draft_limit(proposer.name))
                for proposer in self._guarded
                if proposer.num_drafted
            ),
            default=0,
        )

    def take_draft(self, draft: Draft) -> None:
        """Pass a draft to the proposers that read them."""
        for proposer in self._guarded:
            proposer.take_draft(draft)

    def committed(self, tokens: Sequence[int]) -> None:
        """Queue committed tokens for the proposer; passed on when it is asked again."""
        self._untold.extend(tokens)
        self._num_committed += len(tokens)

    def learn(self, outcomes: Iterable[WindowOutcome]) -> None:
        """Pass the outcomes of windows to the controller."""
        self._timing.note_draft_cost(self.draft_cost())
        for outcome in outcomes:
            self._controller.judged(outcome)

    def draft_cost(self) -> DraftCost | None:
        """What the drafter costs; None without one."""
        costs = (proposer.draft_cost for proposer in self._guarded)
        return next((cost for cost in costs if cost is not None), None)

    def summary(self) -> Mapping[str, Any]:
        """State of the controller, with its reasons."""
        summary = self._controller.summary()
        if self._left_out is not None and not self._guarded:
            summary["reason"] = f"{self._left_out} lost time before: left out of this answer"
        return summary

    def close(self) -> None:
        """End the session."""
        self._is_closed = True
        self._catch_up()
        self._proposer.close()
        self._controller.close()
        if self._left_out is not None:
            self._shared.waited(self._left_out, self._num_committed)

    def _rest(self, generation: Generation) -> None:
        """Stop a draft model as well: it would slow the plain windows of a stage on its host."""
        if self._controller.is_resting and not self._is_resting:
            self._is_resting = True
            self._catch_up()
            self._proposer.propose(0, generation.ahead)

    def _catch_up(self) -> None:
        if self._untold:
            self._proposer.extend(self._untold)
            self._untold = []

    def _without_end(self, proposal: Proposal) -> Proposal:
        """Proposal up to an end token: no token can follow it, and the row before it samples it."""
        for index, token in enumerate(proposal.tokens):
            if token in self._end_tokens:
                return proposal.first(index)
        return proposal


class GuardedProposer:
    """Proposer that is switched off for its session when it raises or names a token that does not exist.

    A single warning gives the reason. See `speculative.proposer.Proposer`.

    Args:
        proposer: Any proposer.
        n_vocab: Number of token ids.
        session: Session id, for the warning.

    Attributes:
        name: Name of the proposer.
        most_tokens: Limit of what it is asked for; None for none.
    """

    def __init__(self, proposer: Proposer, *, n_vocab: int, session: int) -> None:
        self.name = proposer.name
        self.most_tokens: int | None = None
        self._proposer = proposer
        # Checked once: a check of a runtime protocol is slow, and this is asked several times a token.
        self._reader = proposer if isinstance(proposer, FeatureReader) else None
        self._part_reader = proposer if isinstance(proposer, PartReader) else None
        self._draft_reader = proposer if isinstance(proposer, DraftReader) else None
        self._n_vocab = n_vocab
        self._session = session
        self._is_off = False

    @property
    def num_drafted(self) -> int:
        """Most tokens of the drafts that it reads, see `DraftReader`; 0 if it reads none."""
        return 0 if self._is_off or self._draft_reader is None else self._draft_reader.num_drafted

    def take_draft(self, draft: Draft) -> None:
        """See `DraftReader.take_draft`."""
        if self._draft_reader is not None and not self._is_off:
            try:
                self._draft_reader.take_draft(draft)
            except Exception as error:  # noqa: BLE001
                self._switch_off(repr(error))

    @property
    def draft_cost(self) -> DraftCost | None:
        """What a proposer that computes costs; None for others."""
        return getattr(self._proposer, "draft_cost", None)

    @property
    def takes_features(self) -> bool:
        """Whether it drafts from features, see `speculative.proposer.FeatureReader`."""
        return not self._is_off and self._reader is not None

    def take_features(self, start: int, rows: NDArray[np.float32]) -> None:
        """See `FeatureReader.take_features`."""
        try:
            if self._reader is not None:
                self._reader.take_features(start, rows)
        except Exception as error:  # noqa: BLE001
            self._switch_off(repr(error))

    def extend(self, tokens: Sequence[int]) -> None:
        """See `Proposer.extend`."""
        if not self._is_off:
            try:
                self._proposer.extend(tokens)
            except Exception as error:  # noqa: BLE001 - whatever it is, the answer goes on
                self._switch_off(repr(error))

    def read_on(self) -> bool:
        """See `PartReader.read_on`."""
        try:
            return not self._is_off and self._part_reader is not None and self._part_reader.read_on()
        except Exception as error:  # noqa: BLE001
            self._switch_off(repr(error))
            return False

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """See `Proposer.propose`."""
        if self._is_off:
            return EMPTY
        if self.most_tokens is not None:
            max_tokens = min(max_tokens, self.most_tokens)
        try:
            proposal = self._proposer.propose(max_tokens, after).first(max_tokens)
            tokens = tuple(map(operator.index, proposal.tokens))
            confidences = tuple(map(float, proposal.confidences))
        except Exception as error:  # noqa: BLE001
            self._switch_off(repr(error))
            return EMPTY
        stray = stray_id(tokens, self._n_vocab, may_be_rows=True)
        if stray is not None:
            self._switch_off(f"it proposed token {stray}, which is outside the vocabulary of {self._n_vocab}")
            return EMPTY
        if len(confidences) != len(tokens):
            self._switch_off(f"it proposed {len(tokens)} tokens with {len(confidences)} confidences")
            return EMPTY
        # A text that repeats itself may foretell a picture of the prompt; an answer has none.
        sound = Proposal(tokens, confidences, proposal.proposer, proposal.depths)
        return sound.first(num_before_rows(tokens))

    def listen(self, on_ready: Callable[[], None]) -> None:
        """See `Proposer.listen`."""
        try:
            self._proposer.listen(on_ready)
        except Exception as error:  # noqa: BLE001
            self._switch_off(repr(error))

    def close(self) -> None:
        """See `Proposer.close`."""
        try:
            self._proposer.close()
        except Exception as error:  # noqa: BLE001
            self._switch_off(repr(error))

    def _switch_off(self, reason: str) -> None:
        if not self._is_off:
            self._is_off = True
            log.warning("proposer_switched_off", proposer=self.name, session=self._session, reason=reason)


class Speculators:
    """Factory of `Speculator`.

    Args:
        make_proposers: Returns the proposers for a request, cheapest first; None if the server has none.
        options: Limits of speculation, and the size of the vocabulary.
        num_sessions: Returns the number of running sessions.
        clock_ms: Monotonic clock, milliseconds.

    Attributes:
        shared: Measurements shared by all sessions.
    """

    def __init__(
        self,
        make_proposers: Callable[[GenerationRequest], Sequence[Proposer]] | None,
        options: CoordinatorOptions,
        *,
        num_sessions: Callable[[], int],
        clock_ms: Callable[[], float],
    ) -> None:
        self.shared = SharedMeasures()
        self._make_proposers = make_proposers
        self._options = options
        self._num_sessions = num_sessions
        self._clock_ms = clock_ms

    @property
    def are_any(self) -> bool:
        """Whether there are proposers at all."""
        return self._make_proposers is not None

    def make(self, session: int, request: GenerationRequest) -> Speculator | None:
        """The speculator of one request; None if it allows no proposals.

        Args:
            session: Session id, for the log.
            request: Request with its limits of speculation.
        """
        options = replace(self._options.controller, is_recurrent=not self._options.can_trim)
        controller = narrowed(options, request.speculation)
        if self._make_proposers is None or controller is None:
            return None
        try:
            proposers = self._make_proposers(request)
        except Exception as error:  # noqa: BLE001 - an answer without speculation is an answer
            log.warning("speculation_switched_off", session=session, reason=repr(error))
            return None
        if not proposers:
            return None
        guarded = [
            GuardedProposer(each, n_vocab=self._options.n_vocab, session=session) for each in proposers
        ]
        names, left_out = names_of(guarded), None
        record = self.shared.record(names) if controller.fixed_width is None else None
        if record is not None and record.rests_long:
            # They would read the text, and what the stages compute, for nothing.
            left_out = names
            for each in guarded:
                if is_drafter(each.name):
                    each.close()
            guarded = [each for each in guarded if not is_drafter(each.name)]
        return Speculator(
            guarded,
            controller,
            self.shared,
            left_out=left_out,
            end_tokens=request.end_tokens,
            num_sessions=self._num_sessions,
            clock_ms=self._clock_ms,
        )


def names_of(proposers: Iterable[GuardedProposer]) -> str:
    """Names under which the payoff of these proposers together is recorded."""
    return "+".join(proposer.name for proposer in proposers)


def narrowed(options: ControllerOptions, limits: SpeculationLimits) -> ControllerOptions | None:
    """Controller options of one request; None if it allows no proposals.

    Args:
        options: Options of the server.
        limits: Limits of the request; a bound above the server's has no effect.
    """
    if limits.mode == "off" or limits.max_width == 0 or options.fixed_width == 0:
        return None
    width, depth = limits.max_width, limits.depth
    return replace(
        options,
        max_width=_least(options.max_width, width),
        max_depth=_least(options.max_depth, depth),
        fixed_width=None if options.fixed_width is None else _least(options.fixed_width, width),
        fixed_depth=None if options.fixed_depth is None else _least(options.fixed_depth, depth),
    )


def _least(bound: int, wanted: int | None) -> int:
    return bound if wanted is None else min(bound, wanted)
