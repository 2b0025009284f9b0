"""What a smaller wire type costs: next-token distributions of the cut model against the whole one's. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stages.transport.hidden_codec import HiddenType


@dataclass(frozen=True)
class WireLoss:
    """Over some positions, each with its row of logits.

    Attributes:
        hidden_type: How hidden states crossed the cut.
        n_tokens: Positions compared.
        n_changed_tokens: Of these, where another token has the largest logit.
        max_logit_diff: Largest absolute difference of two logits.
        mean_logit_diff: Mean of the same.
        max_kl_nats: Largest Kullback-Leibler divergence of the cut model's distribution from the whole's.
        mean_kl_nats: Mean of the same.
    """

    hidden_type: HiddenType
    n_tokens: int
    n_changed_tokens: int
    max_logit_diff: float
    mean_logit_diff: float
    max_kl_nats: float
    mean_kl_nats: float


def wire_loss(hidden_type: HiddenType, whole: NDArray[np.float32], cut: NDArray[np.float32]) -> WireLoss:
    """Compare logits.

    Args:
        hidden_type: How hidden states crossed the cut.
        whole: float32 (positions, n_vocab), at least one position, of the whole model.
        cut: The same of the cut one.
    """
    differences = np.abs(whole - cut)
    divergences = np.array([_divergence_nats(*rows) for rows in zip(whole, cut, strict=True)])
    return WireLoss(
        hidden_type,
        n_tokens=len(whole),
        n_changed_tokens=int(np.sum(whole.argmax(axis=-1) != cut.argmax(axis=-1))),
        max_logit_diff=float(differences.max()),
        mean_logit_diff=float(differences.mean(dtype=np.float64)),
        max_kl_nats=float(divergences.max()),
        mean_kl_nats=float(divergences.mean()),
    )


def _divergence_nats(whole: NDArray[np.float32], cut: NDArray[np.float32]) -> float:
    log_whole, log_cut = _log_softmax(whole), _log_softmax(cut)
    # Never negative but for rounding.
    return max(0.0, float(np.sum(np.exp(log_whole) * (log_whole - log_cut))))


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - float(logits.max())
    log: NDArray[np.float64] = shifted - np.log(np.sum(np.exp(shifted)))
    return log
