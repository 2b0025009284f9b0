"""Generation: state machine of committed tokens and windows in flight.

Windows follow one another in flight, as in PipeInfer (Butler et al. 2024), but by absolute positions: each
starts where the one before it stops. Verdicts are judged in the order of the windows. The first token of the
oldest window is always committed: a window sent while none is in flight starts with the latest committed
token, and a window behind another one stays valid only if that one's free prediction is its first token.
Otherwise all windows in flight are void, and the next one starts with the sampled token.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from spanmesh_proto.errors import ProtocolError
from speculative.acceptance import Judgement, judge
from speculative.proposer import EMPTY, Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.engine import GenerationRequest


@dataclass(frozen=True)
class WindowPlan:
    """Window before it is sent: a span of tokens to compute.

    Attributes:
        start: Absolute position of the first token.
        tokens: Part of the prompt; or a committed token followed by proposed ones; or, in a window behind
            another one, proposed ones only.
        num_verified: Number of last rows that the tail samples.
        proposal: Proposed tokens of the window: always its last.
        is_prompt: Whether it is part of the prompt.
    """

    start: int
    tokens: tuple[int, ...]
    num_verified: int
    proposal: Proposal = EMPTY
    is_prompt: bool = False

    @property
    def stop(self) -> int:
        """Absolute position after the last token."""
        return self.start + len(self.tokens)

    @property
    def is_behind(self) -> bool:
        """Whether it was sent behind another window, whose free prediction judges its first token."""
        return len(self.proposal.tokens) == len(self.tokens)


@dataclass(frozen=True)
class Step:
    """Result of one verdict.

    Attributes:
        window: The window that was judged.
        judgement: Committed tokens, and how much of the window was accepted.
        finish: Reason why the answer ended, or None.
        voided: Windows behind it that are void now, oldest first.
    """

    window: WindowPlan
    judgement: Judgement
    finish: Literal["stop", "length"] | None
    voided: tuple[WindowPlan, ...]

    @property
    def is_unread_next(self) -> bool:
        """Whether the window was accepted, but the next one starts with another token than was sampled."""
        return bool(self.voided) and self.finish is None and not self.judgement.is_rejected


class Generation:
    """Committed tokens and windows in flight of one session; makes its windows.

    Args:
        request: Request of the session.
        context_length: Positions that the session may use.
        max_rows: Most rows of one window.
        num_cached: Prompt tokens that the stages already hold; less than all.

    Attributes:
        request: As given.
        num_cached: As given, or as passed to `skip` after a `rewind`.
    """

    def __init__(
        self, request: GenerationRequest, *, context_length: int, max_rows: int, num_cached: int = 0
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
        return min(wanted, self._max_rows - (not self._in_flight))

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
        tokens = self._prefix[start : start + num_rows]
        self._num_prefilled += len(tokens)
        return self._send(WindowPlan(start, tokens, int(self.is_prefilled), is_prompt=True))

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
            return self._send(WindowPlan(self._in_flight[-1].stop, proposal.tokens, count, proposal))
        return self._send(WindowPlan(self.position - 1, (self._last, *proposal.tokens), 1 + count, proposal))

    def rewind(self) -> tuple[WindowPlan, ...]:
        """Begin again at position 0, with prompt and answer so far as the prompt; returns what flew."""
        self._prefix = self.tokens
        # In a ring that breaks while it replays, no more is known than before.
        self._num_resumable = max(self._num_resumable, self._num_computed, self.num_cached)
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
        self.num_cached = self._num_prefilled = num_cached
        self._num_computed = 0

    def commit(self, sampled: Sequence[int]) -> Step | None:
        """Take the verdict on the oldest window: the tail's ids up to the first that was not proposed.

        Returns:
            What it came to; None for a prefill chunk that asked for no ids.

        Raises:
            ProtocolError: If the verdict cannot belong to the window.
        """
        if not self._in_flight:
            raise ProtocolError("the tail answers a window, but none is in flight")
        window = self._in_flight[0]
        if not window.num_verified:
            if sampled:
                raise ProtocolError(
                    f"the tail sampled {len(sampled)} rows of a window at {window.start}, not 0"
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

    def _send(self, window: WindowPlan) -> WindowPlan:
        self._in_flight.append(window)
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
