"""A checked body plus a prompt: what the engine is to do."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from mesh.api.constraint import grammar_of, schema_of
from mesh.api.prediction import encode_prediction
from mesh.api.sampling import SEED_BITS, sampling_of
from mesh.engine import GenerationRequest, SpeculationLimits
from mesh.text.output_parser import Reading
from spanmesh_proto.errors import ContextLengthExceeded, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.api.backend import Backend
    from mesh.api.conversation import ChatPrompt
    from mesh.api.schemas import GenerationBody

MAX_ANSWERS: Final = 64


@dataclass(frozen=True)
class Job:
    """One answer to make.

    Attributes:
        request: For the engine.
        stops: Strings that end the answer.
        echo: Text that goes before the answer.
        wants_token_ids: Whether the answer says its token ids and the prompt's.
        reading: How the answer is read.
        is_further: Whether it is a further answer to the prompt of the job before it.
    """

    request: GenerationRequest
    stops: tuple[str, ...]
    echo: str = ""
    wants_token_ids: bool = False
    reading: Reading = field(default_factory=Reading)
    is_further: bool = False

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer says how likely its tokens were."""
        return self.request.num_top_logprobs is not None


def make_job(
    backend: Backend,
    body: GenerationBody,
    prompt: Sequence[int],
    *,
    prompt_param: str,
    client: str | None,
    default_max_tokens: int | None = None,
    echo: str = "",
    chat: ChatPrompt | None = None,
) -> Job:
    """Fit a request to the model's context.

    A limit that is larger than the room that is left is cut to it: the answer then ends with finish reason
    `length` where the context does. A limit that no prompt leaves room for is refused. A prompt is never cut.

    Args:
        backend: The served model.
        body: The checked body.
        prompt: Token ids.
        prompt_param: The field that the prompt came from, for errors.
        client: The identity of the caller's API key, or None. It has turns of its own, and a history.
        default_max_tokens: The limit if the request names none; None is all the room there is.
        echo: Text that goes before the answer.
        chat: What it is the prompt of; without one all of the answer is text.

    Raises:
        InvalidRequest: If the prompt is empty, the limit or the prediction is longer than the context, or
            fields contradict each other, or ask for an answer that no grammar describes.
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
    if body.token_limit is not None and body.token_limit >= context_length:
        raise InvalidRequest(
            f"{body.token_limit_param} is {body.token_limit} and this model's context holds {context_length},"
            f" the prompt included: ask for at most {context_length - 1}, leave it out to get all the room"
            " there is, or serve with a larger --ctx-size",
            param=body.token_limit_param,
        )
    grammar, reading = _held_to(body, chat)
    if grammar is not None:
        # Made here rather than in the event loop, which will need it next.
        _ = backend.tokenizer.texts.message
    wanted = body.token_limit or default_max_tokens or room
    request = GenerationRequest(
        prompt=tuple(prompt),
        max_tokens=min(wanted, room),
        end_tokens=frozenset() if body.ignore_eos else backend.tokenizer.end_tokens,
        sampling=sampling_of(body, backend.tokenizer.n_vocab, backend.random_bits),
        speculation=SpeculationLimits() if body.speculation is None else body.speculation.as_limits(),
        prediction=encode_prediction(backend.tokenizer, body.prediction, context_length),
        client=client,
        history_key=client,
        uses_cache=body.cache_prompt is not False,
        num_top_logprobs=body.num_top_logprobs,
        grammar=grammar,
    )
    return Job(request, body.stop, echo, bool(body.return_token_ids), reading)


def _held_to(body: GenerationBody, chat: ChatPrompt | None) -> tuple[str | None, Reading]:
    """The grammar that the answer must match, if any, and how it is then read."""
    grammar = grammar_of(body)
    if chat is None:
        return grammar, Reading()
    if chat.tools is None:
        # An answer that is held to a form has no room for reasoning: all of it is content.
        return grammar, chat.reading if grammar is None else replace(chat.reading, splits_reasoning=False)
    if grammar is None:
        return chat.call_grammar() if chat.tools.is_forced else None, chat.reading
    instead = schema_of(body)
    if instead is None:
        raise InvalidRequest(
            "grammar does not go with tools: a call would not match it, leave one of them out",
            param="grammar",
        )
    return chat.call_grammar(None if chat.tools.is_forced else instead), chat.reading


def several(jobs: Sequence[Job], num_choices: int) -> list[Job]:
    """Each job so many times, with seeds that follow one another: the first draws as it would alone.

    Raises:
        InvalidRequest: If that is more answers than one request may ask for.
    """
    if len(jobs) * num_choices > MAX_ANSWERS:
        raise InvalidRequest(
            f"n is {num_choices} for {len(jobs)} prompts: at most {MAX_ANSWERS} answers to one request work",
            param="n",
        )
    return [_further(job, number) if number else job for job in jobs for number in range(num_choices)]


def _further(job: Job, number: int) -> Job:
    sampling = replace(job.request.sampling, seed=(job.request.sampling.seed + number) % 2**SEED_BITS)
    return replace(job, request=replace(job.request, sampling=sampling), is_further=True)
