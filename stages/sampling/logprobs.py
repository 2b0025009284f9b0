"""Log probabilities of sampled tokens, and their wire form.

Computed from the model's own logits, before penalties and biases, as by default in vLLM (`raw_logprobs`) and
llama.cpp: a bias that forces a token does not make it look likely.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from spanmesh_proto import windows_pb2 as wire
from stages.sampling.sampler import top_ids

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

MAX_TOP_LOGPROBS: Final = 20


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probability of one token of the answer, and of the likeliest tokens in its place."""

    logprob: float
    """Natural logarithm of its probability."""
    top: tuple[tuple[int, float], ...] = ()
    """(id, logprob) of the likeliest, the likeliest first, the lowest id first where they tie."""


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
