"""Proposer protocol, proposals, kinds of drafters, and the chain of several proposers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Final, Protocol, Self, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

CONFIRMED_SHARE: Final = 0.95
"""A cheap proposer's token may be this much less likely than a draft model's: it is there at once."""
# Returns token ids and their probabilities in place of those that were drafted behind a text, given that text
# and how many they are.
Replace: TypeAlias = "Callable[[Sequence[int], int], tuple[Sequence[int], Sequence[float]]]"


class Proposer(Protocol):
    """Source of proposals for one session.

    It receives committed tokens only, each once and in order, so nothing is ever rolled back. Proposed tokens
    in flight are passed with each call.
    """

    @property
    def name(self) -> str:
        """Name of the proposer, such as `ngram`, as its proposals carry it."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the sequence: the prompt first, then those of each verdict."""

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """Propose the tokens after the committed ones and `after`. Never blocks.

        Args:
            max_tokens: Most ids; with 0 or fewer the call only passes the tokens in flight.
            after: Tokens in flight: proposed before, not judged yet. Empty for windows sent one at a time.

        Returns:
            Fewer ids, or none, where the proposer has no good guess: a wrong one costs a row at every stage.
        """

    def listen(self, on_ready: Callable[[], None]) -> None:
        """Set a function to be called, from any thread, when a short or empty proposal would now be longer.

        Proposers without background work never call it.
        """

    def close(self) -> None:
        """Release the session's resources; not used any more afterwards."""


@runtime_checkable
class PartReader(Protocol):
    """Proposer that reads a long text in parts, between which the event loop goes on."""

    def read_on(self) -> bool:
        """Read the next part, which takes some milliseconds; returns whether there is more.

        What is left when it is asked for tokens, it reads first.
        """


@runtime_checkable
class FeatureReader(Protocol):
    """Proposer that drafts from hidden states of the target, as all kinds of drafters but small models do."""

    def take_features(self, start: int, rows: NDArray[np.float32]) -> None:
        """Take features of committed positions, which may come late, with gaps, in any order, or never.

        Args:
            start: Position of the first row.
            rows: float32 (rows, layers × n_embd), not changed later.
        """


@runtime_checkable
class DraftReader(Protocol):
    """Proposer whose tokens are drafted elsewhere, where the target's own are drawn."""

    num_drafted: int
    """Most tokens of a draft."""

    def take_draft(self, draft: Draft) -> None:
        """Take a draft, which may come late, after others, or never."""


@dataclass(frozen=True)
class Draft:
    """Tokens that are likely to follow."""

    start: int
    """Position of the first."""
    tokens: tuple[int, ...]
    """Token ids, in order."""
    confidences: tuple[float, ...]
    """See `Proposal`."""
    ms_per_token: float
    """Time of one of them where they were drafted, in ms."""


@dataclass(frozen=True)
class Proposal:
    """Guessed next tokens."""

    tokens: tuple[int, ...]
    """Token ids, in order; empty for no guess."""
    confidences: tuple[float, ...]
    """One for each token, in [0, 1]: the proposer's estimate of its acceptance, given that those before it
    are accepted."""
    proposer: str
    """Name of the proposer, such as `ngram`."""
    depths: tuple[int, ...] = ()
    """One for each token, of drafters that read features: its distance from the last feature, at least 1.
    Empty for other proposers."""

    def first(self, count: int) -> Proposal:
        """Its first `count` tokens."""
        if count >= len(self.tokens):
            return self
        count = max(count, 0)
        return Proposal(self.tokens[:count], self.confidences[:count], self.proposer, self.depths[:count])


EMPTY: Final = Proposal((), (), "")


