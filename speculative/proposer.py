"""Proposer protocol, proposals, and the chain of proposers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Proposer(Protocol):
    """Guesses the next tokens of one session.

    It hears of committed tokens only, each once and in order, so it never has anything to take back: a
    rejected proposal is simply not among them. Tokens proposed but not judged yet are named at each call.
    """

    @property
    def name(self) -> str:
        """Such as `ngram`: what its proposals are signed with."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Take note of tokens that became part of the sequence: the prompt first, then each verdict's."""

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """Guess what follows the committed tokens and then `after`. Never blocks.

        Args:
            max_tokens: At most this many ids; 0 or fewer asks for none, and tells what is in flight.
            after: Tokens in flight: proposed before, not judged yet. In-step windows have none.

        Returns:
            Fewer ids, or none, where the proposer knows no better: a wrong guess costs a row at every stage.
        """

    def listen(self, on_ready: Callable[[], None]) -> None:
        """Name a function to call, from any thread, when a short or empty answer would now be longer.

        Proposers that answer at once have nothing to call it for.
        """

    def close(self) -> None:
        """Let go of everything that the session holds; it is not asked again."""


@dataclass(frozen=True)
class Proposal:
    """A guess at what comes next.

    Attributes:
        tokens: Ids, in order; none where the proposer knows no better.
        confidences: One for each token, in [0, 1]: the proposer's own estimate that it is the target's, given
            that those before it were.
        proposer: Name of the proposer, such as `ngram`.
    """

    tokens: tuple[int, ...]
    confidences: tuple[float, ...]
    proposer: str

    def first(self, count: int) -> Proposal:
        """At most `count` tokens of it."""
        if count >= len(self.tokens):
            return self
        count = max(count, 0)
        return Proposal(self.tokens[:count], self.confidences[:count], self.proposer)


EMPTY: Final = Proposal((), (), "")


CONFIRMED_SHARE: Final = 0.95
"""A cheap proposer's token may be this much less likely than a draft model's: it is there at once."""


class ChainProposer:
    """Asks all and answers with one; see `speculative.proposer.Proposer`.

    All are asked each time, so that one that drafts in the background hears what is in flight, whoever
    proposed it. A member that fails is its guard's business: to the chain it falls silent.

    Args:
        proposers: Cheapest first, at least one.
        acceptances: The chance of each token of a proposal, given that those before it are right.
    """

    name = "chain"

    def __init__(
        self, proposers: Sequence[Proposer], acceptances: Callable[[Proposal], Sequence[float]]
    ) -> None:
        self._proposers = tuple(proposers)
        self._acceptances = acceptances

    def extend(self, tokens: Sequence[int]) -> None:
        """Tell all of them."""
        for proposer in self._proposers:
            proposer.extend(tokens)

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """What the one that is likeliest to be right says, signed by it."""
        best = EMPTY
        for proposer in self._proposers:
            best = better_of(best, proposer.propose(max_tokens, after), self._acceptances)
        return best

    def listen(self, on_ready: Callable[[], None]) -> None:
        """Any of them may come to know more."""
        for proposer in self._proposers:
            proposer.listen(on_ready)

    def close(self) -> None:
        """Close all of them."""
        for proposer in self._proposers:
            proposer.close()


def better_of(
    cheap: Proposal, dear: Proposal, acceptances: Callable[[Proposal], Sequence[float]]
) -> Proposal:
    """The proposal to send.

    Where both say the same, the longer one is sent, but what only the cheap one says has to be nearly as
    likely as what both say: the dear one will soon have its own word on it. Two that differ are compared over
    the length that both have, by the tokens that each should get accepted: a long guess must not outweigh a
    short certainty, as a rejection costs all that is in flight behind it.

    Args:
        cheap: Wins where both are equally likely.
        dear: The other.
        acceptances: The chance of each token of a proposal, given that those before it are right.
    """
    common = min(len(cheap.tokens), len(dear.tokens))
    if common == 0:
        return cheap if cheap.tokens else dear
    cheap_chances, dear_chances = acceptances(cheap), acceptances(dear)
    if cheap.tokens[:common] != dear.tokens[:common]:
        return cheap if _expected(cheap_chances[:common]) >= _expected(dear_chances[:common]) else dear
    is_longer = len(cheap.tokens) > common
    return cheap if is_longer and cheap_chances[common] >= CONFIRMED_SHARE * dear_chances[0] else dear


def _expected(chances: Sequence[float]) -> float:
    """How many of the tokens should be accepted."""
    reached: Iterable[float] = accumulate(chances, mul)
    return sum(reached)
