"""How the tail draws a token from a row of logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from spanmesh_proto.errors import InvalidRequest, StageFailed
from stages.adjustment import LogitAdjustment
from stages.candidates import candidate_ids
from stages.noise import position_key
from stages.race import race_all, race_among

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


# Up to here it is quicker to read every candidate's noise than to look for those that need not be read.
_FEW: Final = 1024

# OpenAI's ranges, and for repetition_penalty, which is not OpenAI's, one that keeps any logit a number.
MAX_PENALTY: Final = 2.0
MIN_REPETITION_PENALTY: Final = 0.01
MAX_REPETITION_PENALTY: Final = 10.0
MAX_BIAS: Final = 100.0
MAX_BIASES: Final = 1024


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
        frequency_penalty: A token's logit loses this for each time that the answer holds it.
        presence_penalty: And this if it holds it at all.
        repetition_penalty: Weakens tokens of prompt and answer by this factor; 1 is off.
        repetition_window: It counts this many of the latest tokens; 0 counts all.
        logit_bias: Pairs of token id and what is added to its logit, at most `MAX_BIASES`.

    Raises:
        InvalidRequest: If a value is out of its range; `param` names the field.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    repetition_window: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0.0,
            "temperature", self.temperature, "a finite number, 0 (greedy) or more",
        )  # fmt: skip
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1 (off)")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "from 0 (off) to 1")
        _require(0 <= self.seed < 2**64, "seed", self.seed, "from 0 to 2**64 - 1")
        self._check_adjustment()

    def _check_adjustment(self) -> None:
        for field in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, field)
            _require(-MAX_PENALTY <= value <= MAX_PENALTY, field, value, "from -2 to 2; 0 switches it off")
        _require(
            MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY,
            "repetition_penalty", self.repetition_penalty,
            f"from {MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}; 1 switches it off",
        )  # fmt: skip
        _require(self.repetition_window >= 0, "repetition_window", self.repetition_window, "0 (all) or more")
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidRequest(
                f"logit_bias has {len(self.logit_bias)} entries: at most {MAX_BIASES} work",
                param="logit_bias",
            )
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise InvalidRequest("logit_bias names a token twice: name each once", param="logit_bias")
        for token, bias in self.logit_bias:
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise InvalidRequest(
                    f"logit_bias of token {token} is {bias:g}: it must be from -100 (never) to 100 (always)",
                    param="logit_bias",
                )

    def require_vocabulary(self, n_vocab: int) -> None:
        """Check that every id with a bias exists.

        Raises:
            InvalidRequest: Naming the first that does not.
        """
        wrong = next((token for token, _ in self.logit_bias if not 0 <= token < n_vocab), None)
        if wrong is not None:
            raise InvalidRequest(
                f"logit_bias names the token id {wrong}: this model's ids go from 0 to {n_vocab - 1}",
                param="logit_bias",
            )

    @property
    def filters(self) -> bool:
        """Whether any of top-k, top-p and min-p is on."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class Constraint(Protocol):
    """Which tokens may come at one place; see `stages.grammar`."""

    def allows(self, token: int) -> bool:
        """Whether a token may."""

    def restrict(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The row with minus infinity for all that may not.

        Raises:
            InvalidRequest: If none may.
        """


class Sampler:
    """Draws one session's tokens: greedy, or by Gumbel-max among what the filters leave.

    It holds settings and no state: the noise is a function of (seed, position, id), see `stages.noise`, and
    penalties are one of the tokens before, see `stages.adjustment`. So a row drawn twice gives the same id,
    and rows that are rejected leave no trace.

    Args:
        sampling: The session's settings.
        num_prompt: How many of the session's first tokens are the prompt.
    """

    def __init__(self, sampling: Sampling, num_prompt: int = 0) -> None:
        self.sampling = sampling
        self._adjustment = LogitAdjustment(sampling, num_prompt)

    @property
    def needs_history(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        return self._adjustment.needs_history

    def sample(
        self,
        logits: NDArray[np.float32],
        position: int,
        before: Sequence[int] | NDArray[np.int64] = (),
        constraint: Constraint | None = None,
    ) -> int:
        """The token for `position`.

        A grammar comes behind penalties and biases, and before temperature and filters: those choose among
        what it allows.

        Args:
            logits: float32, shape (n_vocab,): the row before it. Minus infinity rules a token out.
            position: Absolute position of the token drawn.
            before: The tokens at all positions before it; needed only if `needs_history`.
            constraint: Which tokens a grammar allows here; None allows all.

        Raises:
            StageFailed: If the largest logit is not a number, or not finite.
            InvalidRequest: If the grammar allows none, or makes too much work.
        """
        if not self._adjustment.is_idle:
            logits = self._adjustment.apply(logits, before)
        top = int(np.argmax(logits))  # the lowest id on ties; the first NaN if there is one
        peak = float(logits[top])
        if not math.isfinite(peak):
            raise StageFailed(
                f"the logits for position {position} peak at {peak} (token {top}): the model file or its"
                " arithmetic on this backend is broken; run `mesh certify` on the model"
            )
        if constraint is None:
            return self._choose(logits, top, position)
        if self.sampling.temperature == 0.0 or not self.sampling.filters:
            # The best of all is the best of those that are allowed, if it is one of them; with filters it is
            # not, as they would let through others.
            token = self._choose(logits, top, position)
            if constraint.allows(token):
                return token
        allowed = constraint.restrict(logits)
        return self._choose(allowed, int(np.argmax(allowed)), position)

    def _choose(self, logits: NDArray[np.float32], top: int, position: int) -> int:
        """The draw among tokens of finite logits, of which `top` has the largest."""
        peak = float(logits[top])
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
