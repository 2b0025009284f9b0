"""Answers: committed tokens as parts, choices of a request, metering, and the course of every API's answer.

An API says how its requests become jobs (`mesh.api.generation_job`), how the parts of an answer become its
document or its events (`Answer`), and what form its streams have (`StreamForm`). All else is the same for
every API, and is here.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeVar

import structlog

from mesh.api.auth import is_own_machine, may_record
from mesh.api.event_stream import PING, EventStream, while_connected
from mesh.api.generation_job import recorded
from mesh.api.rate_limit import reservation_of
from mesh.text.answer_format import marks_in
from mesh.text.detokenizer import AnswerText
from mesh.text.message_parts import ToolCallArguments, ToolCallStart, joined
from mesh.text.output_parser import OutputParser
from spanmesh_proto.errors import InvalidRequest, StageFailed
from speculative.lookup_proposers import PredictionProposer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from mesh.api.backend import Backend
    from mesh.api.event_stream import Emit, StreamForm
    from mesh.api.generation_job import GenerationJob
    from mesh.api.rate_limit import TokenReservation
    from mesh.engine import Committed, Engine, GenerationRequest, GenerationStats, PrefillProgress
    from mesh.text.message_parts import MessagePart
    from mesh.text.tokenizer import Tokenizer
    from stages.sampling.sampler import TokenLogprobs

    PieceWith = Callable[[Collection[str]], Callable[[int], bytes]]

log = structlog.get_logger()
FinishReason = Literal["stop", "length", "tool_calls"]
_MOST_JOBS_AT_ONCE: Final = 8
_ID_BITS: Final = 128
Result = TypeVar("Result")


# Text may be held back, because it could become a stop string or because a character is incomplete, and some
# of it is dropped. A token belongs to the first character that it contributed to: it is passed on with that
# character, and dropped with it. Tokens that share a character are passed on together.
@dataclass(frozen=True)
class AnswerToken:
    """A token whose text is part of the answer."""

    id: int
    """Token id."""
    offset: int
    """Characters of the answer before it."""
    logprobs: TokenLogprobs | None
    """Log probability of the token, and of the likeliest alternatives; None for the first token of an echoed
    prompt."""


class AnswerTokens:
    """Tokens whose text is held back.

    Args:
        text: Text of the answer; each token goes to it first.
    """

    def __init__(self, text: AnswerText) -> None:
        self._text = text
        self._waiting: deque[AnswerToken] = deque()

    def push(self, token: AnswerToken) -> None:
        """Add a token that has just gone to the text; its offset is what had been decoded before."""
        self._waiting.append(token)

    def settle(self) -> tuple[AnswerToken, ...]:
        """The tokens whose text has been passed on since the last call."""
        settled = []
        text = self._text
        while self._waiting and (
            self._waiting[0].offset < text.num_passed
            # Tokens that add no text, such as control tokens, go with what is before them.
            or (self._waiting[0].offset == text.num_passed == text.num_decoded and not text.is_in_character)
        ):
            settled.append(self._waiting.popleft())
        return tuple(settled)


@dataclass(frozen=True)
class AnswerPart:
    """Parts of a message that became final together, and the tokens committed meanwhile."""

    message_parts: tuple[MessagePart, ...]
    """May be empty."""
    finish: FinishReason | None
    """Reason why the answer is over, on its last part."""
    num_tokens: int
    """Tokens of the answer up to here, an end token and those of a stop string included."""
    stats: GenerationStats
    """Counts and times of the engine up to here."""
    tokens: tuple[AnswerToken, ...] = ()
    """Tokens of the text, if the request asked for logprobs."""
    token_ids: tuple[int, ...] = ()
    """Ids of all tokens that `num_tokens` counts since the part before."""
    num_reasoning: int = 0
    """Tokens of the answer up to here that are reasoning."""
    stop_string: str | None = None
    """The stop string that ended the answer, on its last part."""
    has_cut_call: bool = False
    """On the last part, whether the answer ends within a call, whose arguments are not all there."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """On the first part, log probabilities of the prompt's tokens but the first, if the request asked for
    them."""


class _Answer:
    """State of one answer."""

    def __init__(self, piece_with: PieceWith, job: GenerationJob) -> None:
        self._job = job
        self._piece = piece_with(job.output_format.marks)
        self._text = AnswerText(self._piece, job.stops, includes_stop=job.includes_stop)
        self._marks = marks_in(job.output_format.marks)
        self._tokens = AnswerTokens(self._text)
        self._reader = OutputParser(job.output_format)
        self._message_parts: list[MessagePart] = []
        # Of the latest call.
        self._arguments: list[str] = []
        self._ids: list[int] = []
        self._num_passed = 0
        self._num_reasoning = 0
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether further tokens do not belong to it."""
        return self._text.stopped or self._reader.is_over

    def take(self, step: Committed) -> None:
        text, reader = self._text, self._reader
        self._prompt_logprobs += step.prompt_logprobs
        if self._job.is_prompt_only:
            return
        for index, token in enumerate(step.tokens):
            self._ids.append(token)
            if token in self._job.request.end_tokens:
                return
            offset = text.num_decoded
            is_mark = reader.is_in_header or self._piece(token) in self._marks
            self._message_parts += reader.push(text.push(token, is_mark=is_mark))
            if reader.is_reasoning:
                self._num_reasoning = len(self._ids)
            if step.logprobs:
                self._tokens.push(AnswerToken(token, offset, step.logprobs[index]))
            if self.is_over:
                return

    def part(self, step: Committed) -> AnswerPart | None:
        return self._part(step, None) if self._message_parts or self._job.wants_token_ids else None

    def last_part(self, step: Committed) -> AnswerPart:
        self._message_parts += self._reader.push(self._text.flush())
        self._message_parts += self._reader.flush(
            is_cut=step.finish == "length" and not self.is_over, is_stopped=self._text.stopped
        )
        finish: FinishReason | None = "stop" if self.is_over else step.finish
        if self._job.is_prompt_only:
            finish = "length"
        part = self._part(step, finish)
        if not self._reader.has_calls:
            return part
        is_cut = self._reader.ends_in_call and not _is_json("".join(self._arguments))
        return replace(
            part, finish="tool_calls" if finish == "stop" and not is_cut else finish, has_cut_call=is_cut
        )

    def _part(self, step: Committed, finish: FinishReason | None) -> AnswerPart:
        message_parts, self._message_parts = joined(self._message_parts), []
        for piece in message_parts:
            if isinstance(piece, ToolCallStart):
                self._arguments.clear()
            elif isinstance(piece, ToolCallArguments):
                self._arguments.append(piece.text)
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, ()
        new = tuple(self._ids[self._num_passed :])
        self._num_passed = len(self._ids)
        return AnswerPart(
            tuple(message_parts),
            finish,
            len(self._ids),
            step.stats,
            self._tokens.settle(),
            new,
            self._num_reasoning,
            self._text.stop_string if finish is not None else None,
            prompt_logprobs=prompt_logprobs,
        )


