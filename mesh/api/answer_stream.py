"""Answer stream: committed tokens as parts of an answer."""

from __future__ import annotations

from collections import deque
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import structlog

from mesh.text.detokenizer import AnswerText
from mesh.text.message_parts import joined
from mesh.text.output_parser import OutputParser
from spanmesh_proto.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Sequence

    from mesh.api.generation_job import GenerationJob
    from mesh.engine import Committed, Engine, GenerationStats
    from mesh.text.message_parts import MessagePart
    from mesh.text.tokenizer import Tokenizer
    from stages.sampling.sampler import TokenLogprobs

    PieceWith = Callable[[Collection[str]], Callable[[int], bytes]]

log = structlog.get_logger()

FinishReason = Literal["stop", "length", "tool_calls"]


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
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """On the first part, log probabilities of the prompt's tokens but the first, if the request asked for
    them."""


class _Answer:
    """State of one answer."""

    def __init__(self, piece_with: PieceWith, job: GenerationJob) -> None:
        self._job = job
        self._text = AnswerText(piece_with(job.output_format.marks), job.stops)
        self._tokens = AnswerTokens(self._text)
        self._reader = OutputParser(job.output_format)
        self._message_parts: list[MessagePart] = []
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
            self._message_parts += reader.push(text.push(token))
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
        if self._reader.has_calls and finish == "stop":
            finish = "tool_calls"
        return self._part(step, finish)

    def _part(self, step: Committed, finish: FinishReason | None) -> AnswerPart:
        message_parts, self._message_parts = joined(self._message_parts), []
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
            prompt_logprobs,
        )


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
