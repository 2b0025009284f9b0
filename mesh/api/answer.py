"""Committed tokens to the parts of an answer that clients see."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import structlog

from mesh.api.answer_tokens import AnswerToken, AnswerTokens
from mesh.text.detokenizer import AnswerText
from mesh.text.message_parts import joined
from mesh.text.output_parser import MessageReader
from spanmesh_proto.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection

    from mesh.api.job import Job
    from mesh.engine import Committed, Engine, GenerationStats
    from mesh.text.message_parts import Said

    PieceWith = Callable[[Collection[str]], Callable[[int], bytes]]

log = structlog.get_logger()

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class AnswerPart:
    """What became final together, and the tokens committed meanwhile.

    Attributes:
        said: May be nothing.
        finish: Why the answer is over, on its last part.
        num_tokens: Tokens of the answer up to here, an end token and those of a stop string included.
        stats: The engine's counts and times up to here.
        tokens: Tokens of the text, if the request asked for logprobs.
        token_ids: All that `num_tokens` counts and the parts before did not have.
        num_reasoning: Tokens of the answer up to here that are reasoning.
    """

    said: tuple[Said, ...]
    finish: FinishReason | None
    num_tokens: int
    stats: GenerationStats
    tokens: tuple[AnswerToken, ...] = ()
    token_ids: tuple[int, ...] = ()
    num_reasoning: int = 0


async def answer_parts(engine: Engine, piece_with: PieceWith, job: Job) -> AsyncGenerator[AnswerPart, None]:
    """Run a job. The engine's session is over before the last part is passed on.

    A step that settles no text makes no part of its own, unless the job wants token ids.

    Args:
        engine: Makes the tokens.
        piece_with: Gives the bytes that tokens stand for, and those of marks; see `Tokenizer.piece_with`.
        job: What to do.

    Raises:
        MeshError: Whatever the engine raises.
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


class _Answer:
    """What one answer's tokens come to."""

    def __init__(self, piece_with: PieceWith, job: Job) -> None:
        self._job = job
        self._text = AnswerText(piece_with(job.reading.marks), job.stops)
        self._tokens = AnswerTokens(self._text)
        self._reader = MessageReader(job.reading)
        self._said: list[Said] = []
        self._ids: list[int] = []
        self._num_passed = 0
        self._num_reasoning = 0

    @property
    def is_over(self) -> bool:
        """Whether nothing that follows belongs to it."""
        return self._text.stopped or self._reader.is_over

    def take(self, step: Committed) -> None:
        text, reader = self._text, self._reader
        for index, token in enumerate(step.tokens):
            self._ids.append(token)
            if token in self._job.request.end_tokens:
                return
            offset = text.num_decoded
            self._said += reader.push(text.push(token))
            if reader.is_reasoning:
                self._num_reasoning = len(self._ids)
            if step.logprobs:
                self._tokens.push(AnswerToken(token, offset, step.logprobs[index]))
            if self.is_over:
                return

    def part(self, step: Committed) -> AnswerPart | None:
        return self._part(step, None) if self._said or self._job.wants_token_ids else None

    def last_part(self, step: Committed) -> AnswerPart:
        self._said += self._reader.push(self._text.flush())
        self._said += self._reader.flush()
        finish: FinishReason | None = "stop" if self.is_over else step.finish
        if self._reader.has_calls and finish == "stop":
            finish = "tool_calls"
        return self._part(step, finish)

    def _part(self, step: Committed, finish: FinishReason | None) -> AnswerPart:
        said, self._said = joined(self._said), []
        new = tuple(self._ids[self._num_passed :])
        self._num_passed = len(self._ids)
        return AnswerPart(
            tuple(said), finish, len(self._ids), step.stats, self._tokens.settle(), new, self._num_reasoning
        )


def _log(job: Job, last: AnswerPart) -> None:
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