@dataclass(frozen=True)
class Usage:
    """Token counts of one answer, summed over its choices. A prompt with several choices counts once."""

    num_prompt: int
    """Tokens of the prompts, rows of pictures included."""
    num_image_rows: int
    """Those among them that are rows of pictures."""
    num_cached: int
    """Those among the prompts' that a cache held."""
    num_answer: int
    """Tokens of the choices."""
    num_reasoning: int
    """Those among them that are reasoning."""
    num_accepted: int
    """Tokens of the request's `prediction` that were accepted; `timings` counts all proposers."""
    num_rejected: int
    """Likewise, rejected."""


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

    @property
    def text(self) -> str:
        """Progress in words: sums over the prompts that are being read."""
        reading = self.by_job.values()
        if not reading:
            return PING
        num_read = sum(each.num_read for each in reading)
        return f"prefill {num_read}/{sum(each.num_tokens for each in reading)} tokens"

    def _note(self, index: int, progress: PrefillProgress) -> None:
        if self._begun_s is None:
            self._begun_s = asyncio.get_running_loop().time()
        # After a repair a prompt is read again, behind the answer's first tokens.
        if progress.is_whole or index in self._done:
            self._done.add(index)
            self.by_job.pop(index, None)
        else:
            self.by_job[index] = progress


