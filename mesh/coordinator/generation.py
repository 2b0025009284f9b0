"""One request's way from prompt to last token, as windows out and verdicts in. Pure: no I/O, no clock.

Windows are in step here: one is judged before the next is made. Windows in flight change `next_window` and
the order of verdicts, not what a window is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from spanmesh_proto.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from speculative.proposer import Proposer

    from mesh.engine import GenerationRequest


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
class Judged:
    """What a verdict came to.

    Attributes:
        tokens: Committed by it, at least one.
        num_proposed: Proposed tokens that the window carried.
        num_accepted: Proposed tokens that the target chose too, counted before any stop.
        finish: Why the answer is over, or None.
    """

    tokens: tuple[int, ...]
    num_proposed: int
    num_accepted: int
    finish: Literal["stop", "length"] | None

    @property
    def is_rejected(self) -> bool:
        """Whether stages hold rows of tokens that did not happen."""
        return self.num_accepted < self.num_proposed


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

    def next_window(self) -> WindowPlan:
        """The latest committed token and what is proposed to follow it."""
        # The window's last row gives one token more than were proposed.
        room = self._max_tokens - self._num_committed - 1
        width = min(self._max_proposed, room)
        proposed = self._proposer.propose(width) if self._proposer is not None and width > 0 else []
        tokens = (self._last, *proposed[:width])
        return WindowPlan(self.position - 1, tokens, len(tokens))

    def judge(self, window: WindowPlan, sampled: tuple[int, ...]) -> Judged:
        """Commit a verdict: the tail's ids up to the first that differs from the proposed one.

        Raises:
            ProtocolError: If the verdict cannot belong to the window.
        """
        proposed = window.tokens[len(window.tokens) - window.num_verified + 1 :]
        num_accepted = len(sampled) - 1
        if not 0 <= num_accepted <= len(proposed) or sampled[:-1] != proposed[:num_accepted]:
            raise ProtocolError(
                f"the tail answered {len(sampled)} ids that do not continue a window of "
                f"{window.num_verified} rows"
            )
        committed = sampled[: self._max_tokens - self._num_committed]
        finish: Literal["stop", "length"] | None = None
        for index, token in enumerate(committed):
            if token in self._request.end_tokens:
                committed, finish = committed[: index + 1], "stop"
                break
        self._num_committed += len(committed)
        self._last = committed[-1]
        if finish is None and self._num_committed >= self._max_tokens:
            finish = "length"
        if self._proposer is not None:
            self._proposer.extend(committed)
        return Judged(committed, len(proposed), num_accepted, finish)
