"""Streamed and whole responses, with disconnects and pings."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog
from starlette.responses import Response

from mesh.api.answer_stream import ChoiceGroup, echoed_tokens, metered
from mesh.api.errors import error_body, error_response, json_bytes, json_response, large_json_bytes
from mesh.api.middleware import CLIENT_GONE_STATUS, log_unexpected
from mesh.api.openai_format import (
    ANSWER_FIELD,
    MOST_AT_ONCE,
    PROMPT_FIELD,
    EndpointFormat,
    ResponseWriter,
    timings,
    usage,
)
from mesh.text.message_parts import Content, joined
from spanmesh_proto.errors import ClusterError, MeshError, wire_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from mesh.api.answer_stream import AnswerPart, AnswerToken
    from mesh.api.backend import Backend
    from mesh.api.generation_job import GenerationJob
    from mesh.api.protocol import GenerationBody
    from mesh.engine import PrefillProgress
    from mesh.text.tokenizer import Tokenizer

PING: Final = b": ping\n\n"
DONE: Final = b"data: [DONE]\n\n"
# An engine refuses a request at once. For this long nothing is sent, so that the refusal can still be an HTTP
# status instead of an event in a stream that began with 200.
GRACE_S: Final = 0.05
# While a lost stage is replaced the engine may refuse later; but every client hears something within this
# time.
_LONGEST_GRACE_S: Final = 3.0
_MAX_JOBS_AT_ONCE: Final = 8
_ID_BITS: Final = 128

log = structlog.get_logger()

Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client disconnected before its answer was complete."""


class PromptReading:
    """Progress of the prompts of one request, for its stream while that has no token to send.

    Args:
        jobs: Jobs of the request.

    Attributes:
        jobs: The same jobs, whose requests report to this object.
        by_job: Progress of the prompts that are being read, by the index of their job.
    """

    def __init__(self, jobs: Sequence[GenerationJob]) -> None:
        self.by_job: dict[int, PrefillProgress] = {}
        self._done: set[int] = set()
        self._begun_s: float | None = None
        self.jobs = [
            replace(job, request=replace(job.request, on_prefill=partial(self._note, index)))
            for index, job in enumerate(jobs)
        ]

    @property
    def elapsed_ms(self) -> float:
        """Time since the first prompt was begun."""
        begun_s = self._begun_s
        return 0.0 if begun_s is None else (asyncio.get_running_loop().time() - begun_s) * 1000

    def comment(self) -> bytes:
        """Comment of a silent stream: sums over the prompts that are being read."""
        reading = self.by_job.values()
        if not reading:
            return PING
        num_read = sum(each.num_read for each in reading)
        return b": prefill %d/%d tokens\n\n" % (num_read, sum(each.num_tokens for each in reading))

    def _note(self, index: int, progress: PrefillProgress) -> None:
        if self._begun_s is None:
            self._begun_s = asyncio.get_running_loop().time()
        # After a repair a prompt is read again, behind the answer's first tokens.
        if progress.is_whole or index in self._done:
            self._done.add(index)
            self.by_job.pop(index, None)
        else:
            self.by_job[index] = progress