class DrafterKind(StrEnum):
    """Kinds of drafters: proposers whose tokens cost computing time.

    Each has its parts in `speculative.draft.kinds`; `mesh.draft.drafter` recognizes its files.
    """

    MODEL = "model", "draft", "a draft model"
    """A small model, which reads tokens only."""
    EAGLE3 = "eagle3", "eagle3", "an EAGLE-3 drafter"
    """A drafter that reads the outputs of three layers (Li et al. 2025)."""
    MTP = "mtp", "mtp", "a head for multi-token prediction"
    """A head that reads the head state (DeepSeek-V3 2024)."""
    DFLASH = "dflash", "dflash", "a DFlash drafter"
    """A drafter that reads outputs of layers and drafts a block of tokens in one pass (Chen et al. 2026)."""
    DSPARK = "dspark", "dspark", "a DSpark drafter"
    """A DFlash drafter that knows what follows each token, and how sure it is."""
    DFLASH2 = "dflash2", "dflash2", "a DFlash2 drafter"
    """A DFlash drafter that gives a few candidates for each position."""
    ASSISTANT = "assistant", "assistant", "an assistant of Gemma 4"
    """An assistant that reads the KV cache of the target's last layers. It computes beside these, and has no
    parts here but a reader of its drafts, `speculative.remote_drafts`."""

    proposer: str
    """Name of the proposer, which its proposals carry."""
    label: str
    """Noun phrase for people."""

    def __new__(cls, value: str, proposer: str, label: str) -> Self:
        """A member: a string that is equal to its value."""
        kind = str.__new__(cls, value)
        kind._value_ = value
        kind.proposer = proposer
        kind.label = label
        return kind


DRAFTERS: Final = tuple(kind.proposer for kind in DrafterKind)
"""Names of proposers whose tokens cost computing time."""


class ChainProposer:
    """Asks several proposers and returns the best proposal; see `speculative.proposer.Proposer`.

    All are asked each time, so that one that drafts in the background gets the tokens in flight of all.
    Errors of a member are handled by its guard.

    Args:
        proposers: Proposers, cheapest first, at least one.
        acceptances: Returns the acceptance probability of each token of a proposal, given those before it.
    """

    name = "chain"

    def __init__(
        self, proposers: Sequence[Proposer], acceptances: Callable[[Proposal], Sequence[float]]
    ) -> None:
        self._proposers = tuple(proposers)
        self._acceptances = acceptances

    def extend(self, tokens: Sequence[int]) -> None:
        """Pass to all of them."""
        for proposer in self._proposers:
            proposer.extend(tokens)

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """The proposal of the likeliest one, under its name."""
        best = EMPTY
        for proposer in self._proposers:
            best = better_of(best, proposer.propose(max_tokens, after), self._acceptances)
        return best

    def listen(self, on_ready: Callable[[], None]) -> None:
        """Set the function for all of them."""
        for proposer in self._proposers:
            proposer.listen(on_ready)

    def close(self) -> None:
        """Close all of them."""
        for proposer in self._proposers:
            proposer.close()


def better_of(
    cheap: Proposal, dear: Proposal, acceptances: Callable[[Proposal], Sequence[float]]
) -> Proposal:
    """The better of two proposals.

    Where both agree, the longer one is sent, but the tokens that only the cheap one proposes have to be
    nearly as likely as the common ones: the expensive one will soon propose on. Two that differ are compared
    over the common length, by the expected number of accepted tokens: a long guess must not outweigh a short
    certainty, as a rejection voids all windows in flight behind it.

    Args:
        cheap: Preferred where both are equally likely.
        dear: The expensive one.
        acceptances: Returns the acceptance probability of each token of a proposal, given those before it.
    """
    common = min(len(cheap.tokens), len(dear.tokens))
    if common == 0:
        return cheap if cheap.tokens else dear
    cheap_chances, dear_chances = acceptances(cheap), acceptances(dear)
    if cheap.tokens[:common] != dear.tokens[:common]:
        return cheap if _expected(cheap_chances[:common]) >= _expected(dear_chances[:common]) else dear
    is_longer = len(cheap.tokens) > common
    return cheap if is_longer and cheap_chances[common] >= CONFIRMED_SHARE * dear_chances[0] else dear


def is_drafter(name: str) -> bool:
    """Whether the tokens of the proposer of this name cost computing time.

    A drafter that takes the place of another while they are served has a number behind its kind, such as
    `eagle3/2`: what was learned of the one must not count for the other.
    """
    return name.partition("/")[0] in DRAFTERS


def _expected(chances: Sequence[float]) -> float:
    """Expected number of accepted tokens."""
    reached: Iterable[float] = accumulate(chances, mul)
    return sum(reached)
