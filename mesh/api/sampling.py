"""How an answer is drawn, from the fields that say so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import InvalidRequest
from stages.sampling.sampler import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.api.schemas import GenerationBody

SEED_BITS: Final = 64
# What a client of llama-server means by `repeat_penalty` alone.
_LLAMA_LAST_N: Final = 64
_ALL: Final = 0


def sampling_of(body: GenerationBody, n_vocab: int, random_bits: Callable[[int], int]) -> Sampling:
    """The sampler's settings: OpenAI's defaults, and a seed of our own if the request brings none.

    `top_p: 0` keeps nothing but the most likely token, which is what temperature 0 does.

    Args:
        body: The checked body.
        n_vocab: Token ids are below this.
        random_bits: Random numbers of so many bits.

    Raises:
        InvalidRequest: If fields contradict each other, or `logit_bias` names a token that does not exist.
    """
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    is_greedy = temperature == 0 or top_p == 0
    seed = random_bits(SEED_BITS) if body.seed is None else body.seed
    penalty, window = _repetition(body)
    sampling = Sampling(
        temperature=0.0 if is_greedy else temperature,
        top_k=0 if is_greedy else min(max(body.top_k or 0, 0), 2**31 - 1),
        top_p=1.0 if is_greedy else top_p,
        min_p=0.0 if is_greedy else body.min_p or 0.0,
        seed=0 if is_greedy else seed % 2**SEED_BITS,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        repetition_penalty=penalty,
        repetition_window=window,
        logit_bias=body.logit_bias,
    )
    sampling.require_vocabulary(n_vocab)
    return sampling


def _repetition(body: GenerationBody) -> tuple[float, int]:
    """Penalty and window: vLLM's `repetition_penalty` looks at everything, llama.cpp's at the latest 64."""
    theirs, llamas = body.repetition_penalty, body.repeat_penalty
    if theirs is not None and llamas is not None and theirs != llamas:
        raise InvalidRequest(
            f"repeat_penalty is {llamas:g} and repetition_penalty {theirs:g}: they are one setting,"
            " send one of them",
            param="repeat_penalty",
        )
    penalty = theirs if theirs is not None else llamas
    last_n = body.repeat_last_n
    if penalty is None or last_n == 0:
        return 1.0, _ALL
    if last_n is None:
        return penalty, _ALL if theirs is not None else _LLAMA_LAST_N
    return penalty, max(last_n, _ALL)