class _Sink:
    """Output of the response. Producer and pinger both write; each write is sent whole."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self._lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._last_write_s = self._loop.time()
        self.started = False

    def silent_s(self) -> float:
        return self._loop.time() - self._last_write_s

    async def write(self, events: bytes) -> None:
        async with self._lock:
            await self._write(events)

    async def write_in_turn(self, make: Callable[[], bytes]) -> None:
        """Write what `make` returns once no write is under way: until then it may become untrue."""
        async with self._lock:
            await self._write(make())

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, events: bytes) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})
        self._last_write_s = self._loop.time()


class _Stream:
    """Sends the choices of one answer as they come, and the usage at the end.

    A stream of one choice carries `timings` in its last chunk.
    """

    def __init__(
        self,
        backend: Backend,
        writer: ResponseWriter,
        jobs: Sequence[GenerationJob],
        num_at_once: int,
        *,
        includes_usage: bool,
    ) -> None:
        self._choice_group = ChoiceGroup(backend, jobs)
        self._tokenizer = backend.tokenizer
        self._writer = writer
        self._jobs = jobs
        self._num_at_once = num_at_once
        self._includes_usage = includes_usage

    async def produce(self, emit: Callable[[bytes], Awaitable[None]]) -> None:
        choices = [self._choice(index, job, emit) for index, job in enumerate(self._jobs)]
        last_parts = await _run_all(choices, self._num_at_once)
        if self._includes_usage:
            times = timings(self._jobs[0], last_parts[0]) if len(self._jobs) == 1 else None
            await emit(self._writer.usage_event(usage(self._jobs, last_parts), times))

    async def _choice(
        self, index: int, job: GenerationJob, emit: Callable[[bytes], Awaitable[None]]
    ) -> AnswerPart:
        writer = self._writer
        wants_ids = job.wants_token_ids
        is_long = _num_reported(job) > MOST_AT_ONCE
        opening = await made(is_long, writer.opening_event, index, job.request.prompt if wants_ids else None)
        is_first = True
        async with aclosing(self._choice_group.parts(index)) as parts:
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
                    alone = len(self._jobs) == 1 and not self._includes_usage
                    times = timings(job, part) if alone else None
                    ids = () if wants_ids else None
                    events += writer.closing_event(index, part.finish, times, ids, job.warnings)
                await emit(events)
        return part

    def _echo(self, index: int, job: GenerationJob, first: AnswerPart) -> bytes:
        """The prompt, which the answer begins with. Thread-safe."""
        echoed = _echoed(job, first, self._tokenizer) if job.wants_logprobs else None
        none = () if job.wants_token_ids else None
        return self._writer.part_events(index, [Content(job.echo)], echoed, none)


async def cancel_on_disconnect(
    work: Coroutine[None, None, Result], receive: Receive, closing: asyncio.Event
) -> Result:
    """Run `work`; cancel it, and wait for its cleanup, when the client or the server is gone.

    Args:
        work: The work.
        receive: ASGI channel of the request, its body already read.
        closing: Set when the server shuts down.

    Raises:
        ClientGoneError: If the client disconnected.
        ClusterError: If the server shuts down.
    """
    worker = asyncio.create_task(work)
    hang_up = asyncio.create_task(_disconnected(receive))
    shutdown = asyncio.create_task(closing.wait())
    tasks = (worker, hang_up, shutdown)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finished = worker.done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if finished:
        return worker.result()
    if closing.is_set():
        raise ClusterError("the server is shutting down: try again in a moment", retry_after_s=5)
    raise ClientGoneError


async def prepared(request: Request, backend: Backend, work: Coroutine[None, None, Result]) -> Result:
    """Computation on a request's texts before its answer begins; ends with its client.

    Args:
        request: Request of the client, its body already read.
        backend: The served model.
        work: The work.

    Raises:
        ClientGoneError: If the client disconnected.
        MeshError: What the work raises, or that the server shuts down.
    """
    return await cancel_on_disconnect(work, request.receive, backend.api.closing)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def error_event(error: BaseException) -> bytes:
    """Event that ends a stream of OpenAI's API with an error."""
    return b"data: " + json_bytes(error_body(error)) + b"\n\n"


