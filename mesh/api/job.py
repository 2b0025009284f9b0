"""A checked body plus a prompt: what the engine is to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mesh.api.prediction import encode_prediction
from mesh.engine import GenerationRequest, SpeculationLimits
from spanmesh_proto.errors import ContextLengthExceeded, InvalidRequest
from stages.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh.api.backend import Backend
    from mesh.api.schemas import GenerationBody

_SEED_BITS = 64


@dataclass(frozen=True)
class Job:
    """One answer to make.

    Attributes:
        request: For the engine.
        stops: Strings that end the answer.
        echo: Text that goes before the answer.
    """

    request: GenerationRequest
    stops: tuple[str, ...]
    echo: str = ""


def make_job(
    backend: Backend,
    body: GenerationBody,
    prompt: Sequence[int],
    *,
    prompt_param: str,
    history_key: str | None,
    default_max_tokens: int | None = None,
    echo: str = "",
) -> Job:
    """Fit a request to the model's context.

    A limit that is larger than the room that is left is cut to it: the answer then ends with finish reason
    `length` where the context does. A prompt is never cut.

    Args:
        backend: The served model.
        body: The checked body.
        prompt: Token ids.
        prompt_param: The field that the prompt came from, for errors.
        history_key: The name of the caller's API key, or None.
        default_max_tokens: The limit if the request names none; None is all the room there is.
        echo: Text that goes before the answer.

    Raises:
        InvalidRequest: If the prompt is empty, or the prediction longer than the context.
        ContextLengthExceeded: If it leaves no room for an answer.
    """
    if not prompt:
        raise InvalidRequest("the prompt holds no token: send at least one", param=prompt_param)
    context_length = backend.engine.context_length
    room = context_length - len(prompt)
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt)} tokens and this model's context holds {context_length}, the answer"
            f" included: send at most {context_length - 1} tokens, or serve it with a larger --ctx-size",
            param=prompt_param,
        )
    wanted = body.token_limit or default_max_tokens or room
    request = GenerationRequest(
        prompt=tuple(prompt),
        max_tokens=min(wanted, room),
        end_tokens=frozenset() if body.ignore_eos else backend.tokenizer.end_tokens,
        sampling=sampling_of(body, backend.random_bits),
        speculation=SpeculationLimits() if body.speculation is None else body.speculation.as_limits(),
        prediction=encode_prediction(backend.tokenizer, body.prediction, context_length),
        history_key=history_key,
    )
    return Job(request, body.stop, echo)


def sampling_of(body: GenerationBody, random_bits: Callable[[int], int]) -> Sampling:
    """The sampler's settings: OpenAI's defaults, and a seed of our own if the request brings none.

    `top_p: 0` keeps nothing but the most likely token, which is what temperature 0 does.
    """
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    if temperature == 0 or top_p == 0:
        return Sampling()
    seed = random_bits(_SEED_BITS) if body.seed is None else body.seed
    return Sampling(
        temperature=temperature,
        top_k=min(max(body.top_k or 0, 0), 2**31 - 1),
        top_p=top_p,
        min_p=body.min_p or 0.0,
        seed=seed % 2**_SEED_BITS,
    )
