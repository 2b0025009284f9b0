"""Generation: state machine of committed tokens and windows in flight, and what becomes of each window.

Windows follow one another in flight, as in PipeInfer (Butler et al. 2024), but by absolute positions: each
starts where the one before it stops. Verdicts are judged in the order of the windows. The first token of the
oldest window is always committed: a window sent while none is in flight starts with the latest committed
token, and a window behind another one stays valid only if that one's free prediction is its first token.
Otherwise all windows in flight are void, and the next one starts with the sampled token.

Stages of some models cannot go back to every position, see `Rollback`: the next window then starts at the
latest one to which they can, with the tokens that were committed since, which are computed again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from mesh.engine import PrefillProgress
from spanmesh_proto.errors import ProtocolError
from spanmesh_proto.row_ids import has_rows
from speculative.acceptance import Judgement, StageMeasure, WindowOutcome, judge, judge_unread
from speculative.proposer import EMPTY, Proposal

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from mesh.engine import GenerationRequest

# Last tokens of a prompt that the next turn of a chat often writes otherwise: the answer's header, and marks
# around a thought.
_PROMPT_END: Final = 8
# The tail keeps as many rows of logits: 20 MB at a vocabulary of 152,000.
_MOST_SCORED_ROWS: Final = 32
# Tokens computed again before a proposal is sent with them: more are sent ahead, in a window of their own,
# so that a position behind them to which stages can go back ends the growth.
_MOST_RECOMPUTED: Final = 8


@dataclass(frozen=True)
class WindowPlan:
    """Window before it is sent: a span of tokens to compute."""

    start: int
    """Absolute position of the first token."""
    tokens: tuple[int, ...]
    """Part of the prompt; or a committed token followed by proposed ones; or, in a window behind another one,
    proposed ones only."""
    num_verified: int
    """Number of last rows that the tail samples."""
    proposal: Proposal = EMPTY
    """Proposed tokens of the window: always its last."""
    is_prompt: bool = False
    """Whether it is part of the prompt."""
    num_recomputed: int = 0
    """Number of first tokens that are committed and were computed before."""
    asks: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the window's message, for plugs: what stages are to do beside computing."""
    scored_next: int | None = None
    """Token after the last, in a part of the prompt whose tokens are scored; else None."""

    @property
    def stop(self) -> int:
        """Absolute position after the last token."""
        return self.start + len(self.tokens)

    @property
    def brings_rows(self) -> bool:
        """Whether it has rows that are no tokens."""
        return has_rows(self.tokens[:1])

    @property
    def is_behind(self) -> bool:
        """Whether it was sent behind another window, whose free prediction judges its first token."""
        return len(self.proposal.tokens) == len(self.tokens)


@dataclass(frozen=True)
class Step:
    """Result of one verdict."""

    window: WindowPlan
    """The window that was judged."""
    judgement: Judgement
    """Committed tokens, and how much of the window was accepted."""
    finish: Literal["stop", "length"] | None
    """Reason why the answer ended, or None."""
    voided: tuple[WindowPlan, ...]
    """Windows behind it that are void now, oldest first."""

    @property
    def is_unread_next(self) -> bool:
        """Whether the window was accepted, but the next one starts with another token than was sampled."""
        return bool(self.voided) and self.finish is None and not self.judgement.is_rejected


class Rollback:
    """How the stages of a session go back to an earlier position: to any, at no cost."""

    def points(self, num_computed: int) -> list[int]:
        """Positions up to this one to which stages that cannot trim can go back."""
        del num_computed
        return []

    def latest(self, position: int) -> int:
        """The latest position up to this one to which they can go back."""
        return position

    def num_kept_free(self, start: int, num_committed: int) -> int:
        """Rows that a window behind others leaves free, for tokens that are computed again after a rejection.

        Args:
            start: Position of the window.
            num_committed: Tokens of the session that are committed.
        """
        del start, num_committed
        return 0

    def divides(self, num_to_prefill: int) -> bool:
        """Whether a prompt with so many tokens to compute is divided where the next turn may differ."""
        del num_to_prefill
        return False

    def before_chunk(self, start: int, num_committed: int, *, is_division: bool) -> Mapping[str, Any]:
        """What stages are to do before a chunk of a divided prompt; see `WindowPlan.asks`.

        Args:
            start: Position of the chunk.
            num_committed: Tokens of the session that are committed.
            is_division: Whether the prompt is divided there.
        """
        del start, num_committed, is_division
        return {}

    def before_window(
        self, start: int, num_committed: int, *, is_behind: bool, is_plain: bool
    ) -> Mapping[str, Any]:
        """What stages are to do before a window; see `WindowPlan.asks`.

        Args:
            start: Position of the window.
            num_committed: Tokens of the session that are committed.
            is_behind: Whether another window is in flight ahead of it.
            is_plain: Whether it has no proposed tokens.
        """
        del start, num_committed, is_behind, is_plain
        return {}

    def clear(self) -> None:
        """Forget all positions: another ring, or an emptied slot."""


