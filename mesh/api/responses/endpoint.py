"""Endpoint /v1/responses."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations
from starlette.responses import Response  # noqa: TC002

from mesh.api.auth import client_of
from mesh.api.backend import backend_of, backends_of, body_of
from mesh.api.chat_prompt import Conversation, render_prompt, thinking_variables
from mesh.api.errors import json_response
from mesh.api.generation_job import make_job
from mesh.api.openapi import Deleted, ResponseAnswer, answers, takes
from mesh.api.protocol import JsonSchemaBody, ResponseFormatBody
from mesh.api.responses.events import Turn, respond
from mesh.api.responses.protocol import ResponsesBody, messages_of
from mesh.api.structured_output import tool_use_of
from spanmesh_proto.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh.api.backend import Backend


_WORDS: Final = (("response_format.json_schema", "text.format"), ("response_format", "text.format"))


def as_chat_body(body: ResponsesBody) -> ResponsesBody:
    """The body with `response_format` in place of `text.format`.

    Raises:
        InvalidRequest: If it has both.
    """
    wanted = None if body.text is None else body.text.format
    if wanted is None or wanted.type == "text":
        return body
    if body.response_format is not None:
        raise InvalidRequest(
            "text.format and response_format are the same: send one of them", param="text.format"
        )
    schema = None
    if wanted.type == "json_schema":
        given = {"schema": wanted.schema_} if "schema_" in wanted.model_fields_set else {}
        schema = JsonSchemaBody.model_validate({"name": wanted.name, **given})
    as_chat = ResponseFormatBody(type=wanted.type, json_schema=schema)
    return body.model_copy(update={"response_format": as_chat})


def as_responses_error(error: InvalidRequest) -> InvalidRequest:
    """An error about `response_format` as one about `text.format`."""
    message, param = error.message, error.param
    for theirs, ours in _WORDS:
        message = message.replace(theirs, ours)
        param = None if param is None else param.replace(theirs, ours)
    return InvalidRequest(message, param=param)


router = APIRouter()


@router.post(
    "/v1/responses",
    response_model=None,
    responses=answers(ResponseAnswer, 404, 413, is_streamed=True),
    openapi_extra=takes(ResponsesBody),
)
async def create_response(request: Request) -> Response:
    """Continue a conversation, given as items or by the id of an answer that is kept."""
    backends = backends_of(request)
    body = await body_of(request, ResponsesBody)
    backend = backends.ready(body.model)
    turn = await asyncio.to_thread(_turn, backend, body, client_of(request.scope))
    return await respond(request, backend, body, turn)


@router.get("/v1/responses/{response_id}", response_model=None, responses=answers(ResponseAnswer, 404))
async def get_response(request: Request, response_id: str) -> Response:
    """One that is kept: of this API key's latest, unless it was sent with `store: false`."""
    stored = backend_of(request).api.responses.get(client_of(request.scope), response_id)
    if stored is None:
        raise _unknown(response_id)
    return json_response(stored.response)


@router.delete("/v1/responses/{response_id}", response_model=None, responses=answers(Deleted, 404))
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget one that is kept."""
    if not backend_of(request).api.responses.remove(client_of(request.scope), response_id):
        raise _unknown(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _turn(backend: Backend, body: ResponsesBody, client: str | None) -> Turn:
    messages: list[Mapping[str, Any]] = []
    if body.previous_response_id is not None:
        stored = backend.api.responses.get(client, body.previous_response_id)
        if stored is None:
            raise InvalidRequest(
                f"the response {body.previous_response_id!r} is not stored here, or no longer: send the"
                " whole conversation as input",
                param="previous_response_id",
            )
        messages += stored.messages
    messages += messages_of(body.input)
    effort = None if body.reasoning is None else body.reasoning.effort
    conversation = Conversation(
        messages=_instructed(messages, body.instructions),
        tools=tool_use_of(
            body.tools or (),
            body.tool_choice,
            is_parallel=body.parallel_tool_calls,
            name_param="tools[{}].name",
        ),
        variables={**thinking_variables(effort), **(body.chat_template_kwargs or {})},
        param="input",
    )
    prompt = render_prompt(backend, conversation)
    try:
        job = make_job(
            backend, as_chat_body(body), prompt.tokens, prompt_param="input", client=client, chat=prompt
        )
    except InvalidRequest as error:
        raise as_responses_error(error) from None
    return Turn(messages, job)


def _instructed(messages: Sequence[Mapping[str, Any]], instructions: str | None) -> list[Mapping[str, Any]]:
    """The conversation with all leading instructions in one system message, as many templates need."""
    texts = [] if instructions is None else [instructions]
    num_system = 0
    while num_system < len(messages) and messages[num_system]["role"] == "system":
        texts.append(messages[num_system]["content"])
        num_system += 1
    system = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    return [*system, *messages[num_system:]]


def _unknown(response_id: str) -> NotFound:
    return NotFound(
        f"the response {response_id!r} is not stored here, or no longer: each API key's latest are, until"
        " the server is started again",
        param="response_id",
    )
