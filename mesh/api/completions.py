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
from mesh.api.event_stream import while_connected
from mesh.api.generation_job import GenerationJob, encode_prediction, make_job, several
from mesh.api.on_demand import answered
from mesh.api.openai_format import OpenAiAnswer, completion_logprobs, respond_in
from mesh.api.openapi import TextCompletion, answers, takes
from mesh.api.protocol import CompletionBody
from mesh.api.tokenization import require_ids
from mesh.text.message_parts import Content
from mesh.text.text_encoder import refuse_too_long_text
from mesh.text.text_service import TextRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.api.answering import AnswerToken, FinishReason
    from mesh.api.backend import Backend
    from mesh.text.message_parts import MessagePart
    from mesh.text.tokenizer import Tokenizer

router = APIRouter()
# OpenAI's default for this endpoint.
DEFAULT_MAX_TOKENS: Final = 16


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


@router.post(
    "/v1/completions",
    response_model=None,
    responses=answers(TextCompletion, 403, 404, 413, streamed_as=OpenAiAnswer.form.media_type),
    openapi_extra=takes(CompletionBody),
)
async def completions(request: Request) -> Response:
    """Continue one or more texts as they stand, without a chat template."""
    body = await body_of(request, CompletionBody)
    client = client_of(request.scope)

    async def answer(backend: Backend) -> Response:
        jobs = await while_connected(request, _jobs(backend, body, client))
        jobs = several(jobs, body.num_choices)
        return await respond_in(request, backend, body, CompletionFormat(backend.tokenizer), jobs)

    return await answered(request, body.model, answer, form=OpenAiAnswer.form if body.stream else None)


async def _jobs(backend: Backend, body: CompletionBody, client: str | None) -> list[GenerationJob]:
    most_tokens = backend.engine.context_length
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    for text in texts:
        refuse_too_long_text(backend.tokenizer, len(text), most_tokens, param="prompt", what="the prompt")
    adds_special = body.add_special_tokens is not False
    wanted = [TextRequest(text, "prompt", add_special=adds_special) for text in texts]
    of_texts = iter(await backend.texts.ids(wanted, most_tokens=most_tokens, client=client) if wanted else ())
    prediction = await encode_prediction(backend, body.prediction, client)
    jobs = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            tokens, echo = next(of_texts), prompt
        else:
            tokens, echo = list(prompt), ""
            require_ids(backend.tokenizer, tokens, param="prompt")
            if body.echo:
                echo = await backend.texts.text(tokens, client=client)
        jobs.append(
            await asyncio.to_thread(
                make_job,
                backend,
                body,
                tokens,
                prompt_param="prompt",
                client=client,
                prediction=prediction,
                default_max_tokens=DEFAULT_MAX_TOKENS,
                echo=echo if body.echo else "",
            )
        )
    return jobs
