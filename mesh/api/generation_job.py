"""Generation job: engine request, sampling and output format of one answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from mesh.api.call_grammar import is_enforceable
from mesh.api.chat_prompt import shown_ids
from mesh.api.structured_output import CallGrammar, form_of, grammar_of, schema_of
from mesh.engine import GenerationRequest, RecordedPrompt, SpeculationLimits
from mesh.text.output_parser import OutputFormat
from mesh.text.text_encoder import refuse_too_long_text
from mesh.text.text_service import TextRequest
from spanmesh_proto.errors import InvalidRequest, too_long
from stages.sampling.sampler import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mesh.api.backend import Backend
    from mesh.api.chat_prompt import ChatPrompt
    from mesh.api.protocol import GenerationBody, PredictionBody

SEED_BITS: Final = 64
# llama-server's default window of `repeat_penalty`.
_LLAMA_LAST_N: Final = 64
_ALL: Final = 0
# Of a digest: two prompts of a million have the same one by a chance of 3e-8.
_NAME_CHARS: Final = 16
MAX_ANSWERS: Final = 64


@dataclass(frozen=True)
class GenerationJob:
    """One answer to generate."""

    request: GenerationRequest
    """Request for the engine."""
    stops: tuple[str, ...]
    """Strings that end the answer."""
    echo: str = ""
    """Text before the answer."""
    is_prompt_only: bool = False
    """Whether the answer is empty: one token is generated, since the engine always does, and left out."""
    wants_token_ids: bool = False
    """Whether the answer reports its token ids and the prompt's."""
    output_format: OutputFormat = field(default_factory=OutputFormat)
    """Format of the answer."""
    is_further: bool = False
    """Whether it is a further answer to the prompt of the job before it."""
    warnings: tuple[str, ...] = ()
    """What of the request is not enforced."""
    includes_stop: bool = False
    """Whether the stop string that ends the answer is a part of it."""
    record: bool | str | None = None
    """Whether the answer may be recorded; None leaves it to the API key. A text names the prompt."""
    opening: Sequence[Mapping[str, Any]] | None = None
    """See `ChatPrompt`; None of a text that is no chat."""

    @property
    def shown_prompt(self) -> Sequence[int]:
        """Ids of the prompt for the client; see `shown_ids`."""
        return shown_ids(self.request.prompt)

    @property
    def num_image_rows(self) -> int:
        """Rows of pictures in the prompt."""
        return sum(each.chunk.num_rows for each in self.request.inputs)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer reports log probabilities."""
        return self.request.num_top_logprobs is not None


def sampling_of(body: GenerationBody, n_vocab: int, random_bits: Callable[[int], int]) -> SamplingParams:
    """Sampling parameters: OpenAI's defaults, and a random seed if the request has none.

    `top_p: 0` keeps only the most likely token, as temperature 0 does.

    Args:
        body: The checked body.
        n_vocab: Number of token ids.
        random_bits: Returns a random integer of the given number of bits.

    Raises:
        InvalidRequest: If fields contradict each other, or `logit_bias` names a token that does not exist.
    """
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    is_greedy = temperature == 0 or top_p == 0
    seed = random_bits(SEED_BITS) if body.seed is None else body.seed
    penalty, window = _repetition(body)
    sampling = SamplingParams(
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
    """Penalty and window: vLLM's `repetition_penalty` covers all tokens, llama.cpp's the latest 64."""
    theirs, llamas = body.repetition_penalty, body.repeat_penalty
    if theirs is not None and llamas is not None and theirs != llamas:
        raise InvalidRequest(
            f"repeat_penalty is {llamas:g} and repetition_penalty {theirs:g}: they are the same setting,"
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


async def encode_prediction(
    backend: Backend, prediction: PredictionBody | None, client: str | None
) -> tuple[int, ...]:
    """Token ids of a predicted output; empty if there is none.

    Args:
        backend: The served model.
        prediction: Text of the prediction.
        client: Identity of the API key, or None; used for fairness.

    Raises:
        InvalidRequest: If it is longer than any answer can be.
        ContextLengthExceeded: If it is so much longer that its tokens are not counted.
        Overloaded: If too many texts wait.
    """
    if prediction is None:
        return ()
    context_length = backend.engine.context_length
    param = "prediction.content"
    refuse_too_long_text(
        backend.tokenizer, len(prediction.content), context_length, param=param, what="the prediction"
    )
    text = TextRequest(prediction.content, param, add_special=False, parse_special=False)
    (tokens,) = await backend.texts.ids([text], most_tokens=context_length, client=client)
    if len(tokens) > context_length:
        raise InvalidRequest(
            f"prediction.content has {len(tokens)} tokens and this model's context holds {context_length}:"
            " send what the answer will be, or leave it out",
            param=param,
        )
    return tuple(tokens)


def make_job(
    backend: Backend,
    body: GenerationBody,
    prompt: Sequence[int],
    *,
    prompt_param: str,
    client: str | None,
    prediction: tuple[int, ...] = (),
    default_max_tokens: int | None = None,
    echo: str = "",
    chat: ChatPrompt | None = None,
) -> GenerationJob:
    """Fit a request to the model's context.

    A limit larger than the room left is reduced to it: the answer then ends with finish reason `length` where
    the context does. A prompt is never truncated.

    Args:
        backend: The served model.
        body: The checked body.
        prompt: Token ids.
        prompt_param: The field that the prompt came from, for errors.
        client: Identity of the API key, or None; used for fairness and for the history of answers.
        prediction: Token ids of the predicted output; see `encode_prediction`.
        default_max_tokens: The limit if the request names none; None is all the room there is.
        echo: Text before the answer.
        chat: The rendered chat, if it is one; otherwise all of the answer is text.

    Raises:
        InvalidRequest: If the prompt is empty, or fields contradict each other, or no grammar can describe
            the requested answer.
        ContextLengthExceeded: If it leaves no room for an answer.
    """
    if not prompt:
        raise InvalidRequest("the prompt holds no token: send at least one", param=prompt_param)
    context_length = backend.engine.context_length
    room = context_length - len(prompt)
    if room < 1:
        raise too_long(
            len(prompt),
            context_length,
            "send less, as the answer needs room too, or serve the model with a larger --ctx-size",
            what=f"your {prompt_param}",
            most=context_length - 1,
            param=prompt_param,
        )
    held_to, output_format = _held_to(body, chat, client)
    if held_to is not None:
        # Computed here rather than in the event loop, which needs it next.
        _ = backend.tokenizer.texts.message
    wanted = body.token_limit
    if wanted is None:
        wanted = default_max_tokens or room
    request = GenerationRequest(
        prompt=tuple(prompt),
        max_tokens=max(1, min(wanted, room)),
        end_tokens=frozenset() if body.ignore_eos else backend.tokenizer.end_tokens,
        sampling=sampling_of(body, backend.tokenizer.n_vocab, backend.api.random_bits),
        speculation=SpeculationLimits() if body.speculation is None else body.speculation.as_limits(),
        prediction=prediction,
        client=client,
        history_key=client,
        # Positions of a cached prefix are not computed, so nothing tells how likely their tokens are.
        uses_cache=body.cache_prompt is not False and not body.scores_prompt,
        num_top_logprobs=body.num_top_logprobs,
        grammar=None if held_to is None else held_to.gbnf,
        scores_prompt=body.scores_prompt,
        inputs=() if chat is None else chat.inputs,
    )
    return GenerationJob(
        request,
        body.stop,
        echo,
        wanted == 0,
        bool(body.return_token_ids),
        output_format,
        warnings=(
            *body.warnings,
            *(() if chat is None else chat.warnings),
            *(_unheld(chat) if held_to is None else held_to.left_out),
        ),
        includes_stop=body.includes_stop,
        record=False if body.store is False else body.record,
        opening=None if chat is None else chat.opening,
    )


async def make_chat_job(
    backend: Backend, body: GenerationBody, chat: ChatPrompt, *, param: str, client: str | None
) -> GenerationJob:
    """`make_job` of a rendered chat, in a thread: grammars of large schemas take a while.

    Raises:
        RequestError: As `make_job` and `encode_prediction`.
    """
    prediction = await encode_prediction(backend, body.prediction, client)
    return await asyncio.to_thread(
        make_job,
        backend,
        body,
        chat.tokens,
        prompt_param=param,
        client=client,
        prediction=prediction,
        chat=chat,
    )


def _held_to(
    body: GenerationBody, chat: ChatPrompt | None, client: str | None
) -> tuple[CallGrammar | None, OutputFormat]:
    """The grammar that the answer must match, if any, and the format of the answer."""
    form = form_of(body)
    gbnf = grammar_of(form, client)
    if chat is None:
        return None if gbnf is None else CallGrammar(gbnf), OutputFormat()
    tools, answer_format = chat.tools, chat.output_format
    if tools is None:
        return chat.held_to(gbnf, form.param, client) if form is not None and gbnf is not None else None, (
            # Without reasoning ahead of it, all of the answer is content.
            answer_format
            if gbnf is None or chat.thoughts.marks
            else replace(answer_format, splits_reasoning=False)
        )
    alternative = schema_of(form)
    if form is not None and alternative is None:
        param = form.param
        raise InvalidRequest(
            f"{param} and tools exclude each other, since a call would not match the grammar: leave one out",
            param=param,
        )
    is_strict = bool(tools.names & tools.strict_names) and is_enforceable(chat.answer_format)
    is_free = alternative is None and not (tools.is_forced or is_strict)
    return None if is_free else chat.call_grammar(tools, alternative), answer_format


def _unheld(chat: ChatPrompt | None) -> tuple[str, ...]:
    """What is told of strict functions whose calls no grammar holds."""
    tools = None if chat is None else chat.tools
    if tools is None or not tools.names & tools.strict_names:
        return ()
    return ("strict has no effect: calls of this model are told from text with tool_choice required only",)


def recorded(job: GenerationJob) -> GenerationJob:
    """The job with how its answer is filed, of a client that agreed."""
    if job.opening is None:
        recording = RecordedPrompt("raw", _name(job.record, job.request.prompt))
    else:
        recording = RecordedPrompt("chat", _name(job.record, job.opening))
    return replace(job, request=replace(job.request, recording=recording))


def _name(record: bool | str | None, told: Any) -> str:  # noqa: FBT001 - a field of the request
    """Name of a prompt: as the client calls it, or a digest of what its turns share."""
    if isinstance(record, str):
        return record
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:_NAME_CHARS]


def several(jobs: Sequence[GenerationJob], num_choices: int) -> list[GenerationJob]:
    """Each job several times, with consecutive seeds: the first samples as it would alone.

    Raises:
        InvalidRequest: If that is more answers than one request may ask for.
    """
    if len(jobs) * num_choices > MAX_ANSWERS:
        raise InvalidRequest(
            f"n is {num_choices} for {len(jobs)} prompts: a request can have at most {MAX_ANSWERS} answers",
            param="n",
        )
    return [_further(job, number) if number else job for job in jobs for number in range(num_choices)]


def _further(job: GenerationJob, number: int) -> GenerationJob:
    sampling = replace(job.request.sampling, seed=(job.request.sampling.seed + number) % 2**SEED_BITS)
    return replace(job, request=replace(job.request, sampling=sampling), is_further=True)
