"""Several proposers as one: the likeliest answer wins, the cheaper one where they are equally sure."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

from speculative.proposal import EMPTY, Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from speculative.proposer import Proposer


class ChainProposer:
    """Asks all and answers with one; see `speculative.proposer.Proposer`.

    All are asked each time, so that one that drafts in the background hears what is in flight, whoever
    proposed it. A member that fails is its guard's business: to the chain it falls silent.

    Args:
        proposers: Cheapest first, at least one.
    """

    name = "chain"

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = tuple(proposers)

    def extend(self, tokens: Sequence[int]) -> None:
        """Tell all of them."""
        for proposer in self._proposers:
            proposer.extend(tokens)

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """What the surest of them says, signed by the one that said it."""
        best = EMPTY
        for proposer in self._proposers:
            best = better_of(best, proposer.propose(max_tokens, after))
        return best

    def listen(self, on_ready: Callable[[], None]) -> None:
        """Any of them may come to know more."""
        for proposer in self._proposers:
            proposer.listen(on_ready)

    def close(self) -> None:
        """Close all of them."""
        for proposer in self._proposers:
            proposer.close()


def better_of(cheap: Proposal, dear: Proposal) -> Proposal:
    """The proposal to send.

    Two that say the same as far as both go confirm each other: the longer one is sent, and of what both say
    the higher confidence counts. Two that differ are compared over the length that both have, by the tokens
    that each expects to be accepted: a long guess must not outweigh a short certainty, as a rejection costs
    all that is in flight behind it.

    Args:
        cheap: Wins where both are equally sure.
        dear: The other.
    """
    common = min(len(cheap.tokens), len(dear.tokens))
    if common == 0:
        return cheap if cheap.tokens else dear
    if cheap.tokens[:common] == dear.tokens[:common]:
        longer = cheap if len(cheap.tokens) >= len(dear.tokens) else dear
        surer = tuple(map(max, cheap.confidences[:common], dear.confidences[:common]))
        return Proposal(longer.tokens, surer + longer.confidences[common:], longer.proposer)
    return cheap if _expected(cheap, common) >= _expected(dear, common) else dear


def _expected(proposal: Proposal, count: int) -> float:
    """How many of the first `count` tokens it expects to be accepted."""
    reached: Iterable[float] = accumulate(proposal.confidences[:count], mul)
    return sum(reached)
