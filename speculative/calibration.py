"""What a proposer's confidence is worth: measured acceptance, bucket by bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from speculative.proposal import Proposal

NUM_BUCKETS: Final = 8


class AcceptanceTable:
    """Judged tokens by proposer and confidence. Old ones fade.

    Args:
        memory: How many judgements a bucket remembers, about.
    """

    def __init__(self, memory: float) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._accepted: dict[tuple[str, int], float] = {}
        self._judged: dict[tuple[str, int], float] = {}

    def add(self, proposer: str, confidence: float, *, is_accepted: bool) -> None:
        """One token was judged."""
        bucket = (proposer, bucket_of(confidence))
        self._accepted[bucket] = self._accepted.get(bucket, 0.0) * self._keep + is_accepted
        self._judged[bucket] = self._judged.get(bucket, 0.0) * self._keep + 1.0

    def mean(self, proposer: str) -> float | None:
        """The acceptance seen at any confidence; None if nothing was judged."""
        judged = sum(self._judged.get((proposer, bucket), 0.0) for bucket in range(NUM_BUCKETS))
        accepted = sum(self._accepted.get((proposer, bucket), 0.0) for bucket in range(NUM_BUCKETS))
        return accepted / judged if judged else None

    def estimate(self, proposer: str, confidence: float, prior: float, prior_weight: float) -> float:
        """The acceptance seen at this confidence; few judgements leave it near `prior`."""
        bucket = (proposer, bucket_of(confidence))
        accepted, judged = self._accepted.get(bucket, 0.0), self._judged.get(bucket, 0.0)
        return (accepted + prior * prior_weight) / (judged + prior_weight)


class Calibration:
    """One session's view: its own judgements over those of all sessions over the proposer's word.

    Args:
        shared: Of all sessions of a coordinator; learns along.
    """

    _MEMORY: Final = 24.0
    # How many judgements of its own make a session's view weigh as much as what all sessions saw.
    _SHARED_WEIGHT: Final = 4.0
    _WORD_WEIGHT: Final = 4.0

    def __init__(self, shared: AcceptanceTable) -> None:
        self._shared = shared
        self._own = AcceptanceTable(self._MEMORY)

    def acceptances(self, proposal: Proposal) -> tuple[float, ...]:
        """The chance of each token, given that those before it are right."""
        return tuple(self.acceptance(proposal.proposer, confidence) for confidence in proposal.confidences)

    def acceptance(self, proposer: str, confidence: float) -> float:
        """The chance of a token that the proposer is so sure of."""
        word = min(max(confidence, 0.0), 1.0)
        prior = self._shared.estimate(proposer, word, word, self._WORD_WEIGHT)
        return self._own.estimate(proposer, word, prior, self._SHARED_WEIGHT)

    def mean(self, proposer: str) -> float | None:
        """How often the proposer's tokens are right in this session; None if none was judged."""
        return self._own.mean(proposer)

    def judged(self, proposal: Proposal, num_accepted: int) -> None:
        """A window's tokens were judged, up to the first that was wrong."""
        for index, confidence in enumerate(proposal.confidences[: num_accepted + 1]):
            word = min(max(confidence, 0.0), 1.0)
            for table in (self._own, self._shared):
                table.add(proposal.proposer, word, is_accepted=index < num_accepted)


def bucket_of(confidence: float) -> int:
    """Which bucket a confidence in [0, 1] falls into."""
    return min(int(confidence * NUM_BUCKETS), NUM_BUCKETS - 1)
