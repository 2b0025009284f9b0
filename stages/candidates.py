"""Which tokens may be drawn at all: the filters top-k, top-p and min-p.

They apply in that order to the distribution *after* temperature, each to what the one before left:

1. temperature first, so that top-p and min-p speak of the probabilities that are really drawn from;
2. top-k, which only counts, and bounds the work of the others;
3. top-p over the probabilities of what top-k left, scaled up to sum to 1 again;
4. min-p last: it is a ratio to the most likely token, which neither the scaling nor the others change.

All three keep the head of one ranking, so each only says how long that head is. The ranking is by logit, and
by lowest id where logits tie: no tie depends on a sorting algorithm.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stages.sampling import Sampling

_FIRST_NUCLEUS_TRY: Final = 64
_NUCLEUS_GROWTH: Final = 8


def candidate_ids(
    logits: NDArray[np.float32], scaled: NDArray[np.float64], sampling: Sampling
) -> NDArray[np.int64]:
    """The ids that pass all filters; never none, as the most likely token passes each.

    Args:
        logits: float32, shape (n_vocab,), without NaN.
        scaled: float64, shape (n_vocab,): `(logit - largest logit) / temperature`.
        sampling: The filters.

    Returns:
        int64, shape (n,), ascending.
    """
    count = logits.size
    if sampling.top_k:
        count = min(count, sampling.top_k)
    if sampling.top_p < 1.0:
        count = nucleus_size(scaled, count, sampling.top_p)
    if sampling.min_p > 0.0:
        count = min(count, int(np.count_nonzero(scaled >= math.log(sampling.min_p))))
    return top_ids(logits, count)


def top_ids(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The `count` highest-ranked ids, ascending.

    Args:
        logits: float32, shape (n_vocab,), without NaN.
        count: From 1 to n_vocab.
    """
    if count == logits.size:
        return np.arange(count)
    threshold = np.partition(logits, -count)[-count]
    level = np.flatnonzero(logits >= threshold)
    surplus = level.size - count
    if not surplus:
        return level
    tied = np.flatnonzero(logits[level] == threshold)
    return np.delete(level, tied[-surplus:])


def nucleus_size(scaled: NDArray[np.float64], count: int, top_p: float) -> int:
    """How many of the `count` most likely tokens it takes to reach `top_p` of their probability.

    Only as much of the ranking is sorted as the answer needs.

    Args:
        scaled: float64, shape (n_vocab,): `(logit - largest logit) / temperature`.
        count: From 1 to n_vocab.
        top_p: Above 0, below 1.
    """
    eligible = scaled if count == scaled.size else np.partition(scaled, -count)[-count:]
    goal = top_p * float(np.exp(eligible).sum())
    size = _FIRST_NUCLEUS_TRY
    while True:
        size = min(size, count)
        head = eligible if size == count else np.partition(eligible, -size)[-size:]
        mass = np.cumsum(np.exp(np.sort(head)[::-1]))
        if mass[-1] >= goal or size == count:
            return min(int(np.searchsorted(mass, goal)) + 1, count)
        size *= _NUCLEUS_GROWTH