class Choices:
    """The choices of one answer.

    Args:
        backend: The served model.
        jobs: Jobs of the choices; further choices of a prompt follow its first.
        reservation: Counts the tokens for the request's API key; None where the API is open.

    Attributes:
        backend: The served model.
        reading: Progress of the prompts.
        jobs: Jobs of the choices, whose prompts report to `reading`.

    Raises:
        RateLimited: If the key has too few tokens left, or has reached its concurrent answers.
    """

    def __init__(
        self, backend: Backend, jobs: Sequence[GenerationJob], reservation: TokenReservation | None
    ) -> None:
        self.backend = backend
        self.reading = PromptReading(jobs)
        self.jobs = self.reading.jobs
        self._engine: Engine = backend.engine
        self._num_at_once = min(_MOST_JOBS_AT_ONCE, len(jobs))
        if reservation is not None:
            self._num_at_once = reservation.acquire(self._num_at_once, backend.model_id, backend.num_slots)
            reservation.reserve(sum(len(job.request.prompt) + job.request.max_tokens for job in jobs))
            self._engine = MeteredEngine(backend.engine, reservation, len(jobs))
        self._begun: list[asyncio.Event] = []
        for job in jobs:
            self._begun.append(self._begun[-1] if job.is_further else asyncio.Event())

    async def parts(self, index: int = 0) -> AsyncGenerator[AnswerPart, None]:
        """Parts of one choice. Further choices of a prompt wait for its first, whose cached prefix they use.

        If the first fails before that they never run: the reader of all must cancel them, as `each` does.

        Raises:
            MeshError: Any error of the engine.
        """
        job, begun = self.jobs[index], self._begun[index]
        if job.is_further and job.request.uses_cache:
            await begun.wait()
        piece_with = self.backend.tokenizer.piece_with
        async with aclosing(answer_parts(self._engine, piece_with, job)) as parts:
            async for part in parts:
                begun.set()
                yield part

    async def each(self, read: Callable[[int], Coroutine[None, None, Result]]) -> list[Result]:
        """Results of reading each choice, in order, as many at once as may run.

        The first failure cancels the rest and is raised as it is.

        Args:
            read: Reads the choice with an index.
        """
        if len(self.jobs) == 1:
            return [await read(0)]
        places = asyncio.Semaphore(self._num_at_once)

        async def in_turn(index: int) -> Result:
            async with places:
                return await read(index)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(in_turn(index)) for index in range(len(self.jobs))]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    def new_id(self, prefix: str) -> str:
        """A new id, such as `chatcmpl-…`."""
        return f"{prefix}{self.backend.api.random_bits(_ID_BITS):032x}"