class EventStream(Response):
    """Runs a producer and sends its events; comments while it is silent; stops it when the client leaves.

    Args:
        produce: Emits whole events, then returns.
        closing: Set when the server shuts down.
        ping_interval_s: A stream that has been silent for this long sends a comment.
        comment: Returns the comment, or other events in its place; called when it is written.
        is_whole: Whether the engine answers, or refuses, at once.
        done: End of a stream without error.
        format_error: Returns the events that end a stream with an error.

    Attributes:
        produce: As given, and so are the others.
        comment: See above.
        is_whole: See above.
        done: See above.
        format_error: See above.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        produce: Callable[[Callable[[bytes], Awaitable[None]]], Awaitable[None]],
        closing: asyncio.Event,
        ping_interval_s: float,
        *,
        comment: Callable[[], bytes] = lambda: PING,
        is_whole: Callable[[], bool] = lambda: True,
        done: bytes = DONE,
        format_error: Callable[[BaseException], bytes] = error_event,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.produce = produce
        self.is_whole = is_whole
        self.done = done
        self.format_error = format_error
        self._closing = closing
        self._ping_interval_s = ping_interval_s
        self.comment = comment

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. A failure before its first byte becomes an ordinary error response."""
        sink = _Sink(send, self.raw_headers)
        try:
            await cancel_on_disconnect(self._run(sink), receive, self._closing)
        except ClientGoneError:
            log.info("client_gone")
            return
        except Exception as error:  # noqa: BLE001 - a stream must say that it failed, whatever did
            if isinstance(error, MeshError):
                log.info("stream_failed", code=wire_of(error).code)
            else:
                log_unexpected(error)
            if not sink.started:
                await error_response(error)(scope, receive, send)
                return
            # In a thread, since it may repeat all that the request said.
            await sink.write(await asyncio.to_thread(self.format_error, error))
        else:
            if self.done:
                await sink.write(self.done)
        await sink.end()

    async def _run(self, sink: _Sink) -> None:
        pinger = asyncio.create_task(self._ping(sink))
        try:
            await self.produce(sink.write)
        finally:
            pinger.cancel()
            await asyncio.gather(pinger, return_exceptions=True)

    async def _ping(self, sink: _Sink) -> None:
        await asyncio.sleep(GRACE_S)
        while not (sink.started or self.is_whole() or sink.silent_s() > _LONGEST_GRACE_S):  # noqa: ASYNC110
            await asyncio.sleep(GRACE_S)
        if not sink.started:
            await sink.write_in_turn(self.comment)
        while True:
            wait_s = self._ping_interval_s - sink.silent_s()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            else:
                await sink.write_in_turn(self.comment)


