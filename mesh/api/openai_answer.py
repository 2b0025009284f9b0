"""Answers of OpenAI's chats and completions: choices, whole or as chunks."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from mesh.api.answering import Answer, echoed_tokens, made, respond, timings, usage_of
from mesh.api.errors import json_response, large_json_bytes
from mesh.api.event_stream import PING
from mesh.api.openai_format import (
    ANSWER_FIELD,
    MOST_AT_ONCE,
    OPENAI_STREAM,
    PROMPT_FIELD,
    ResponseWriter,
    usage_fields,
)
from mesh.text.message_parts import Content, joined

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from mesh.api.answering import AnswerPart, AnswerToken, Choices
    from mesh.api.backend import Backend
    from mesh.api.event_stream import Emit
    from mesh.api.generation_job import GenerationJob
    from mesh.api.openai_format import EndpointFormat
    from mesh.api.protocol import GenerationBody


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
        opening = await made(is_long, writer.opening_event, index, job.request.prompt if wants_ids else None)
        is_first = True
        async with aclosing(self.choices.parts(index)) as parts:
            async for part in parts:
                events = opening
                if is_first and (job.echo or job.request.scores_prompt):
                    events += await made(is_long, self._echo, index, job, part)
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

    def _echo(self, index: int, job: GenerationJob, first: AnswerPart) -> bytes:
        """The prompt, which the answer begins with. Thread-safe."""
        echoed = self._echoed(job, first) if job.wants_logprobs else None
        none = () if job.wants_token_ids else None
        return self._writer.part_events(index, [Content(job.echo)], echoed, none)

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
                holder[PROMPT_FIELD] = job.request.prompt
        last_parts = [parts[-1] for parts in answers]
        more["usage"] = usage_fields(usage_of(jobs, last_parts))
        if jobs[0].warnings:
            more["warnings"] = jobs[0].warnings
        if len(jobs) == 1:
            more["timings"] = timings(jobs[0], last_parts[0])
        return self._writer.whole(choices, **more)


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
