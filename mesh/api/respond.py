"""Jobs to a response, streamed or whole."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog
from starlette.responses import Response

from mesh.api.envelope import Envelope, Shape
from mesh.api.hang_up import ClientGoneError, unless_hung_up
from mesh.api.json_response import json_response
from mesh.api.metered_engine import metered
from mesh.api.request_log import CLIENT_GONE_STATUS
from mesh.api.siblings import Siblings
from mesh.api.streaming import EventStream
from mesh.api.token_ids import ANSWER_FIELD, PROMPT_FIELD
from mesh.api.usage import timings, usage
from mesh.text.message_parts import Content, joined

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from starlette.requests import Request

    from mesh.api.answer import AnswerPart
    from mesh.api.backend import Backend
    from mesh.api.job import Job
    from mesh.api.schemas import GenerationBody

log = structlog.get_logger()

Result = TypeVar("Result")

_MAX_JOBS_AT_ONCE: Final = 8
_ID_BITS: Final = 128


async def respond(
    request: Request, backend: Backend, body: GenerationBody, shape: Shape, jobs: Sequence[Job]
) -> Response:
    """Answer a request.

    Args:
        request: Whose client to watch.
        backend: The served model.
        body: Says whether to stream.
        shape: The endpoint's.
        jobs: One for each choice.

    Raises:
        RateLimited: If the caller's API key has too few tokens left for now, or enough answers under way.
        MeshError: Whatever the engine raises before the response begins.
    """
    backend, num_at_once = metered(request.scope, backend, jobs, most_at_once=_MAX_JOBS_AT_ONCE)
    envelope = Envelope(
        shape=shape,
        answer_id=f"{shape.id_prefix}{backend.random_bits(_ID_BITS):032x}",
        created=int(backend.now_s()),
        model=backend.model_id,
        fingerprint=backend.fingerprint,
        null_usage=body.includes_usage,
    )
    if body.stream:
        stream = _Stream(backend, envelope, jobs, num_at_once, includes_usage=body.includes_usage)
        return EventStream(
            stream.produce, backend.closing, backend.ping_interval_s, is_whole=backend.is_whole
        )
    siblings = Siblings(backend, jobs)
    work = _run_all([_whole_answer(siblings, index) for index in range(len(jobs))], num_at_once)
    try:
        answers = await unless_hung_up(work, request.receive, backend.closing)
    except ClientGoneError:
        log.info("client_gone")
        return Response(status_code=CLIENT_GONE_STATUS)
    more: dict[str, Any] = {}
    choices = []
    for index, (job, (parts, last)) in enumerate(zip(jobs, answers, strict=True)):
        assert last.finish is not None  # noqa: S101 - the last part has one
        said = joined([Content(job.echo), *(piece for part in parts for piece in part.said)])
        tokens = [token for part in parts for token in part.tokens]
        logprobs = shape.logprobs(tokens) if job.wants_logprobs else None
        choice = shape.choice(index, said, last.finish, logprobs)
        choices.append(choice)
        if job.wants_token_ids:
            choice[ANSWER_FIELD] = [token for part in parts for token in part.token_ids]
            (choice if shape.has_prompt_ids_in_choices else more)[PROMPT_FIELD] = job.request.prompt
    last_parts = [last for _parts, last in answers]
    more["usage"] = usage(jobs, last_parts)
    if len(jobs) == 1:
        more["timings"] = timings(jobs[0], last_parts[0])
    return json_response(envelope.whole(choices, **more))


async def _whole_answer(siblings: Siblings, index: int) -> tuple[list[AnswerPart], AnswerPart]:
    async with aclosing(siblings.parts(index)) as coming:
        parts = [part async for part in coming]
    return parts, parts[-1]


class _Stream:
    """Writes the choices of one answer as they come, and the counts at the end.

    A stream of one choice carries `timings` in its last chunk.
    """

    def __init__(
        self,
        backend: Backend,
        envelope: Envelope,
        jobs: Sequence[Job],
        num_at_once: int,
        *,
        includes_usage: bool,
    ) -> None:
        self._siblings = Siblings(backend, jobs)
        self._envelope = envelope
        self._jobs = jobs
        self._num_at_once = num_at_once
        self._includes_usage = includes_usage

    async def produce(self, emit: Callable[[bytes], Awaitable[None]]) -> None:
        choices = [self._choice(index, job, emit) for index, job in enumerate(self._jobs)]
        last_parts = await _run_all(choices, self._num_at_once)
        if self._includes_usage:
            times = timings(self._jobs[0], last_parts[0]) if len(self._jobs) == 1 else None
            await emit(self._envelope.usage_event(usage(self._jobs, last_parts), times))

    async def _choice(self, index: int, job: Job, emit: Callable[[bytes], Awaitable[None]]) -> AnswerPart:
        envelope = self._envelope
        wants_ids = job.wants_token_ids
        opening = envelope.opening_event(index, job.request.prompt if wants_ids else None)
        if job.echo:
            opening += envelope.said_events(index, [Content(job.echo)], token_ids=() if wants_ids else None)
        async with aclosing(self._siblings.parts(index)) as parts:
            async for part in parts:
                events = opening
                ids = part.token_ids if wants_ids else None
                if part.said or part.tokens or ids:
                    tokens = part.tokens if job.wants_logprobs else None
                    events += envelope.said_events(index, part.said, tokens, ids)
                opening = b""
                if part.finish is not None:
                    alone = len(self._jobs) == 1 and not self._includes_usage
                    times = timings(job, part) if alone else None
                    events += envelope.closing_event(index, part.finish, times, () if wants_ids else None)
                await emit(events)
        return part


async def _run_all(works: Sequence[Coroutine[None, None, Result]], num_at_once: int) -> list[Result]:
    """Results in order. The first failure cancels the rest and is raised as it is."""
    if len(works) == 1:
        return [await works[0]]
    places = asyncio.Semaphore(num_at_once)

    async def in_turn(work: Coroutine[None, None, Result]) -> Result:
        async with places:
            return await work

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(in_turn(work)) for work in works]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        for work in works:
            work.close()  # those that never had their turn
    return [task.result() for task in tasks]
