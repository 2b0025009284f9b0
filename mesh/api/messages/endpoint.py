"""Endpoints /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations
from starlette.responses import Response  # noqa: TC002

from mesh.api.answering import respond
from mesh.api.auth import client_of
from mesh.api.backend import body_of
from mesh.api.chat_prompt import Conversation, render_prompt
from mesh.api.errors import json_response
from mesh.api.event_stream import while_connected
from mesh.api.generation_job import make_chat_job
from mesh.api.messages.events import MessagesAnswer
from mesh.api.messages.protocol import CountBody, MessagesBody, messages_of
from mesh.api.on_demand import answered
from mesh.api.openapi import MessageAnswer, TokenCount, answers, takes
from mesh.api.protocol import JsonSchemaBody, ResponseFormatBody
from mesh.api.structured_output import tool_use_of
from mesh.text.chat_template import Ending

if TYPE_CHECKING:
    from mesh.api.answering import Choices
    from mesh.api.backend import Backend
    from mesh.api.generation_job import GenerationJob
    from mesh.api.messages.protocol import ConversationParams

router = APIRouter()


@router.post(
    "/v1/messages",
    response_model=None,
    responses=answers(MessageAnswer, 403, 404, 413, streamed_as=MessagesAnswer.form.media_type),
    openapi_extra=takes(MessagesBody),
)
async def create_message(request: Request) -> Response:
    """Continue a conversation."""
    body = await body_of(request, MessagesBody)

    async def answer(backend: Backend) -> Response:
        job = await while_connected(request, _job(backend, body, client_of(request.scope)))

        def make(choices: Choices) -> MessagesAnswer:
            return MessagesAnswer(choices, body)

        return await respond(request, backend, [job], make, is_streamed=bool(body.stream))

    return await answered(request, body.model, answer, form=MessagesAnswer.form if body.stream else None)


@router.post(
    "/v1/messages/count_tokens",
    response_model=None,
    responses=answers(TokenCount, 403, 404, 413),
    openapi_extra=takes(CountBody),
)
async def count_tokens(request: Request) -> Response:
    """Number of tokens of a conversation, tools included."""
    body = await body_of(request, CountBody)

    async def answer(backend: Backend) -> Response:
        conversation = await asyncio.to_thread(_conversation, body)
        work = render_prompt(backend, conversation, client_of(request.scope))
        prompt = await while_connected(request, work)
        return json_response({"input_tokens": len(prompt.tokens)})

    return await answered(request, body.model, answer, needs_engine=False)


def _conversation(body: ConversationParams) -> Conversation:
    messages = messages_of(body.messages, body.system)
    last = messages[-1]
    continues = last["role"] == "assistant" and "tool_calls" not in last and bool(last["content"])
    return Conversation(
        messages=messages,
        tools=tool_use_of(
            body.functions, body.choice, is_parallel=body.is_parallel, name_param="tools[{}].name"
        ),
        variables=body.chat_template_kwargs or {},
        reasoning=body.reasoning_wish,
        effort_param=None if body.effort is None else "output_config.effort",
        budget_param=body.budget_field,
        ending=Ending.CONTINUED if continues else Ending.ANSWER,
    )


async def _job(backend: Backend, body: MessagesBody, client: str | None) -> GenerationJob:
    # In a thread, since a conversation of thousands of messages takes a while.
    prompt = await render_prompt(backend, await asyncio.to_thread(_conversation, body), client)
    return await make_chat_job(backend, _as_chat_body(body), prompt, param="messages", client=client)


def _as_chat_body(body: MessagesBody) -> MessagesBody:
    """The body with `stop` and `response_format` in place of Anthropic's names."""
    changes: dict[str, object] = {}
    if body.stop_sequences:
        changes["stop"] = body.stop_sequences
    wanted = body.schema_format
    if wanted is not None:
        schema = JsonSchemaBody.model_validate({"schema": wanted.schema_})
        changes["response_format"] = ResponseFormatBody(type="json_schema", json_schema=schema)
    return body.model_copy(update=changes) if changes else body