class Answer(ABC):
    """One API's answer to one request: its choices as a document, or as the source of an `EventStream`.

    Args:
        choices: The choices.

    Attributes:
        choices: The choices.
    """

    form: ClassVar[StreamForm]
    """Form of its stream."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices

    @abstractmethod
    async def whole(self) -> Response:
        """The response of an answer that is not streamed."""

    @abstractmethod
    async def produce(self, emit: Emit) -> None:
        """Emit the events of the answer as they come.

        The first goes with the first text, so that a refusal can still be a status.
        """

    def failed(self, error: BaseException) -> bytes:
        """Events that end a stream with an error. Thread-safe."""
        return self.form.failed(error)

    def comment(self) -> bytes:
        """Comment of a silent stream: progress of the prompts, or a ping."""
        return self.form.comment(self.choices.reading.text)

    def is_whole(self) -> bool:
        """Whether the engine answers, or refuses, at once."""
        return self.choices.backend.is_whole()


class MeteredEngine:
    """Engine that counts tokens for an API key.

    Prompt tokens count once the answer begins, or once its client leaves. Requests that the engine refuses,
    or that fail before the first token, cost nothing.

    Args:
        engine: Generates the tokens.
        reservation: Counts the tokens.
        num_answers: Number of answers of the request.
    """

    def __init__(self, engine: Engine, reservation: TokenReservation, num_answers: int) -> None:
        self._engine = engine
        self._reservation = reservation
        self._num_left = num_answers

    @property
    def context_length(self) -> int:
        """Positions of one session of the engine."""
        return self._engine.context_length

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Committed, None]:
        """Generate as the engine does, and count."""
        num_prompt = len(request.prompt)
        try:
            async with aclosing(self._engine.generate(request)) as steps:
                async for step in steps:
                    self._reservation.spend(num_prompt + len(step.tokens))
                    num_prompt = 0
                    yield step
        except Exception:
            num_prompt = 0
            raise
        finally:
            self._reservation.spend(num_prompt)
            # Its slot is free by now, before the client knows: its next request finds a place.
            self._num_left -= 1
            self._reservation.release(self._num_left)


def echoed_tokens(
    prompt: Sequence[int], echo: str, logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> list[AnswerToken]:
    """Tokens of a prompt that the answer begins with.

    Args:
        prompt: Token ids.
        echo: Their text as the answer has it.
        logprobs: One entry for each but the first.
        tokenizer: Tokenizer of the model.
    """
    # Names of control tokens are part of a text prompt that has them, but not of text that ids stand for.
    pieces: tuple[Callable[[int], bytes], ...] = (
        lambda token: tokenizer.piece(token) or tokenizer.name(token).encode(),
        tokenizer.piece,
    )
    for piece in pieces:
        text = AnswerText(piece)
        offsets, decoded = [], ""
        for token in prompt:
            offsets.append(text.num_decoded)
            decoded += text.push(token)
        decoded += text.flush()
        if decoded.endswith(echo):
            break
    # What the tokenizer adds in front, such as a first token or a space, is not in the text.
    added = len(decoded) - len(echo)
    places = [min(max(0, offset - added), len(echo)) for offset in offsets]
    return [
        AnswerToken(token, place, known)
        for token, place, known in zip(prompt, places, (None, *logprobs), strict=True)
    ]


async def answer_parts(
    engine: Engine, piece_with: PieceWith, job: GenerationJob
) -> AsyncGenerator[AnswerPart, None]:
    """Run a job and yield its answer. The engine's session has ended before the last part is yielded.

    A step without final text yields no part, unless the job wants token ids.

    Args:
        engine: Generates the tokens.
        piece_with: Returns the bytes of tokens, marks included; see `Tokenizer.piece_with`.
        job: The job.

    Raises:
        MeshError: Any error of the engine.
    """
    answer = _Answer(piece_with, job)
    last: AnswerPart | None = None
    async with aclosing(engine.generate(job.request)) as steps:
        async for step in steps:
            answer.take(step)
            if answer.is_over or step.finish is not None:
                last = answer.last_part(step)
                break
            if (part := answer.part(step)) is not None:
                yield part
    if last is None:
        raise StageFailed("the engine ended the answer without a reason: look at the log of the stages")
    _log(job, last)
    yield last


def _log(job: GenerationJob, last: AnswerPart) -> None:
    stats = last.stats
    log.info(
        "answered",
        finish=last.finish,
        prompt_tokens=len(job.request.prompt),
        cached_tokens=stats.num_cached,
        completion_tokens=last.num_tokens,
        prefill_ms=round(stats.prefill_ms, 1),
        decode_ms=round(stats.decode_ms, 1),
        proposed=stats.num_proposed,
        accepted=stats.num_accepted,
    )


async def respond(
    request: Request,
    backend: Backend,
    jobs: Sequence[GenerationJob],
    make: Callable[[Choices], Answer],
    *,
    is_streamed: bool,
) -> Response:
    """Answer a request.

    Args:
        request: Request of the client, its body already read.
        backend: The served model.
        jobs: One for each choice.
        make: Returns the API's answer.
        is_streamed: Whether the answer is an `EventStream`.

    Raises:
        RateLimited: If the API key has too few tokens left, or has reached its concurrent answers.
        ClientGoneError: If the client disconnects before an answer that is not streamed.
        InvalidRequest: If the answer is to be recorded, and must not be.
        MeshError: Any error of the engine before the response begins.
    """
    jobs = [consented(request, backend, job) for job in jobs]
    answer = make(Choices(backend, jobs, reservation_of(request.scope)))
    if is_streamed:
        return EventStream(answer, backend.api.closing, backend.api.ping_interval_s)
    return await while_connected(request, answer.whole())


def consented(request: Request, backend: Backend, job: GenerationJob) -> GenerationJob:
    """A job whose answer is recorded if its client agreed: by its key, or on this machine without keys.

    Raises:
        InvalidRequest: If the client asks for it, and it must not be.
    """
    right = may_record(request.scope)
    may = backend.records and (is_own_machine(request) if right is None else right)
    if may and job.record is not False:
        return recorded(job)
    if not may and job.record:
        if not backend.records:
            reason = "no answers are recorded here: serve the model with `mesh serve --record FOLDER`"
        elif right is None:
            reason = "without API keys only requests of the head's own machine are recorded: ask there"
        else:
            reason = (
                "this API key may not be recorded: have it allowed, by `may-record=yes` in its line of the"
                " key file, which `mesh keys add --may-record` writes"
            )
        raise InvalidRequest(f"record: {reason}, or leave it out", param="record")
    return job


def usage_of(jobs: Sequence[GenerationJob], last_parts: Sequence[AnswerPart]) -> Usage:
    """Token counts of choices up to their latest parts."""
    first = [not job.is_further for job in jobs]
    predictions = [_prediction_tokens(job, part) for job, part in zip(jobs, last_parts, strict=True)]
    return Usage(
        num_prompt=sum(len(job.request.prompt) for job in compress(jobs, first)),
        num_image_rows=sum(job.num_image_rows for job in compress(jobs, first)),
        num_cached=sum(part.stats.num_cached for part in compress(last_parts, first)),
        num_answer=sum(part.num_tokens for part in last_parts),
        num_reasoning=sum(part.num_reasoning for part in last_parts),
        num_accepted=sum(accepted for accepted, _ in predictions),
        num_rejected=sum(rejected for _, rejected in predictions),
    )


def _prediction_tokens(job: GenerationJob, last: AnswerPart) -> tuple[int, int]:
    """Accepted and rejected tokens of the request's own prediction."""
    if not job.request.prediction or last.stats.report is None:
        return 0, 0
    counts = last.stats.report().by_proposer.get(PredictionProposer.name)
    return (0, 0) if counts is None else (counts.num_accepted, counts.num_proposed - counts.num_accepted)