class Generation:
    """Committed tokens and windows in flight of one session; makes its windows.

    Args:
        request: Request of the session.
        context_length: Positions that the session may use.
        max_rows: Most rows of one window.
        num_cached: Prompt tokens that the stages already hold; less than all.
        rollback: How its stages go back.

    Attributes:
        request: As given.
        num_cached: As given, or as passed to `skip` after a `rewind`.
    """

    def __init__(
        self,
        request: GenerationRequest,
        *,
        context_length: int,
        max_rows: int,
        num_cached: int = 0,
        rollback: Rollback | None = None,
    ) -> None:
        self.num_cached = num_cached
        self.request = request
        self._max_rows = max_rows
        self._max_tokens = min(request.max_tokens, context_length - len(request.prompt))
        self._committed: list[int] = []
        # Tokens before the first decoded one: the prompt, and in a replay the answer so far.
        self._prefix = request.prompt
        self._num_prefilled = num_cached
        self._num_computed = 0
        self._num_resumable = 0
        self._last = request.prompt[-1]
        self._in_flight: deque[WindowPlan] = deque()
        self._rollback = Rollback() if rollback is None else rollback
        # Positions that the stages' state comes to once all that was sent is computed.
        self._num_reached = num_cached

    @property
    def position(self) -> int:
        """Number of prompt and committed tokens."""
        return len(self.request.prompt) + len(self._committed)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and committed tokens."""
        return (*self.request.prompt, *self._committed)

    @property
    def computed(self) -> tuple[int, ...]:
        """First tokens that every stage holds by a verdict since the latest `Open`."""
        return self.tokens[: self._num_computed]

    @property
    def prefill_progress(self) -> PrefillProgress:
        """Progress of reading the prompt since the latest `Open`."""
        num_tokens, num_read = len(self.request.prompt), max(self._num_computed, self.num_cached)
        return PrefillProgress(num_tokens, min(self.num_cached, num_tokens), min(num_read, num_tokens))

    @property
    def return_points(self) -> tuple[int, ...]:
        """Numbers of positions among `computed` to which stages that cannot trim can go back."""
        num_computed = self._num_computed
        points = self._rollback.points(num_computed)
        if num_computed and num_computed == self._num_reached and num_computed not in points:
            points.append(num_computed)
        return tuple(points)

    @property
    def num_to_recompute(self) -> int:
        """Committed tokens that a window sent now computes again, if none is in flight."""
        if self._in_flight or self._num_reached == self.position - 1:
            return 0
        return self.position - 1 - self._rollback.latest(self.position - 1)

    @property
    def num_resumable(self) -> int:
        """After `rewind`: first positions that all stages held before it, or were expected to."""
        return self._num_resumable

    @property
    def num_in_flight(self) -> int:
        """Windows in flight, prefill chunks included."""
        return len(self._in_flight)

    @property
    def ahead(self) -> tuple[int, ...]:
        """Proposed tokens in flight, behind the committed ones."""
        tokens = tuple(token for window in self._in_flight for token in window.proposal.tokens)
        # The first token of the oldest window is always committed.
        return tokens[1:] if self._in_flight and self._in_flight[0].is_behind else tokens

    @property
    def room(self) -> int:
        """Most proposed tokens of a window sent now; below 1 for none."""
        # The last row of a window yields one token more than were proposed.
        wanted = self._max_tokens - len(self._committed) - len(self.ahead) - 1
        if self._in_flight:
            most = self._max_rows - self._rollback.num_kept_free(self._in_flight[-1].stop, self.position)
        else:
            num_recomputed = self.num_to_recompute
            most = 0 if num_recomputed > _MOST_RECOMPUTED else self._max_rows - 1 - num_recomputed
        return min(wanted, most)

    @property
    def num_prefilled(self) -> int:
        """Tokens of the prompt that were sent, or cached."""
        return self._num_prefilled

    @property
    def is_prefilled(self) -> bool:
        """Whether the whole prompt was sent."""
        return self._num_prefilled == len(self._prefix)

    @property
    def num_to_prefill(self) -> int:
        """Prompt tokens that were not cached, sent or not."""
        return len(self._prefix) - self.num_cached

    def prefill(self, num_rows: int) -> WindowPlan:
        """The next chunk of the prompt, now in flight; the tail samples the last row of the last.

        Args:
            num_rows: Its tokens, if so many are left; at least 1, and at most those of a window are taken.
        """
        start = self._num_prefilled
        num_rows = min(num_rows, self._max_rows)
        if start < self._num_resumable:
            # Stages that have these still need not compute them; those behind, all must.
            num_rows = min(num_rows, self._num_resumable - start)
        prompt_end = self.request.begin_of_input(len(self._prefix) - _PROMPT_END)
        is_divided = self._rollback.divides(self.num_to_prefill)
        if is_divided and start < prompt_end:
            num_rows = min(num_rows, prompt_end - start)
        last = len(self._prefix) - 1
        is_scored = self._scores_prompt and start < last
        if is_scored:
            num_rows = min(num_rows, _MOST_SCORED_ROWS, last - start)
        # Stages compute rows that are no tokens apart.
        tokens = self._prefix[start : start + self._num_together(start, num_rows)]
        self._num_prefilled += len(tokens)
        asks: Mapping[str, Any] = {}
        # What stages still hold they do not compute, so nothing would be done there.
        is_new = start >= self._num_resumable
        if is_new and is_divided and self.request.begin_of_input(start) == start:
            asks = self._rollback.before_chunk(start, self.position, is_division=start == prompt_end)
        return self._send(
            WindowPlan(
                start,
                tokens,
                len(tokens) if is_scored else int(self.is_prefilled),
                is_prompt=True,
                asks=asks,
                scored_next=self._prefix[self._num_prefilled] if is_scored else None,
            )
        )

    @property
    def _scores_prompt(self) -> bool:
        """Whether chunks are scored; after the first token all scores are known."""
        return self.request.scores_prompt and not self._committed

    def next_window(self, proposal: Proposal = EMPTY) -> WindowPlan:
        """A window with the proposed tokens, now in flight.

        If nothing flies, the latest committed token goes before them, and there need be none.

        Args:
            proposal: What follows the committed tokens and those ahead: at most `room` tokens.

        Raises:
            ValueError: If it is empty behind another window, or larger than the room for it.
        """
        count = len(proposal.tokens)
        if (count and count > self.room) or (self._in_flight and not count):
            raise ValueError(
                f"a window of {count} proposed tokens with {len(self._in_flight)} in flight, "
                f"where {self.room} fit"
            )
        if self._in_flight:
            start = self._in_flight[-1].stop
            return self._send(
                WindowPlan(
                    start,
                    proposal.tokens,
                    count,
                    proposal,
                    asks=self._rollback.before_window(start, self.position, is_behind=True, is_plain=False),
                )
            )
        num_recomputed = self.num_to_recompute
        start = self.position - 1 - num_recomputed
        again = self.tokens[start : start + num_recomputed] if num_recomputed else ()
        return self._send(
            WindowPlan(
                start,
                (*again, self._last, *proposal.tokens),
                1 + count,
                proposal,
                num_recomputed=num_recomputed,
                asks=self._rollback.before_window(start, self.position, is_behind=False, is_plain=not count),
            )
        )

    def rewind(self) -> tuple[WindowPlan, ...]:
        """Begin again at position 0, with prompt and answer so far as the prompt; returns what flew."""
        self._prefix = self.tokens
        # In a ring that breaks while it replays, no more is known than before.
        num_held = max(self._num_resumable, self._num_computed, self.num_cached)
        self._num_resumable = self.request.begin_of_input(num_held)
        self._rollback.clear()
        self.skip(0)
        return self._void()

    def resume_before(self, position: int) -> None:
        """After `rewind`: have all stages compute the positions from this one on, whatever they hold."""
        self._num_resumable = min(self._num_resumable, position)

    def skip(self, num_cached: int) -> None:
        """After `rewind`, before anything is sent: begin behind tokens that the stages hold already.

        Args:
            num_cached: How many; not the last.
        """
        self.num_cached = self._num_prefilled = self._num_reached = num_cached
        self._num_computed = 0

    def commit(self, sampled: Sequence[int]) -> Step | None:
        """Take the verdict on the oldest window: the tail's ids up to the first that was not proposed.

        Returns:
            What it came to; None for a prefill chunk in which nothing was sampled.

        Raises:
            ProtocolError: If the verdict cannot belong to the window.
        """
        if not self._in_flight:
            raise ProtocolError("the tail answers a window, but none is in flight")
        window = self._in_flight[0]
        if not window.num_verified or window.scored_next is not None:
            given = () if window.scored_next is None else (*window.tokens[1:], window.scored_next)
            if tuple(sampled) != given:
                raise ProtocolError(
                    f"the tail sampled {len(sampled)} rows of a chunk at {window.start} otherwise than asked"
                )
            self._in_flight.popleft()
            self._num_computed = window.stop
            return None
        try:
            judgement = judge(
                window.tokens[len(window.tokens) - window.num_verified + 1 :],
                sampled,
                num_confirmed=int(window.is_behind),
                end_tokens=self.request.end_tokens,
                max_committed=self._max_tokens - len(self._committed),
            )
        except ValueError as error:
            raise ProtocolError(f"the tail's answer to a window at {window.start}: {error}") from None
        self._in_flight.popleft()
        self._committed += judgement.committed
        self._last = judgement.committed[-1]
        # The latest was drawn from the row before it, and is itself still to be computed.
        self._num_computed = self.position - 1
        finish = self._finish(judgement)
        holds = finish is None and not judgement.is_rejected
        return Step(window, judgement, finish, () if holds and self._goes_on() else self._void())

    def _num_together(self, start: int, most: int) -> int:
        """Rows of the prompt that a window from `start` on can have: tokens alone, or of one input alone.

        Args:
            start: The first row.
            most: Most of them, but for inputs that are computed at once.
        """
        chunk = next((each.chunk for each in self.request.inputs if start < each.chunk.stop), None)
        if chunk is None:
            return most
        if start < chunk.first_row:
            return min(most, chunk.first_row - start)
        return chunk.num_rows if chunk.sees_all else min(most, chunk.stop - start)

    def _send(self, window: WindowPlan) -> WindowPlan:
        self._in_flight.append(window)
        self._num_reached = window.stop
        return window

    def _finish(self, judgement: Judgement) -> Literal["stop", "length"] | None:
        if judgement.has_stop:
            return "stop"
        return "length" if len(self._committed) >= self._max_tokens else None

    def _goes_on(self) -> bool:
        """Whether the window that is the oldest now starts with the token that was just drawn."""
        return not self._in_flight or self._in_flight[0].tokens[0] == self._last

    def _void(self) -> tuple[WindowPlan, ...]:
        voided = tuple(self._in_flight)
        self._in_flight.clear()
        return voided


class InFlightWindow(NamedTuple):
    """A window in flight."""

    id: int
    """Id of the window within its session."""
    window: WindowPlan
    """The window as sent."""
    sent_ms: float
    """When it left."""
    num_ahead: int
    """Windows of its session that were in flight then."""


def outcome(
    judgement: Judgement,
    in_flight: InFlightWindow,
    arrived_ms: float,
    *,
    stages: tuple[StageMeasure, ...],
    voided: Collection[InFlightWindow],
    behind: Collection[InFlightWindow],
) -> WindowOutcome:
    """Outcome of a judged window, for the controller."""
    return WindowOutcome(
        judgement=judgement,
        proposal=in_flight.window.proposal,
        position=in_flight.window.start,
        sent_ms=in_flight.sent_ms,
        arrived_ms=arrived_ms,
        num_in_flight=in_flight.num_ahead,
        stages=stages,
        num_stale=len(voided),
        num_behind=len(behind),
        num_recomputed=in_flight.window.num_recomputed,
    )


def outcomes_of(
    step: Step,
    in_flight: InFlightWindow,
    *,
    voided: Sequence[InFlightWindow],
    behind: Collection[InFlightWindow],
    stages: tuple[StageMeasure, ...],
    arrived_ms: float,
) -> list[WindowOutcome]:
    """Outcomes of a judged window, and of one that its free prediction voided unread.

    Args:
        step: What the verdict came to.
        in_flight: The window.
        voided: Windows behind it that are void now, oldest first.
        behind: Windows that are still in flight.
        stages: Times of the window at each stage.
        arrived_ms: When the verdict came.

    Returns:
        None of a part of the prompt.
    """
    outcomes = []
    if not in_flight.window.is_prompt:
        outcomes.append(
            outcome(step.judgement, in_flight, arrived_ms, stages=stages, voided=voided, behind=behind)
        )
    if step.is_unread_next:
        judgement = judge_unread(len(voided[0].window.tokens))
        # It is stale itself: its rows are still computed at some stage.
        outcomes.append(outcome(judgement, voided[0], arrived_ms, stages=(), voided=voided, behind=()))
    return outcomes
