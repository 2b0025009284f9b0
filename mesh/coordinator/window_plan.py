"""A window, as whoever ships it knows it."""

from __future__ import annotations

from dataclasses import dataclass

from speculative.proposer import EMPTY, Proposal


@dataclass(frozen=True)
class WindowPlan:
    """A span of tokens to compute.

    Attributes:
        start: Absolute position of the first token.
        tokens: Part of the prompt; or a committed token, then proposed ones; or, of a window that flies
            behind another one, proposed ones alone.
        num_verified: How many of the last rows the tail samples.
        proposal: The proposed ones among the tokens: always the last.
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