class DelayedStream(EventStream):
    """Stream of an answer whose model is loaded first: pings until the answer's own stream begins.

    Args:
        make: Returns that stream, an `EventStream`, once the model is loaded.
        closing: Set when the server shuts down.
        ping_interval_s: A stream that has been silent for this long sends a comment.
        format_error: Returns the events that end it with an error before that.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[Response]],
        closing: asyncio.Event,
        ping_interval_s: float,
        *,
        format_error: Callable[[BaseException], bytes] = error_event,
    ) -> None:
        super().__init__(
            self._produce_made, closing, ping_interval_s, is_whole=lambda: False, format_error=format_error
        )
        self._make = make

    async def _produce_made(self, emit: Callable[[bytes], Awaitable[None]]) -> None:
        made = await self._make()
        assert isinstance(made, EventStream)  # noqa: S101 - the request asked for a stream
        self.is_whole, self.done, self.format_error = made.is_whole, made.done, made.format_error
        self.comment = made.comment
        await made.produce(emit)


async def respond(
    request: Request,
    backend: Backend,
    body: GenerationBody,
    endpoint_format: EndpointFormat,
    jobs: Sequence[GenerationJob],
) -> Response:
    """Answer a request.

    Args:
        request: Request of the client.
        backend: The served model.
        body: Body of the request.
        endpoint_format: Format of the endpoint.
        jobs: One for each choice.

    Raises:
        RateLimited: If the API key has too few tokens left, or has reached its concurrent answers.
        MeshError: Any error of the engine before the response begins.
    """
    backend, num_at_once = metered(request.scope, backend, jobs, most_at_once=_MAX_JOBS_AT_ONCE)
    writer = ResponseWriter(
        endpoint_format=endpoint_format,
        answer_id=f"{endpoint_format.id_prefix}{backend.api.random_bits(_ID_BITS):032x}",
        created=int(backend.api.now_s()),
        model=backend.model_id,
        fingerprint=backend.api.fingerprint,
        null_usage=body.includes_usage,
    )
    if body.stream:
        reading = PromptReading(jobs)
        stream = _Stream(backend, writer, reading.jobs, num_at_once, includes_usage=body.includes_usage)
        return EventStream(
            stream.produce,
            backend.api.closing,
            backend.api.ping_interval_s,
            comment=partial(_progress, reading, writer) if body.return_progress else reading.comment,
            is_whole=backend.is_whole,
        )
    choice_group = ChoiceGroup(backend, jobs)
    work = _run_all([_whole_answer(choice_group, index) for index in range(len(jobs))], num_at_once)
    try:
        answers = await cancel_on_disconnect(work, request.receive, backend.api.closing)
    except ClientGoneError:
        log.info("client_gone")
        return Response(status_code=CLIENT_GONE_STATUS)
    is_long = any(map(_is_long, jobs, answers))
    return await made(is_long, lambda: _written(_whole(backend, writer, jobs, answers), is_long=is_long))


async def made(is_long: bool, make: Callable[..., Result], *args: Any) -> Result:  # noqa: FBT001
    """Result of a function; in a thread if it takes long, so that other answers continue meanwhile."""
    return await asyncio.to_thread(make, *args) if is_long else make(*args)


def _written(answer: dict[str, Any], *, is_long: bool) -> Response:
    if is_long:
        return Response(large_json_bytes(answer), media_type="application/json")
    return json_response(answer)


def _is_long(job: GenerationJob, answer: tuple[Sequence[AnswerPart], AnswerPart]) -> bool:
    """Whether an answer is reported token by token, and has many."""
    if not (job.wants_logprobs or job.wants_token_ids):
        return False
    return _num_reported(job) + sum(len(part.token_ids) for part in answer[0]) > MOST_AT_ONCE


def _num_reported(job: GenerationJob) -> int:
    """Tokens of the prompt that come back in the answer."""
    return len(job.request.prompt) if job.request.scores_prompt or job.wants_token_ids else 0


def _whole(
    backend: Backend,
    writer: ResponseWriter,
    jobs: Sequence[GenerationJob],
    answers: Sequence[tuple[list[AnswerPart], AnswerPart]],
) -> dict[str, Any]:
    """An answer that is not streamed. Thread-safe."""
    endpoint_format = writer.endpoint_format
    more: dict[str, Any] = {}
    choices = []
    for index, (job, (parts, last)) in enumerate(zip(jobs, answers, strict=True)):
        assert last.finish is not None  # noqa: S101 - the last part has one
        message_parts = joined(
            [Content(job.echo), *(piece for part in parts for piece in part.message_parts)]
        )
        tokens = _echoed(job, parts[0], backend.tokenizer)
        tokens += [_behind(job.echo, token) for part in parts for token in part.tokens]
        logprobs = endpoint_format.logprobs(tokens) if job.wants_logprobs else None
        choice = endpoint_format.choice(index, message_parts, last.finish, logprobs)
        choices.append(choice)
        if job.wants_token_ids:
            choice[ANSWER_FIELD] = [token for part in parts for token in part.token_ids]
            (choice if endpoint_format.has_prompt_ids_in_choices else more)[PROMPT_FIELD] = job.request.prompt
    last_parts = [last for _parts, last in answers]
    more["usage"] = usage(jobs, last_parts)
    if jobs[0].warnings:
        more["warnings"] = jobs[0].warnings
    if len(jobs) == 1:
        more["timings"] = timings(jobs[0], last_parts[0])
    return writer.whole(choices, **more)


def _progress(reading: PromptReading, writer: ResponseWriter) -> bytes:
    """Events with the progress of each prompt, for clients that ask for them; a comment without any."""
    events = [
        writer.progress_event(index, progress, reading.elapsed_ms)
        for index, progress in sorted(reading.by_job.items())
    ]
    return b"".join(events) or PING


async def _whole_answer(choice_group: ChoiceGroup, index: int) -> tuple[list[AnswerPart], AnswerPart]:
    async with aclosing(choice_group.parts(index)) as coming:
        parts = [part async for part in coming]
    return parts, parts[-1]


def _echoed(job: GenerationJob, first: AnswerPart, tokenizer: Tokenizer) -> list[AnswerToken]:
    """Scored tokens of the prompt that an answer begins with."""
    if not job.request.scores_prompt:
        return []
    return echoed_tokens(job.request.prompt, job.echo, first.prompt_logprobs, tokenizer)


def _behind(echo: str, token: AnswerToken) -> AnswerToken:
    return replace(token, offset=len(echo) + token.offset) if echo else token


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
            work.close()  # those that were never started
    return [task.result() for task in tasks]
