"""Results of a certification: bit equality, and divergence with smaller wire types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from stages.transport.hidden_codec import HiddenType


@dataclass(frozen=True)
class Difference:
    """How two runs of the same rows differ, at the cut and at the end.

    Attributes:
        n_rows: Rows of hidden states compared at the cut.
        n_tokens: Rows of logits compared.
        n_equal_tokens: Of these, rows whose largest logit is of the same token.
        max_logit_diff: Largest absolute difference of two logits; infinite where one is no number.
        max_hidden_diff: The same at the cut, between two values of the hidden state.
        is_bit_equal: Whether all bits of both are equal.
    """

    n_rows: int = 0
    n_tokens: int = 0
    n_equal_tokens: int = 0
    max_logit_diff: float = 0.0
    max_hidden_diff: float = 0.0
    is_bit_equal: bool = True

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            self.n_rows + other.n_rows,
            self.n_tokens + other.n_tokens,
            self.n_equal_tokens + other.n_equal_tokens,
            max(self.max_logit_diff, other.max_logit_diff),
            max(self.max_hidden_diff, other.max_hidden_diff),
            self.is_bit_equal and other.is_bit_equal,
        )


@dataclass(frozen=True)
class PhaseResult:
    """One way of running the model: `prefill`, `decode` or `chunks`."""

    phase: str
    difference: Difference


@dataclass(frozen=True)
class CutResult:
    """The model cut in two at one layer, against the whole.

    Attributes:
        cut: First layer of the second stage.
        phases: The difference in each phase, hidden states crossing the cut as they are.
        wire_losses: What smaller wire types cost there, prompt and decode together.
    """

    cut: int
    phases: tuple[PhaseResult, ...]
    wire_losses: tuple[WireLoss, ...] = ()

    @property
    def difference(self) -> Difference:
        """Over all phases."""
        return sum((result.difference for result in self.phases), Difference())


@dataclass(frozen=True)
class EquivalenceReport:
    """The model cut at each of some layers alone, against the whole, in exact numeric mode.

    Attributes:
        model: The file's name.
        architecture: `general.architecture`.
        n_layers: Layers of the model.
        cuts: One result for each cut.
        together: The model cut at all of them at once; None for a single one.
        rules: Names of the rules that its family needed beyond the generic ones.
        is_known: Whether its family is in the table.
        refused_cuts: Where it is not cut, and why.
    """

    model: str
    architecture: str
    n_layers: int
    cuts: tuple[CutResult, ...]
    together: Difference | None = None
    rules: tuple[str, ...] = ()
    is_known: bool = True
    refused_cuts: Mapping[int, str] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """Whether every cut is bit-equal, alone and together."""
        alone = all(result.difference.is_bit_equal for result in self.cuts)
        return alone and (self.together is None or self.together.is_bit_equal)


def compare(
    hidden: tuple[NDArray[np.float32], NDArray[np.float32]],
    logits: tuple[NDArray[np.float32], NDArray[np.float32]],
) -> Difference:
    """Compare one decode of the whole model with the same decode of the cut one.

    Args:
        hidden: Whole, cut: float32 (rows, n_embd) each, at the cut.
        logits: Whole, cut: float32 (tokens, n_vocab) each.
    """
    whole, cut = logits
    return Difference(
        n_rows=len(hidden[0]),
        n_tokens=len(whole),
        n_equal_tokens=int(np.sum(whole.argmax(axis=-1) == cut.argmax(axis=-1))) if len(whole) else 0,
        max_logit_diff=_max_abs_diff(whole, cut),
        max_hidden_diff=_max_abs_diff(*hidden),
        is_bit_equal=_same_bits(whole, cut) and _same_bits(*hidden),
    )


def phases_of(results: Iterable[tuple[str, Difference]], order: Sequence[str]) -> tuple[PhaseResult, ...]:
    """Add up the differences of each phase."""
    totals = {phase: Difference() for phase in order}
    for phase, difference in results:
        totals[phase] += difference
    return tuple(PhaseResult(phase, total) for phase, total in totals.items())


def _same_bits(left: NDArray[np.float32], right: NDArray[np.float32]) -> bool:
    return left.shape == right.shape and np.array_equal(left.view(np.uint32), right.view(np.uint32))


def _max_abs_diff(left: NDArray[np.float32], right: NDArray[np.float32]) -> float:
    if left.shape != right.shape:
        return float("inf")
    if not left.size or _same_bits(left, right):
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        worst = float(np.max(np.abs(left - right)))
    return float("inf") if np.isnan(worst) else worst


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
