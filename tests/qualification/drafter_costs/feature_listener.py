"""`mesh` for measurements: requests may have features sent that nobody drafts from.

No option of `mesh serve` separates what features cost from what drafting costs. This program is the `mesh`
command with one change: a request with `"speculation": {"mode": "replay"}`, which proposes nothing where no
answers are recorded, gets a proposer that takes features and proposes nothing. All other requests, and all
else, are the product's own.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final
from unittest.mock import patch

from mesh.cli import main as command_line
from mesh.serve import main as serving
from mesh.serve import proposers as product
from speculative.draft.session import MOST_FEATURES
from speculative.proposer import EMPTY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from mesh.coordinator.feature_store import FeatureNeeds
    from mesh.engine import GenerationRequest
    from mesh.options.host import HeadOptions
    from mesh.serve.preflight import Preflight
    from speculative.proposer import Proposal, Proposer

# Of requests whose features are sent and not used.
LISTENING: Final = "replay"


class FeatureListener:
    """Proposer that keeps features as a drafter does and proposes nothing; see `speculative.proposer`."""

    name = "listener"

    def __init__(self) -> None:
        self.features: dict[int, NDArray[np.float32]] = {}

    def take_features(self, start: int, rows: NDArray[np.float32]) -> None:
        """Keep the features of the latest positions, as `FeatureSequence` does."""
        self.features.update(enumerate(rows, start))
        if len(self.features) > MOST_FEATURES:
            for position in sorted(self.features)[: len(self.features) - MOST_FEATURES]:
                del self.features[position]

    def extend(self, tokens: Sequence[int]) -> None:
        """Ignore tokens."""

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """Nothing."""
        return EMPTY

    def listen(self, on_ready: Callable[[], None]) -> None:
        """Nothing will ever be ready."""

    def close(self) -> None:
        """Drop the features."""
        self.features.clear()


class ListeningProposers(product.Proposers):
    """Proposers of the product, except for requests that only listen.

    Args:
        others: The product's.
        needs: Hidden states that its drafter reads.
    """

    def __init__(self, others: product.Proposers, needs: FeatureNeeds) -> None:
        super().__init__("auto", feature_needs=needs)
        self._others = others

    def __call__(self, request: GenerationRequest) -> list[Proposer]:
        """New proposers for one session."""
        if request.speculation.mode == LISTENING:
            return [FeatureListener()]
        return self._others(request)


@contextmanager
def open_listening(options: HeadOptions, known: Preflight) -> Iterator[product.Proposers | None]:
    """Like `open_proposers` of the product, whose own are given where no drafter reads features."""
    with product.open_proposers(options, known) as proposers:
        if proposers is None or proposers.feature_needs is None:
            yield proposers
        else:
            yield ListeningProposers(proposers, proposers.feature_needs)


if __name__ == "__main__":
    with patch.object(serving, "open_proposers", open_listening):
        command_line.main()