def timings(job: GenerationJob, last: AnswerPart) -> dict[str, Any]:
    """Times of one choice, in the words of llama.cpp's server.

    The first token counts as prompt time, so rates leave it out.
    """
    stats = last.stats
    num_prompt, num_decoded = len(job.request.prompt) - stats.num_cached, max(last.num_tokens - 1, 0)
    times: dict[str, Any] = {
        "cache_n": stats.num_cached,
        "prompt_n": num_prompt,
        "prompt_ms": round(stats.prefill_ms, 3),
        "prompt_per_token_ms": _ratio(stats.prefill_ms, num_prompt),
        "prompt_per_second": _ratio(num_prompt * 1000, stats.prefill_ms),
        "predicted_n": last.num_tokens,
        "predicted_ms": round(stats.decode_ms, 3),
        "predicted_per_token_ms": _ratio(stats.decode_ms, num_decoded),
        "predicted_per_second": _ratio(num_decoded * 1000, stats.decode_ms),
        "draft_n": stats.num_proposed,
        "draft_n_accepted": stats.num_accepted,
    }
    if stats.ring is not None:
        times |= stats.ring().as_dict()
    return times if stats.report is None else times | {"speculation": stats.report().as_dict()}


def _ratio(amount: float, per: float) -> float:
    return round(amount / per, 3) if per > 0 else 0.0


async def made(is_long: bool, make: Callable[..., Result], *args: Any) -> Result:  # noqa: FBT001
    """Result of a function; in a thread if it takes long, so that other answers continue meanwhile."""
    return await asyncio.to_thread(make, *args) if is_long else make(*args)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return False
    return True
