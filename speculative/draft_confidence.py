"""How sure a draft model is of a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def probability(logits: NDArray[np.float32], token: int) -> float:
    """The softmax probability of one token, at temperature 1.

    Args:
        logits: float32, shape (n_vocab,).
        token: Which.

    Raises:
        ValueError: If the logits are not finite where it matters.
    """
    scaled = logits - logits.max()
    chosen = float(scaled[token])
    np.exp(scaled, out=scaled)
    share = float(np.exp(chosen)) / float(scaled.sum())
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"the draft model's logits give token {token} a probability of {share}")
    return share
