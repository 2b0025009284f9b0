"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations
from starlette.responses import Response  # noqa: TC002

from mesh.api.answer_schemas import ChatCompletion
from mesh.api.auth import key_name_of
from mesh.api.backend import Backend, backend_of
from mesh.api.body import read_body
from mesh.api.document import answers, takes
from mesh.api.hopeless_length import refuse_hopeless_length
from mesh.api.job import make_job
from mesh.api.logprobs import chat_logprobs
from mesh.api.respond import respond
from mesh.api.schemas import ChatBody
from mesh.chat_template import encode_prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.api.answer import FinishReason
    from mesh.api.answer_tokens import AnswerToken
    from mesh.api.job import Job
    from mesh.tokenizer import Tokenizer

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    response_model=None,
    responses=answers(ChatCompletion, 404, 413, is_streamed=True),
    openapi_extra=takes(ChatBody),
)
async def chat_completions(request: Request) -> Response:
    """Continue a conversation."""
    backend = backend_of(request)
    body = await read_body(
        request, ChatBody, backend.unknown_fields, context_length=backend.engine.context_length
    )
    backend.require_ready()
    backend.require_model(body.model)
    # A long conversation takes a while, during which other answers must go on.
    job = await asyncio.to_thread(_job, backend, body, key_name_of(request.scope))
    return await respond(request, backend, body, ChatShape(backend.tokenizer), [job])


def _job(backend: Backend, body: ChatBody, key_name: str | None) -> Job:
    messages = [message.for_template() for message in body.messages]
    rendered = backend.chat_template.render(messages, body.chat_template_kwargs)
    refuse_hopeless_length(
        backend.tokenizer,
        len(rendered),
        backend.engine.context_length,
        param="messages",
        what="the prompt",
    )
    prompt = encode_prompt(backend.tokenizer, rendered)
    return make_job(backend, body, prompt, prompt_param="messages", client=key_name)


class ChatShape:
    """Choices with messages, and deltas of them."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    has_prompt_ids_in_choices = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        """What is known of some tokens."""
        return chat_logprobs(tokens, self._tokenizer)

    def choice(
        self, index: int, text: str, finish: FinishReason, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        """A whole message."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def opening(self, index: int) -> str:
        """The role goes first."""
        return self._chunk(index, '{"role":"assistant","content":""}')

    def delta(self, index: int, text_json: str, logprobs_json: str) -> str:
        """More content."""
        return self._chunk(index, f'{{"content":{text_json}}}', logprobs=logprobs_json)

    def closing(self, index: int, finish: FinishReason) -> str:
        """Nothing more."""
        return self._chunk(index, "{}", finish=json.dumps(finish))

    def _chunk(self, index: int, delta: str, *, logprobs: str = "null", finish: str = "null") -> str:
        return f'{{"index":{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{finish}}}'
