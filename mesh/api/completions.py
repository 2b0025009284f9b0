"""Endpoint /v1/completions."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations
from starlette.responses import Response  # noqa: TC002

from mesh.api.auth import client_of
from mesh.api.backend import body_of
from mesh.api.chat_prompt import refuse_too_long_text
from mesh.api.generation_job import GenerationJob, make_job, several
from mesh.api.on_demand.answers import answered
from mesh.api.openai_format import completion_logprobs
from mesh.api.openapi import TextCompletion, answers, takes
from mesh.api.protocol import CompletionBody, Prompt
from mesh.api.streaming import respond
from mesh.api.tokenization import require_ids, text_of
from mesh.text.message_parts import Content

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.api.answer_stream import AnswerToken, FinishReason
    from mesh.api.backend import Backend
    from mesh.text.message_parts import MessagePart
    from mesh.text.tokenizer import Tokenizer

router = APIRouter()

# OpenAI's default for this endpoint.
DEFAULT_MAX_TOKENS: Final = 16


@router.post(
    "/v1/completions",
    response_model=None,
    responses=answers(TextCompletion, 403, 404, 413, is_streamed=True),
    openapi_extra=takes(CompletionBody),
)
async def completions(request: Request) -> Response:
    """Continue one or more texts as they stand, without a chat template."""
    body = await body_of(request, CompletionBody)
    client = client_of(request.scope)

    async def answer(backend: Backend) -> Response:
        jobs = [await asyncio.to_thread(_job, backend, body, prompt, client) for prompt in body.prompt]
        jobs = several(jobs, body.num_choices)
        return await respond(request, backend, body, CompletionFormat(backend.tokenizer), jobs)

    return await answered(request, body.model, answer, is_streamed=bool(body.stream))


def _job(backend: Backend, body: CompletionBody, prompt: Prompt, client: str | None) -> GenerationJob:
    tokenizer = backend.tokenizer
    if isinstance(prompt, str):
        refuse_too_long_text(
            tokenizer, len(prompt), backend.engine.context_length, param="prompt", what="the prompt"
        )
        tokens = tokenizer.encode(prompt, add_special=True, parse_special=True)
        echo = prompt
    else:
        tokens = list(prompt)
        require_ids(tokenizer, tokens, param="prompt")
        echo = text_of(backend, tokens) if body.echo else ""
    return make_job(
        backend,
        body,
        tokens,
        prompt_param="prompt",
        client=client,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        echo=echo if body.echo else "",
    )


class CompletionFormat:
    """Choices of /v1/completions: text."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    has_prompt_ids_in_choices = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        """Log probabilities of some tokens."""
        return completion_logprobs(tokens, self._tokenizer)

    def choice(
        self,
        index: int,
        message_parts: Sequence[MessagePart],
        finish: FinishReason,
        logprobs: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """A choice with the whole text."""
        text = "".join(piece.text for piece in message_parts if isinstance(piece, Content))
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def opening(self, _index: int) -> str:
        """Empty: text begins at once."""
        return ""

    def delta(self, index: int, piece: MessagePart, logprobs_json: str) -> str:
        """Chunk with more text."""
        text = piece.text if isinstance(piece, Content) else ""
        return self._chunk(index, json.dumps(text, ensure_ascii=False), logprobs=logprobs_json)

    def closing(self, index: int, finish: FinishReason) -> str:
        """Last chunk, with the finish reason."""
        return self._chunk(index, '""', finish=json.dumps(finish))

    def _chunk(self, index: int, text: str, *, logprobs: str = "null", finish: str = "null") -> str:
        return f'{{"index":{index},"text":{text},"logprobs":{logprobs},"finish_reason":{finish}}}'
