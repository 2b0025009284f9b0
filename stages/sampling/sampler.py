"""Sampler: parameters, penalties, biases, filters and draws, and log probabilities of what was drawn.

The code is `row_sampler.c`, compiled at installation. Where it is missing, as in a plain copy of the sources,
and where a result hangs on rounding, there is no draw, and the sampler takes its arrays.

Computed from the model's own logits, before penalties and biases, as by default in vLLM (`raw_logprobs`) and
llama.cpp: a bias that forces a token does not make it look likely.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import structlog

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import InvalidRequest, StageFailed
from spanmesh_proto.row_ids import stray_id, tokens_among
from stages.compiled_extension import REMEDY, load_extension
from stages.sampling.gumbel import position_key, race_all, race_among

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

_EXTENSION: Final = "stages._row_sampler"
log = structlog.get_logger()
_FIRST_NUCLEUS_TRY: Final = 64
_NUCLEUS_GROWTH: Final = 8
# Up to this many candidates, reading all of their noise is faster than bounding it.
_FEW: Final = 1024
# OpenAI's range; that of repetition_penalty, which OpenAI does not have, keeps all logits finite.
MAX_PENALTY: Final = 2.0
MIN_REPETITION_PENALTY: Final = 0.01
MAX_REPETITION_PENALTY: Final = 10.0
MAX_BIAS: Final = 100.0
MAX_BIASES: Final = 1024
MAX_TOP_LOGPROBS: Final = 20


# - `frequency_penalty` and `presence_penalty` as OpenAI defines them: an id that the answer holds `c` times
#   loses `c * frequency + presence`. Only the answer counts, never the prompt, as at OpenAI and in vLLM.
# - `repetition_penalty` as in CTRL (Keskar et al. 2019), respecting signs: the logit of an id that occurred
# before is divided by it if it is positive and multiplied by it otherwise. Prompt and answer count, all of
# them or the latest `repetition_window` tokens, as in vLLM and llama.cpp.
# - `logit_bias` is added last: minus 100 excludes an id and 100 forces it, however often it occurred before.
#
# Each is a function of the row and of the tokens before it, so rows that are computed again or rejected leave
# no state behind.
class LogitAdjustment:
    """Penalties and biases of one session, as arrays.

    Args:
        sampling: Sampling parameters of the session.
        num_prompt: Number of its first tokens that are the prompt.
    """

    def __init__(self, sampling: SamplingParams, num_prompt: int = 0) -> None:
        self._num_prompt = num_prompt
        self._frequency = np.float32(sampling.frequency_penalty)
        self._presence = np.float32(sampling.presence_penalty)
        self._repetition = np.float32(sampling.repetition_penalty)
        self._window = sampling.repetition_window
        self._bias_ids = np.array([token for token, _ in sampling.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        self._counts_answer = bool(self._frequency) or bool(self._presence)
        self._counts_all = sampling.repetition_penalty != 1.0

    @property
    def needs_history(self) -> bool:
        """Whether it depends on earlier tokens."""
        return self._counts_answer or self._counts_all

    @property
    def is_idle(self) -> bool:
        """Whether it changes no row."""
        return not self.needs_history and not self._bias_ids.size

    def apply(
        self, logits: NDArray[np.float32], before: Sequence[int] | NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """The adjusted row.

        Args:
            logits: float32, shape (n_vocab,); not changed.
            before: The session's tokens before this row, prompt included; used only if `needs_history`.

        Returns:
            float32, shape (n_vocab,): `logits` itself if there is nothing to adjust.
        """
        if self.is_idle:
            return logits
        adjusted = logits.copy()
        if self.needs_history:
            self._penalise(adjusted, np.asarray(before, np.int64))
        adjusted[self._bias_ids] += self._biases
        return adjusted

    def _penalise(self, row: NDArray[np.float32], before: NDArray[np.int64]) -> None:
        # An id that occurs several times in `seen` or `said` is written as often, each time with the same
        # value.
        if self._counts_all:
            seen = tokens_among(before[-self._window :] if self._window else before)
            values = row[seen]
            row[seen] = np.where(values > 0, values / self._repetition, values * self._repetition)
        if self._counts_answer:
            said = before[self._num_prompt :]
            counts = np.bincount(said)[said].astype(np.float32)
            row[said] = row[said] - (counts * self._frequency + self._presence)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one session.

    Raises:
        InvalidRequest: If a value is out of its range; `param` names the field.
    """

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set whose probability reaches this; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 drops none."""
    seed: int = 0
    """Key of the noise, 64 bits. The same seed, prompt and model give the same text, whatever was proposed.
    """
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each occurrence in the answer."""
    presence_penalty: float = 0.0
    """Subtracted once if it occurs in the answer."""
    repetition_penalty: float = 1.0
    """Factor that weakens tokens of prompt and answer; 1 is off."""
    repetition_window: int = 0
    """Number of latest tokens that it applies to; 0 for all."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and addend of its logit, at most `MAX_BIASES`."""

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
            raise InvalidRequest("logit_bias has a token twice: give each once", param="logit_bias")
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
        wrong = stray_id([token for token, _ in self.logit_bias], n_vocab)
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
    """Tokens that a grammar allows at one position; see `stages.grammar`."""

    def allows(self, token: int) -> bool:
        """Whether a token is allowed."""

    def restrict(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The row with minus infinity for all tokens that are not allowed.

        Raises:
            InvalidRequest: If none is allowed.
        """


class Sampler:
    """Sampler of one session: greedy, or Gumbel-max among the tokens that pass the filters.

    Stateless: the noise is a function of (seed, position, id), see `stages.sampling.gumbel`, and penalties
        are functions of the tokens before. So a row sampled twice gives the same id, and rejected rows leave
        no trace.

    Args:
        sampling: Sampling parameters of the session.
        num_prompt: Number of the session's first tokens that are the prompt.
    """

    def __init__(self, sampling: SamplingParams, num_prompt: int = 0) -> None:
        self.sampling = sampling
        self._adjustment = LogitAdjustment(sampling, num_prompt)

    @property
    def needs_history(self) -> bool:
        """Whether a sample depends on the tokens before it."""
        return self._adjustment.needs_history

    def sample(
        self,
        logits: NDArray[np.float32],
        position: int,
        before: Sequence[int] | NDArray[np.int64] = (),
        constraint: Constraint | None = None,
    ) -> int:
        """The token for `position`.

        A grammar applies after penalties and biases, and before temperature and filters, which choose among
        the tokens that it allows.

        Args:
            logits: float32, shape (n_vocab,): the row before it. Minus infinity excludes a token.
            position: Absolute position of the sampled token.
            before: The tokens at all positions before it; needed only if `needs_history`.
            constraint: Tokens that a grammar allows here; None allows all.

        Raises:
            StageFailed: If the largest logit is not finite.
            InvalidRequest: If the grammar allows none, or takes too much work.
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
            # The best of all tokens is the best of the allowed ones, if it is one of them; not so with
            # filters, which would choose among others.
            token = self._choose(logits, top, position)
            if constraint.allows(token):
                return token
        allowed = constraint.restrict(logits)
        return self._choose(allowed, int(np.argmax(allowed)), position)

    def _choose(self, logits: NDArray[np.float32], top: int, position: int) -> int:
        """The sample among tokens of finite logits, of which `top` has the largest."""
        sampling = self.sampling
        if sampling.temperature == 0.0:
            return top
        key = position_key(sampling.seed, position)
        drawn = draw_compiled(logits, key, sampling)
        return draw_by_arrays(logits, float(logits[top]), key, sampling) if drawn is None else drawn


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probability of one token of the answer, and of the likeliest tokens in its place."""

    logprob: float
    """Natural logarithm of its probability."""
    top: tuple[tuple[int, float], ...] = ()
    """(id, logprob) of the likeliest, the likeliest first, the lowest id first where they tie."""


def draw(
    logits: NDArray[np.float32], key: int, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> int | None:
    """The id that wins the race among the tokens that pass the filters.

    A race of all ids comes first where there is no top-k. If its winner is not in the nucleus, which one sum
    over the row tells, nothing that ranks below it is either, and the rest races again. So no row is sorted.

    Args:
        logits: float32, shape (n_vocab,). Minus infinity excludes a token.
        key: From `stages.sampling.gumbel.position_key`.
        temperature: Above 0.
        top_k: A filter, see `stages.sampling.sampler.SamplingParams`.
        top_p: A filter.
        min_p: A filter.

    Returns:
        None if it was not decided here.
    """
    choose = _function()
    if choose is None or logits.dtype != np.float32 or not logits.flags.c_contiguous:
        return None
    log_min_p = math.log(min_p) if min_p > 0.0 else -math.inf
    token: int = choose(
        logits.ctypes.data,
        logits.size,
        key,
        temperature,
        min(top_k, logits.size),
        top_p,
        log_min_p,
    )
    return None if token < 0 else token


@functools.cache
def _function() -> Any:
    try:
        function = load_extension(_EXTENSION).row_sampler_choose
    except (ImportError, AttributeError) as error:
        log.warning("slow_sampling", reason=str(error), remedy=REMEDY)
        return None
    number = ctypes.c_double
    function.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, number, ctypes.c_size_t, number, number,
    )  # fmt: skip
    function.restype = ctypes.c_int64
    return function


# They apply in that order to the distribution *after* temperature, each to what the one before left:
#
# 1. temperature first, so that top-p and min-p refer to the sampled probabilities; 2. top-k, which only
# counts, and bounds the work of the others; 3. top-p over the probabilities that top-k left, normalised
# again; 4. min-p last: it is a ratio to the most likely token, which neither normalisation nor the other
# filters change.
#
# All three keep the head of one ranking, so each only yields its length. The ranking is by logit, and by
# lowest id where logits are equal: no result depends on a sorting algorithm.
def candidate_ids(
    logits: NDArray[np.float32], scaled: NDArray[np.float64], sampling: SamplingParams
) -> NDArray[np.int64]:
    """The ids that pass all filters; never empty, as the most likely token passes each.

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
    """Number of most likely tokens, among `count`, whose probability reaches `top_p`.

    Only as much of the ranking is sorted as needed.

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


def draw_compiled(logits: NDArray[np.float32], key: int, sampling: SamplingParams) -> int | None:
    """The id that `draw_by_arrays` gives, by compiled code; None if it was not decided there.

    Args:
        logits: float32, shape (n_vocab,). Minus infinity excludes a token.
        key: From `stages.sampling.gumbel.position_key`.
        sampling: Temperature, above 0, and filters.
    """
    return draw(
        logits,
        key,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )


def draw_by_arrays(logits: NDArray[np.float32], peak: float, key: int, sampling: SamplingParams) -> int:
    """The id that wins the race among the tokens that pass the filters: the definition of a draw.

    Args:
        logits: float32, shape (n_vocab,). Minus infinity excludes a token.
        peak: The largest of them.
        key: From `stages.sampling.gumbel.position_key`.
        sampling: Temperature, above 0, and filters.
    """
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


def token_logprobs(logits: NDArray[np.float32], token: int, num_top: int) -> TokenLogprobs:
    """Log-softmax of a row at one token and at its `num_top` peaks.

    Args:
        logits: float32, shape (n_vocab,): the model's, with a finite largest value.
        token: The sampled id.
        num_top: Number of likeliest tokens, from 0 to `MAX_TOP_LOGPROBS`.
    """
    peak = logits.max()
    # float32 is exact enough for each summand; the sum over a whole vocabulary needs more.
    log_total = float(peak) + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        ids = top_ids(logits, min(num_top, logits.size))
        ranked = ids[np.argsort(-logits[ids], kind="stable")]
        top = tuple((int(id), float(logits[id]) - log_total) for id in ranked)  # noqa: A001 - an id is called id
    return TokenLogprobs(float(logits[token]) - log_total, top)


def to_wire(logprobs: Iterable[TokenLogprobs]) -> list[wire.TokenLogprobs]:
    """Messages of a verdict, in float32."""
    return [
        wire.TokenLogprobs(
            logprob=each.logprob,
            top_tokens=[token for token, _ in each.top],
            top_logprobs=[logprob for _, logprob in each.top],
        )
        for each in logprobs
    ]


def from_wire(messages: Iterable[wire.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """Log probabilities from a verdict.

    Raises:
        ValueError: If a message has different numbers of ids and log probabilities.
    """
    return tuple(
        TokenLogprobs(each.logprob, tuple(zip(each.top_tokens, each.top_logprobs, strict=True)))
        for each in messages
    )
