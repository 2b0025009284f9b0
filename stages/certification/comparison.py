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
    """Difference of two runs of the same rows, at the cut and at the end."""

    n_rows: int = 0
    """Number of compared rows of hidden states at the cut."""
    n_tokens: int = 0
    """Number of compared rows of logits."""
    n_equal_tokens: int = 0
    """Of these, rows with the same token of the largest logit."""
    max_logit_diff: float = 0.0
    """Largest absolute difference of two logits; infinite where one is not finite."""
    max_hidden_diff: float = 0.0
    """The same for hidden states at the cut."""
    is_bit_equal: bool = True
    """Whether all bits of both are equal."""

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
    """Difference in one phase, one of `stages.certification.reference.PHASES`."""

    phase: str
    difference: Difference


@dataclass(frozen=True)
class CutResult:
    """Result for one cut, compared with the whole model."""

    cut: int
    """First layer of the second stage."""
    phases: tuple[PhaseResult, ...]
    """Difference in each phase, with unencoded hidden states."""
    wire_losses: tuple[WireLoss, ...] = ()
    """Losses by smaller wire types there, prompt and decode together."""

    @property
    def difference(self) -> Difference:
        """Sum over all phases."""
        return total(self.phases)


@dataclass(frozen=True)
class EquivalenceReport:
    """Result for all cuts of a model, compared with the whole model, in exact numeric mode."""

    model: str
    """Name of the file."""
    architecture: str
    """`general.architecture`."""
    n_layers: int
    """Number of layers of the model."""
    cuts: tuple[CutResult, ...]
    """One result for each cut."""
    together: Difference | None = None
    """The model cut at all places at once; None for a single cut."""
    rules: tuple[str, ...] = ()
    """Names of the rules of its family beyond the generic ones."""
    is_known: bool = True
    """Whether its family is in the registry."""
    refused_cuts: Mapping[int, str] = field(default_factory=dict)
    """Places where it is not cut, with the reasons."""
    with_checkpoints: Difference | None = None
    """In models with recurrent layers: sum of the phases that decide whether sessions may go back to
    checkpoints, of all cuts and all at once. None for others."""
    onward: Difference = Difference()
    """Sum of the phases in which no session goes back, of all cuts and all at once."""

    @property
    def is_exact(self) -> bool:
        """Whether every cut is bit-equal, alone and together."""
        alone = all(result.difference.is_bit_equal for result in self.cuts)
        return alone and (self.together is None or self.together.is_bit_equal)

    @property
    def is_exact_onward(self) -> bool:
        """Whether a model with recurrent layers is exact as long as no session goes back to a checkpoint."""
        return self.with_checkpoints is not None and self.onward.is_bit_equal


@dataclass(frozen=True)
class WireLoss:
    """Loss by a smaller wire type, over some positions, each with its row of logits."""

    hidden_type: HiddenType
    """The wire type."""
    n_tokens: int
    """Number of compared positions."""
    n_changed_tokens: int
    """Of these, positions where another token has the largest logit."""
    max_logit_diff: float
    """Largest absolute difference of two logits."""
    mean_logit_diff: float
    """Mean of the same."""
    max_kl_nats: float
    """Largest Kullback-Leibler divergence from the whole model's distribution."""
    mean_kl_nats: float
    """Mean of the same."""


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
    """Sum of the differences of each phase."""
    totals = {phase: Difference() for phase in order}
    for phase, difference in results:
        totals[phase] += difference
    return tuple(PhaseResult(phase, total) for phase, total in totals.items())


def total(results: Iterable[PhaseResult]) -> Difference:
    """Sum over phases."""
    return sum((result.difference for result in results), Difference())


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


def wire_loss(hidden_type: HiddenType, whole: NDArray[np.float32], cut: NDArray[np.float32]) -> WireLoss:
    """Compare logits of the whole model and the cut one.

    Args:
        hidden_type: The wire type.
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
    # Negative by rounding only.
    return max(0.0, float(np.sum(np.exp(log_whole) * (log_whole - log_cut))))


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - float(logits.max())
    log: NDArray[np.float64] = shifted - np.log(np.sum(np.exp(shifted)))
    return log
