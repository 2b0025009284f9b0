"""OpenAI format: answers of chats and completions, whole or as chunks, with usage and log probabilities."""

from __future__ import annotations

import json
import math
import string
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from starlette.responses import Response

from mesh.api import server_sent_events
from mesh.api.answering import Answer, echoed_tokens, made, respond, timings, usage_of
from mesh.api.errors import error_body, json_bytes, json_response, json_steps, large_json_bytes
from mesh.api.event_stream import PING, StreamForm
from mesh.text.message_parts import Content, joined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from starlette.requests import Request

    from mesh.api.answering import AnswerPart, AnswerToken, Choices, FinishReason, Usage
    from mesh.api.backend import Backend
    from mesh.api.event_stream import Emit
    from mesh.api.generation_job import GenerationJob
    from mesh.api.protocol import GenerationBody
    from mesh.engine import PrefillProgress
    from mesh.text.message_parts import MessagePart
    from mesh.text.tokenizer import Tokenizer

# `choices[].token_ids` holds every generated token, as many as `usage.completion_tokens` counts: those
# without text, the end token and those of a stop string included, as in vLLM. Continuing, replaying or
# training on an answer needs them, and the text does not determine them: other tokens may spell the same
# text, and control tokens have none. In a stream the ids come with the step that committed them, whether or
# not their text is held back; concatenated they are those of the whole answer.
#
# `prompt_token_ids` belong to the answer in a chat and to each choice in a completion, which may have several
# prompts; a stream has them in its first chunk, or in the first of each choice.
ANSWER_FIELD: Final = "token_ids"
PROMPT_FIELD: Final = "prompt_token_ids"
# Tokens whose log probabilities or ids are written within a millisecond or so.
MOST_AT_ONCE: Final = 128
_NOTHING: Final = Content("")
# JSON has no infinity; OpenAI's value for "very unlikely".
_IMPOSSIBLE: Final = -9999.0
_ALPHABET: Final = string.ascii_letters + string.digits
_NUM_CHARS: Final = 24
# Mistral's templates reject ids of any other length.
_SHORT_CHARS: Final = 9
_BITS: Final = 160


