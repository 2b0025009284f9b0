"""One request's way from prompt to last token, as windows out and verdicts in. Pure: no I/O, no clock.

Windows are in step here: one is judged before the next is made. Windows in flight change when `next_window`
is asked and the order of verdicts, not what a window is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from spanmesh_proto.errors import ProtocolError
from speculative.acceptance import Judgement, judge
from speculative.proposal import EMPTY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mesh.engine import GenerationRequest
    from speculative.proposer import Proposer


@dataclass(frozen=True)
class WindowPlan:
    """A span of tokens to compute.

    Attributes:
        start: Absolute position of the first token.
        tokens: For a verify window a committed token, then proposed ones.
        num_verified: How many of the last rows the tail samples.
    """

    start: int
    tokens: tuple[int, ...]
    num_verified: int


@dataclass(frozen=True)
class Step:
    """What a verdict came to.

    Attributes:
        judgement: Which tokens joined the answer, and how far the window held.
        finish: Why the answer is over, or None.
    """

    judgement: Judgement
    finish: Literal["stop", "length"] | None


class Generation:
    """Keeps prompt and committed tokens, and from them makes windows.

    Args:
        request: What to continue.
        context_length: Positions that the session may use.
        max_rows: Most rows of one window.
        max_proposed: Most proposed tokens in one window.
        proposer: Where proposed tokens come from, or None for plain decoding.
    """

    def __init__(
        self,
        request: GenerationRequest,
        *,
        context_length: int,
        max_rows: int,
        max_proposed: int,
        proposer: Proposer | None,
    ) -> None:
        self._request = request
        self._max_rows = max_rows
        self._max_proposed = min(max_proposed, max_rows - 1)
        self._proposer = proposer
        self._num_committed = 0
        self._last = request.prompt[-1]
        self._max_tokens = min(request.max_tokens, context_length - len(request.prompt))
        if proposer is not None:
            proposer.extend(request.prompt)

    @property
    def position(self) -> int:
        """Prompt and committed tokens so far."""
        return len(self._request.prompt) + self._num_committed

    def prefill(self) -> Iterator[WindowPlan]:
        """The prompt in chunks; the tail samples the last row of the last."""
        prompt = self._request.prompt
        for start in range(0, len(prompt), self._max_rows):
            tokens = prompt[start : start + self._max_rows]
            yield WindowPlan(start, tokens, int(start + len(tokens) == len(prompt)))

    @property
    def max_width(self) -> int:
        """Most proposed tokens that the next window has room for."""
        # The window's last row gives one token more than were proposed.
        return min(self._max_proposed, self._max_tokens - self._num_committed - 1)

    def next_window(self, width: int) -> WindowPlan:
        """The latest committed token and up to `width` proposed ones."""
        width = min(width, self.max_width)
        proposal = self._proposer.propose(width) if self._proposer is not None and width > 0 else EMPTY
        tokens = (self._last, *proposal.tokens[:width])
        return WindowPlan(self.position - 1, tokens, len(tokens))

    def commit(self, window: WindowPlan, sampled: tuple[int, ...]) -> Step:
        """Take a verdict: the tail's ids up to the first that differs from the proposed one.

        Raises:
            ProtocolError: If the verdict cannot belong to the window.
        """
        try:
            judgement = judge(
                window.tokens[len(window.tokens) - window.num_verified + 1 :],
                sampled,
                end_tokens=self._request.end_tokens,
                max_committed=self._max_tokens - self._num_committed,
            )
        except ValueError as error:
            raise ProtocolError(f"the tail's answer to a window at {window.start}: {error}") from None
        self._num_committed += len(judgement.committed)
        self._last = judgement.committed[-1]
        if self._proposer is not None:
            self._proposer.extend(judgement.committed)
        if judgement.has_stop:
            return Step(judgement, "stop")
        return Step(judgement, "length" if self._num_committed >= self._max_tokens else None)
