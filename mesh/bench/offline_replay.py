"""A proposer without a model: a recorded text plays the target, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import quantiles
from typing import TYPE_CHECKING

from speculative.acceptance import judge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from speculative.proposer import Proposer


@dataclass
class ReplayTotals:
    """What came of replays, added up.

    Attributes:
        num_texts: Texts replayed.
        num_tokens: Their tokens.
        num_steps: Windows, one behind the other.
        num_proposed: Proposed tokens.
        num_accepted: Those that the text has, too.
        num_prompt_tokens: Tokens of the prompts.
        prompt_us: Time that the proposer took for them.
        propose_us: Of each call, microseconds.
        extend_us: Of each call with committed tokens, microseconds.
    """

    num_texts: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    num_prompt_tokens: int = 0
    prompt_us: float = 0.0
    propose_us: list[float] = field(default_factory=list)
    extend_us: list[float] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step brings; 0 without steps."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance(self) -> float:
        """Share of proposed tokens that were right; 0 without any."""
        return self.num_accepted / self.num_proposed if self.num_proposed else 0.0

    @property
    def prompt_us_per_token(self) -> float:
        """What a token of a prompt costs; 0 without any."""
        return self.prompt_us / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


def replay(
    proposer: Proposer,
    prompt: Sequence[int],
    target: Sequence[int],
    totals: ReplayTotals,
    *,
    max_width: int,
    clock_ns: Callable[[], int],
) -> None:
    """Let a proposer guess a text, in step: each window is judged before the next is proposed.

    Args:
        proposer: New.
        prompt: Token ids that go before.
        target: Token ids that a model would choose.
        totals: Added to.
        max_width: Most proposed tokens in a window.
        clock_ns: Monotonic.
    """
    begun_ns = clock_ns()
    proposer.extend(prompt)
    totals.prompt_us += (clock_ns() - begun_ns) / 1000
    totals.num_texts += 1
    totals.num_tokens += len(target)
    totals.num_prompt_tokens += len(prompt)
    place = 0
    while place < len(target):
        begun_ns = clock_ns()
        proposal = proposer.propose(max_width)
        totals.propose_us.append((clock_ns() - begun_ns) / 1000)
        # The last row of a window gives one token more than were proposed.
        proposed = proposal.tokens[: len(target) - place - 1]
        judgement = judge(proposed, verdict_on(proposed, target[place : place + len(proposed) + 1]))
        begun_ns = clock_ns()
        proposer.extend(judgement.committed)
        totals.extend_us.append((clock_ns() - begun_ns) / 1000)
        totals.num_steps += 1
        totals.num_proposed += judgement.num_proposed
        totals.num_accepted += judgement.num_accepted
        place += len(judgement.committed)


def verdict_on(proposed: Sequence[int], target: Sequence[int]) -> Sequence[int]:
    """What a tail would answer whose model chooses `target`: up to the first token that was not proposed."""
    pairs = zip(proposed, target, strict=False)
    wrong = next((row for row, (guess, token) in enumerate(pairs) if guess != token), len(proposed))
    return target[: wrong + 1]


def median_and_p99(values: Sequence[float]) -> tuple[float, float]:
    """Of at least two values."""
    cuts = quantiles(values, n=100)
    return cuts[49], cuts[98]