class EndpointFormat(Protocol):
    """Format of one endpoint's answers."""

    @property
    def id_prefix(self) -> str:
        """Prefix of an answer's id."""

    @property
    def whole_object(self) -> str:
        """`object` of a whole answer."""

    @property
    def chunk_object(self) -> str:
        """`object` of a chunk."""

    @property
    def has_prompt_ids_in_choices(self) -> bool:
        """Whether a prompt's token ids are a field of its choice, not of the answer."""

    def choice(
        self,
        index: int,
        message_parts: Sequence[MessagePart],
        finish: FinishReason,
        logprobs: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """A choice of a whole answer."""

    def logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        """Log probabilities of some tokens of a choice."""

    def opening(self, index: int) -> str:
        """JSON of a stream's first choice, or empty."""

    def delta(self, index: int, piece: MessagePart, logprobs_json: str) -> str:
        """JSON of a choice with a delta. Runs for every token."""

    def closing(self, index: int, finish: FinishReason) -> str:
        """JSON of a choice's last chunk."""


@dataclass(frozen=True)
class ResponseWriter:
    """Envelope of the choices of one answer."""

    endpoint_format: EndpointFormat
    """Format of the endpoint."""
    answer_id: str
    """Id of the answer, such as `chatcmpl-…`."""
    created: int
    """Unix seconds."""
    model: str
    """Model name."""
    fingerprint: str
    """`system_fingerprint`."""
    null_usage: bool = False
    """Whether chunks carry `"usage": null`, as they do when a usage chunk will follow."""
    _head: str = field(init=False)
    _tail: str = field(init=False)

    def __post_init__(self) -> None:
        head = json.dumps(
            self._fields(self.endpoint_format.chunk_object), ensure_ascii=False, separators=(",", ":")
        )
        object.__setattr__(self, "_head", f'data: {head[:-1]},"choices":[')
        object.__setattr__(self, "_tail", '],"usage":null' if self.null_usage else "]")

    def whole(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """The whole answer."""
        return {**self._fields(self.endpoint_format.whole_object), "choices": choices, **more}

    def with_usage(self, usage: Mapping[str, Any]) -> ResponseWriter:
        """The same with another `usage` in chunks."""
        told = replace(self)
        object.__setattr__(told, "_tail", f'],"usage":{json.dumps(usage)}')
        return told

    def opening_event(self, index: int, prompt_ids: Sequence[int] | None = None) -> bytes:
        """Event before a choice's first text, or empty.

        Args:
            index: Index of the choice.
            prompt_ids: Token ids of the prompt, if they were requested.
        """
        choice = self.endpoint_format.opening(index)
        if prompt_ids is None:
            return self._event(choice) if choice else b""
        prompt = ids_member(PROMPT_FIELD, prompt_ids)
        if not self.endpoint_format.has_prompt_ids_in_choices:
            return self._event(choice, more=prompt)
        choice = choice or self.endpoint_format.delta(index, _NOTHING, "null")
        return self._event(choice, ids_member(ANSWER_FIELD, ()) + prompt)

    def part_events(
        self,
        index: int,
        message_parts: Sequence[MessagePart],
        tokens: Sequence[AnswerToken] | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> bytes:
        """Events that add parts to a choice: a few string joins, since it runs for every token.

        Args:
            index: Index of the choice.
            message_parts: Parts to add; an empty one makes an event, too.
            tokens: Tokens of the text, if their log probabilities were requested.
            token_ids: Ids committed meanwhile, if they were requested.
        """
        events = b""
        for piece in message_parts or (_NOTHING,):
            logprobs = "null"
            if tokens is not None:
                found = self.endpoint_format.logprobs(tokens)
                is_long = len(tokens) > MOST_AT_ONCE
                logprobs = "".join(json_steps(found)) if is_long else json.dumps(found, ensure_ascii=False)
            choice = self.endpoint_format.delta(index, piece, logprobs)
            events += self._event(choice, ids_member(ANSWER_FIELD, token_ids))
            # Everything of a step goes with its first part.
            tokens = None
            token_ids = None if token_ids is None else ()
        return events

    def closing_event(
        self,
        index: int,
        finish: FinishReason,
        timings: dict[str, Any] | None,
        token_ids: Sequence[int] | None = None,
        warnings: Sequence[str] = (),
    ) -> bytes:
        """Event that ends a choice; arguments as for `part_events`."""
        more = "" if timings is None else f',"timings":{json.dumps(timings)}'
        more += f',"warnings":{json.dumps(warnings, ensure_ascii=False)}' if warnings else ""
        return self._event(
            self.endpoint_format.closing(index, finish), ids_member(ANSWER_FIELD, token_ids), more
        )

    def progress_event(self, index: int, progress: PrefillProgress, elapsed_ms: float) -> bytes:
        """Event with the progress of reading a prompt, as llama.cpp's server names it; without text.

        Args:
            index: Index of the choice, which has neither begun nor ended.
            progress: Progress of its prompt.
            elapsed_ms: Time since the request's first prompt was begun.
        """
        fields = {
            "total": progress.num_tokens,
            "cache": progress.num_cached,
            "processed": progress.num_read,
            "time_ms": round(elapsed_ms),
        }
        choice = self.endpoint_format.delta(index, _NOTHING, "null")
        return self._event(choice, more=f',"prompt_progress":{json.dumps(fields)}')

    def usage_event(self, usage: dict[str, Any], timings: dict[str, Any] | None) -> bytes:
        """Event that ends a stream with usage. It has no choices."""
        fields = {**self._fields(self.endpoint_format.chunk_object), "choices": [], "usage": usage}
        if timings is not None:
            fields["timings"] = timings
        return server_sent_events.event(json_bytes(fields))

    def _event(self, choice: str, more_of_choice: str = "", more: str = "") -> bytes:
        if more_of_choice:
            choice = f"{choice[:-1]}{more_of_choice}}}"
        return f"{self._head}{choice}{self._tail}{more}}}\n\n".encode("utf-8", "backslashreplace")

    def _fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class CallIds:
    """Generator of ids of tool calls.

    Args:
        random_bits: Returns a random integer of the given number of bits.
        is_short: Whether an id is nine letters and digits, as Mistral's templates want them.
        prefix: Beginning of an id, where the rules allow one.
    """

    def __init__(self, random_bits: Callable[[int], int], *, is_short: bool, prefix: str = "call_") -> None:
        self._random_bits = random_bits
        self._prefix = prefix
        self._is_short = is_short

    def __call__(self) -> str:
        """A new id, such as `call_…`."""
        rest = self._random_bits(_BITS)
        chars = []
        for _ in range(_SHORT_CHARS if self._is_short else _NUM_CHARS):
            rest, place = divmod(rest, len(_ALPHABET))
            chars.append(_ALPHABET[place])
        text = "".join(chars)
        return text if self._is_short else f"{self._prefix}{text}"


def error_event(error: BaseException) -> bytes:
    """Event that ends a stream with an error."""
    return server_sent_events.event(json_bytes(error_body(error)))


OPENAI_STREAM: Final = StreamForm(
    server_sent_events.MEDIA_TYPE,
    server_sent_events.comment,
    error_event,
    done=server_sent_events.event(b"[DONE]"),
)
"""Form of streams of chats and completions."""


class OpenAiAnswer(Answer):
    """Choices of one answer as they come, and the usage at the end.

    A stream of one choice carries `timings` in its last chunk.

    Args:
        choices: The choices.
        endpoint_format: Format of the endpoint.
        body: Body of the request.
    """

    form = OPENAI_STREAM

    def __init__(self, choices: Choices, endpoint_format: EndpointFormat, body: GenerationBody) -> None:
        super().__init__(choices)
        backend = choices.backend
        self._includes_usage = body.includes_usage
        self._has_continuous_usage = body.has_continuous_usage
        self._returns_progress = bool(body.return_progress)
        self._writer = ResponseWriter(
            endpoint_format=endpoint_format,
            answer_id=choices.new_id(endpoint_format.id_prefix),
            created=int(backend.api.now_s()),
            model=backend.model_id,
            fingerprint=backend.api.fingerprint,
            null_usage=body.includes_usage,
        )

    async def whole(self) -> Response:
        """The response of an answer that is not streamed."""
        answers = await self.choices.each(self._read)
        is_long = any(map(_is_long, self.choices.jobs, answers))
        return await made(is_long, lambda: _written(self._document(answers), is_long=is_long))

    async def produce(self, emit: Emit) -> None:
        """Emit chunks of all choices as they come, then the usage."""

        async def send(index: int) -> AnswerPart:
            return await self._send(index, emit)

        jobs, last_parts = self.choices.jobs, await self.choices.each(send)
        if self._includes_usage:
            times = timings(jobs[0], last_parts[0]) if len(jobs) == 1 else None
            await emit(self._writer.usage_event(usage_fields(usage_of(jobs, last_parts)), times))

    def comment(self) -> bytes:
        """Progress of the prompts: as events where the client asks for them, otherwise as a comment."""
        reading = self.choices.reading
        if not self._returns_progress:
            return super().comment()
        events = [
            self._writer.progress_event(index, progress, reading.elapsed_ms)
            for index, progress in sorted(reading.by_job.items())
        ]
        return b"".join(events) or self.form.comment(PING)

    async def _send(self, index: int, emit: Emit) -> AnswerPart:
        writer, job = self._writer, self.choices.jobs[index]
        wants_ids = job.wants_token_ids
        is_long = _num_reported(job) > MOST_AT_ONCE
        prompt_ids = job.shown_prompt if wants_ids else None
        opening = await made(is_long, writer.opening_event, index, prompt_ids)
        is_first = True
        async with aclosing(self.choices.parts(index)) as parts:
            async for part in parts:
                if self._has_continuous_usage:
                    writer = self._writer.with_usage(usage_fields(usage_of([job], [part])))
                    opening = writer.opening_event(index, prompt_ids) if is_first else b""
                events = opening
                if is_first and (job.echo or job.request.scores_prompt):
                    events += await made(is_long, self._echo, writer, index, job, part)
                is_first = False
                ids = part.token_ids if wants_ids else None
                if part.message_parts or part.tokens or ids:
                    tokens = (
                        [_behind(job.echo, token) for token in part.tokens] if job.wants_logprobs else None
                    )
                    events += writer.part_events(index, part.message_parts, tokens, ids)
                opening = b""
                if part.finish is not None:
                    alone = len(self.choices.jobs) == 1 and not self._includes_usage
                    times = timings(job, part) if alone else None
                    ids = () if wants_ids else None
                    events += writer.closing_event(index, part.finish, times, ids, job.warnings)
                await emit(events)
        return part

    def _echo(self, writer: ResponseWriter, index: int, job: GenerationJob, first: AnswerPart) -> bytes:
        """The prompt, which the answer begins with. Thread-safe."""
        echoed = self._echoed(job, first) if job.wants_logprobs else None
        none = () if job.wants_token_ids else None
        return writer.part_events(index, [Content(job.echo)], echoed, none)

    def _echoed(self, job: GenerationJob, first: AnswerPart) -> list[AnswerToken]:
        """Scored tokens of the prompt that an answer begins with."""
        if not job.request.scores_prompt:
            return []
        tokenizer = self.choices.backend.tokenizer
        return echoed_tokens(job.request.prompt, job.echo, first.prompt_logprobs, tokenizer)

    async def _read(self, index: int) -> list[AnswerPart]:
        async with aclosing(self.choices.parts(index)) as coming:
            return [part async for part in coming]

    def _document(self, answers: Sequence[list[AnswerPart]]) -> dict[str, Any]:
        """An answer that is not streamed. Thread-safe."""
        endpoint_format, jobs = self._writer.endpoint_format, self.choices.jobs
        more: dict[str, Any] = {}
        choices = []
        for index, (job, parts) in enumerate(zip(jobs, answers, strict=True)):
            finish = parts[-1].finish
            assert finish is not None  # noqa: S101 - the last part has one
            message_parts = joined(
                [Content(job.echo), *(piece for part in parts for piece in part.message_parts)]
            )
            tokens = self._echoed(job, parts[0])
            tokens += [_behind(job.echo, token) for part in parts for token in part.tokens]
            logprobs = endpoint_format.logprobs(tokens) if job.wants_logprobs else None
            choice = endpoint_format.choice(index, message_parts, finish, logprobs)
            choices.append(choice)
            if job.wants_token_ids:
                choice[ANSWER_FIELD] = [token for part in parts for token in part.token_ids]
                holder = choice if endpoint_format.has_prompt_ids_in_choices else more
                holder[PROMPT_FIELD] = job.shown_prompt
        last_parts = [parts[-1] for parts in answers]
        more["usage"] = usage_fields(usage_of(jobs, last_parts))
        if jobs[0].warnings:
            more["warnings"] = jobs[0].warnings
        if len(jobs) == 1:
            more["timings"] = timings(jobs[0], last_parts[0])
        return self._writer.whole(choices, **more)


def usage_fields(usage: Usage) -> dict[str, Any]:
    """`usage` of an answer."""
    images = {"image_tokens": usage.num_image_rows} if usage.num_image_rows else {}
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_answer,
        "total_tokens": usage.num_prompt + usage.num_answer,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached, **images},
        "completion_tokens_details": {
            "reasoning_tokens": usage.num_reasoning,
            "accepted_prediction_tokens": usage.num_accepted,
            "rejected_prediction_tokens": usage.num_rejected,
        },
    }


def ids_member(name: str, ids: Sequence[int] | None) -> str:
    """Another member of a JSON object that has some: `,"token_ids":[1,2]`; empty if there is none to add.

    Args:
        name: Name of the field.
        ids: Its value, or None if it was not requested.
    """
    return "" if ids is None else f',"{name}":{json.dumps(ids, separators=(",", ":"))}'


def chat_logprobs(tokens: Iterable[AnswerToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    content = [
        {
            **_chat_entry(token.id, token.logprobs.logprob, tokenizer),
            "top_logprobs": [_chat_entry(id, logprob, tokenizer) for id, logprob in token.logprobs.top],  # noqa: A001
        }
        for token in tokens
        if token.logprobs is not None
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[AnswerToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """`choices[].logprobs` of a completion: always includes the token itself; null for a prompt's first."""
    top_logprobs: list[dict[str, float] | None] = []
    for token in tokens:
        if token.logprobs is None:
            top_logprobs.append(None)
            continue
        likeliest: dict[str, float] = {}
        for id, logprob in (*token.logprobs.top, (token.id, token.logprobs.logprob)):  # noqa: A001
            likeliest.setdefault(_legacy_name(id, tokenizer), _finite(logprob))
        top_logprobs.append(likeliest)
    return {
        "tokens": [_legacy_name(token.id, tokenizer) for token in tokens],
        "token_logprobs": [
            None if token.logprobs is None else _finite(token.logprobs.logprob) for token in tokens
        ],
        "top_logprobs": top_logprobs,
        "text_offset": [token.offset for token in tokens],
    }


# A token that is no complete UTF-8 text is written with escapes, as OpenAI does, beside its bytes. A control
# token has a name and no bytes.
def _chat_entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    piece = tokenizer.piece(token)
    name = piece.decode("utf-8", "backslashreplace") if piece else tokenizer.name(token)
    return {"token": name, "logprob": _finite(logprob), "bytes": list(piece) or None}


def _legacy_name(token: int, tokenizer: Tokenizer) -> str:
    piece = tokenizer.piece(token)
    if not piece:
        return tokenizer.name(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE


async def respond_in(
    request: Request,
    backend: Backend,
    body: GenerationBody,
    endpoint_format: EndpointFormat,
    jobs: Sequence[GenerationJob],
) -> Response:
    """Answer a request in the format of its endpoint; see `mesh.api.answering.respond`."""

    def make(choices: Choices) -> OpenAiAnswer:
        return OpenAiAnswer(choices, endpoint_format, body)

    return await respond(request, backend, jobs, make, is_streamed=bool(body.stream))


def _written(answer: dict[str, Any], *, is_long: bool) -> Response:
    if is_long:
        return Response(large_json_bytes(answer), media_type="application/json")
    return json_response(answer)


def _is_long(job: GenerationJob, parts: Sequence[AnswerPart]) -> bool:
    """Whether an answer is reported token by token, and has many."""
    if not (job.wants_logprobs or job.wants_token_ids):
        return False
    return _num_reported(job) + sum(len(part.token_ids) for part in parts) > MOST_AT_ONCE


def _num_reported(job: GenerationJob) -> int:
    """Tokens of the prompt that come back in the answer."""
    return len(job.request.prompt) if job.request.scores_prompt or job.wants_token_ids else 0


def _behind(echo: str, token: AnswerToken) -> AnswerToken:
    return replace(token, offset=len(echo) + token.offset) if echo else token
