"""How the tail draws a token from a row of logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from spanmesh_proto.errors import InvalidRequest, StageFailed
from stages.candidates import candidate_ids
from stages.noise import position_key
from stages.race import race_all, race_among

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Up to here it is quicker to read every candidate's noise than to look for those that need not be read.
_FEW: Final = 1024


@dataclass(frozen=True)
class Sampling:
    """One session's sampler settings.

    Attributes:
        temperature: 0 is greedy.
        top_k: Keep this many most likely tokens; 0 keeps all.
        top_p: Keep the smallest set whose probability reaches this; 1 keeps all.
        min_p: Drop tokens less likely than this share of the most likely one; 0 drops none.
        seed: Key of the noise, 64 bits. The same seed, prompt and model give the same text, whatever
            was proposed.

    Raises:
        InvalidRequest: If a value is out of its range; `param` names the field.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0.0,
            "temperature", self.temperature, "a finite number, 0 (greedy) or more",
        )  # fmt: skip
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1 (off)")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "from 0 (off) to 1")
        _require(0 <= self.seed < 2**64, "seed", self.seed, "from 0 to 2**64 - 1")

    @property
    def filters(self) -> bool:
        """Whether any of top-k, top-p and min-p is on."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class Sampler:
    """Draws one session's tokens: greedy, or by Gumbel-max among what the filters leave.

    It holds settings and no state: the noise is a function of (seed, position, id), see `stages.noise`, so
    a row drawn twice gives the same id, and rows that are rejected leave no trace.

    Args:
        sampling: The session's settings.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling

    def sample(self, logits: NDArray[np.float32], position: int) -> int:
        """The token for `position`.

        Args:
            logits: float32, shape (n_vocab,): the row before it. Minus infinity rules a token out.
            position: Absolute position of the token drawn.

        Raises:
            StageFailed: If the largest logit is not a number, or not finite.
        """
        top = int(np.argmax(logits))  # the lowest id on ties; the first NaN if there is one
        peak = float(logits[top])
        if not math.isfinite(peak):
            raise StageFailed(
                f"the logits for position {position} peak at {peak} (token {top}): the model file or its"
                " arithmetic on this backend is broken; run `mesh certify` on the model"
            )
        sampling = self.sampling
        if sampling.temperature == 0.0:
            return top
        key = position_key(sampling.seed, position)
        with np.errstate(over="ignore"):  # a temperature near 0 sends all but the peak to minus infinity
            if not sampling.filters:
                return race_all(key, logits, peak, sampling.temperature)
            scaled = (logits.astype(np.float64) - peak) / sampling.temperature
            ids = candidate_ids(logits, scaled, sampling)
            if ids.size <= _FEW:
                return race_among(key, ids, scaled[ids])
            left = np.full_like(logits, -np.inf)
            left[ids] = logits[ids]
            return race_all(key, left, peak, sampling.temperature)


def _require(holds: bool, field: str, value: float, need: str) -> None:  # noqa: FBT001 - reads as an assertion
    if not holds:
        raise InvalidRequest(f"{field} is {value}: it must be {need}", param=field)
