"""The tokens that a drafter can propose: their share of answers, and a list chosen for some answers.

Drafters of large vocabularies have a head for the most frequent tokens alone (FR-Spec, Zhao et al. 2025).
What is outside can never be drafted, so the list is chosen anew for the answers that are learned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def token_counts(answers: list[NDArray[np.int32]], n_vocab: int) -> NDArray[np.int64]:
    """How often each token of the model is in answers, int64 [n_vocab]."""
    counts = np.zeros(n_vocab, np.int64)
    for answer in answers:
        counts += np.bincount(answer, minlength=n_vocab)
    return counts


def coverage(counts: NDArray[np.int64], token_ids: NDArray[np.int64]) -> float:
    """Share of counted tokens that are among those of a drafter; 0 of none."""
    return float(counts[token_ids].sum() / max(1, counts.sum()))


def retrimmed(token_ids: NDArray[np.int64], counts: NDArray[np.int64], num_tokens: int) -> NDArray[np.int64]:
    """Tokens of answers, the most frequent first choice, then the former ones by their order.

    Args:
        token_ids: The former tokens of a drafter, in ascending order or by rank.
        counts: How often each token is in the answers to be learned.
        num_tokens: Size of the list.

    Returns:
        Ascending ids, `num_tokens` at most: fewer if there are no more.
    """
    seen = np.flatnonzero(counts)
    by_rank = seen[np.argsort(-counts[seen], kind="stable")]
    others = token_ids[counts[token_ids] == 0]
    return np.sort(np.concatenate([by_rank, others])[:num_tokens])
