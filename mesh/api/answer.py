"""Committed tokens to the parts of an answer that clients see."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import structlog

from mesh.api.answer_tokens import AnswerToken, AnswerTokens
from mesh.text import AnswerText
from spanmesh_proto.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from mesh.api.job import Job
    from mesh.engine import Engine, GenerationStats

log = structlog.get_logger()

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class AnswerPart:
    """Text that became final together, and the tokens committed meanwhile.

    Attributes:
        text: May be empty.
        finish: Why the answer is over, on its last part.
        num_tokens: Tokens of the answer up to here, an end token and those of a stop string included.
        stats: The engine's counts and times up to here.
        tokens: Tokens of the text, if the request asked for logprobs.
        token_ids: All that `num_tokens` counts and the parts before did not have.
    """

    text: str
    finish: FinishReason | None
    num_tokens: int
    stats: GenerationStats
    tokens: tuple[AnswerToken, ...] = ()
    token_ids: tuple[int, ...] = ()


async def answer_parts(
    engine: Engine, piece: Callable[[int], bytes], job: Job
) -> AsyncGenerator[AnswerPart, None]:
    """Run a job. The engine's session is over before the last part is passed on.

    A step that settles no text makes no part of its own, unless the job wants token ids.

    Args:
        engine: Makes the tokens.
        piece: Bytes that a token stands for.
        job: What to do.

    Raises:
        MeshError: Whatever the engine raises.
    """
    text = AnswerText(piece, job.stops)
    tokens = AnswerTokens(text)
    ids: list[int] = []
    num_passed = 0
    last: AnswerPart | None = None
    async with aclosing(engine.generate(job.request)) as steps:
        async for step in steps:
            settled = ""
            for index, token in enumerate(step.tokens):
                ids.append(token)
                if token in job.request.end_tokens:
                    break
                offset = text.num_decoded
                settled += text.push(token)
                if step.logprobs:
                    tokens.push(AnswerToken(token, offset, step.logprobs[index]))
                if text.stopped:
                    break
            if text.stopped or step.finish is not None:
                settled += text.flush()
                finish = "stop" if text.stopped else step.finish
                new = tuple(ids[num_passed:])
                last = AnswerPart(settled, finish, len(ids), step.stats, tokens.settle(), new)
                break
            if settled or job.wants_token_ids:
                new = tuple(ids[num_passed:])
                num_passed = len(ids)
                yield AnswerPart(settled, None, len(ids), step.stats, tokens.settle(), new)
    if last is None:
        raise StageFailed("the engine ended the answer without a reason: look at the log of the stages")
    _log(job, last)
    yield last


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
