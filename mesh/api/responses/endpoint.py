"""Endpoint /v1/responses."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations
from starlette.responses import Response  # noqa: TC002

from mesh.api.answering import respond
from mesh.api.auth import client_of
from mesh.api.backend import backend_of, body_of
from mesh.api.chat_prompt import ChatPrompt, Conversation, render_prompt
from mesh.api.errors import json_response, written_response
from mesh.api.event_stream import while_connected
from mesh.api.generation_job import make_chat_job
from mesh.api.on_demand import answered
from mesh.api.openapi import Deleted, InputItems, ResponseAnswer, TokenCount, answers, takes
from mesh.api.responses.events import ResponsesAnswer, Turn, as_responses_error, repeated_fields
from mesh.api.responses.protocol import ResponsesBody, input_items_of, messages_of, with_stored_items
from mesh.api.structured_output import tool_use_of
from spanmesh_proto.errors import ContextLengthExceeded, InvalidRequest, NotFound

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh.api.answering import Choices
    from mesh.api.backend import Backend

# Tokens left for an answer without a limit of its own, when old turns are dropped.
_ANSWER_ROOM: Final = 1024
router = APIRouter()
_DEFAULT_LIMIT: Final = 20
_MOST_LIMIT: Final = 100


@router.post(
    "/v1/responses",
    response_model=None,
    responses=answers(ResponseAnswer, 403, 404, 413, streamed_as=ResponsesAnswer.form.media_type),
    openapi_extra=takes(ResponsesBody),
)
async def create_response(request: Request) -> Response:
    """Continue a conversation, given as items or by the id of an answer that is kept."""
    body = await body_of(request, ResponsesBody)

    async def answer(backend: Backend) -> Response:
        client = client_of(request.scope)
        work = _turn(backend, _with_items(backend, body, client), client)
        turn = await while_connected(request, work)

        def make(choices: Choices) -> ResponsesAnswer:
            return ResponsesAnswer(choices, body, turn)

        return await respond(request, backend, [turn.job], make, is_streamed=bool(body.stream))

    return await answered(request, body.model, answer, form=ResponsesAnswer.form if body.stream else None)


@router.get("/v1/responses/{response_id}", response_model=None, responses=answers(ResponseAnswer, 404))
async def get_response(request: Request, response_id: str) -> Response:
    """One that is kept: of this API key's latest, unless it was sent with `store: false`."""
    stored = backend_of(request).api.responses.get(client_of(request.scope), response_id)
    if stored is None:
        raise _unknown(response_id)
    return await written_response(stored.response)


@router.get(
    "/v1/responses/{response_id}/input_items", response_model=None, responses=answers(InputItems, 404)
)
async def list_input_items(request: Request, response_id: str) -> Response:
    """Items that a kept response was made from, the latest first unless `order` is `asc`."""
    stored = backend_of(request).api.responses.get(client_of(request.scope), response_id)
    if stored is None:
        raise _unknown(response_id)
    return await written_response(_page(stored.input_items, request.query_params))


@router.post(
    "/v1/responses/input_tokens",
    response_model=None,
    responses=answers(TokenCount, 403, 404, 413),
    openapi_extra=takes(ResponsesBody),
)
async def count_input_tokens(request: Request) -> Response:
    """Number of tokens of the prompt that a request would have."""
    body = await body_of(request, ResponsesBody)
    client = client_of(request.scope)

    async def answer(backend: Backend) -> Response:
        whole = _with_items(backend, body, client)
        messages = await asyncio.to_thread(_messages, backend, whole, client)
        work = _prompt(backend, whole, messages, client)
        prompt = await while_connected(request, work)
        return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})

    return await answered(request, body.model, answer, needs_engine=False)


@router.delete("/v1/responses/{response_id}", response_model=None, responses=answers(Deleted, 404))
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget one that is kept."""
    if not backend_of(request).api.responses.remove(client_of(request.scope), response_id):
        raise _unknown(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _page(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Part of a list by OpenAI's `limit`, `order` and `after`."""
    limit, order, after = (
        query.get("limit", str(_DEFAULT_LIMIT)),
        query.get("order", "desc"),
        query.get("after"),
    )
    is_number = limit.isascii() and limit.isdecimal() and len(limit) <= len(str(_MOST_LIMIT))
    if not is_number or not 1 <= int(limit) <= _MOST_LIMIT:
        raise InvalidRequest(f"limit must be a number from 1 to {_MOST_LIMIT}", param="limit")
    if order not in {"asc", "desc"}:
        raise InvalidRequest("order must be asc or desc", param="order")
    found = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        place = next((index for index, item in enumerate(found) if item["id"] == after), None)
        if place is None:
            raise InvalidRequest(f"after names {after!r}, which is none of the items", param="after")
        found = found[place + 1 :]
    shown = found[: int(limit)]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    return {"object": "list", "data": shown, "has_more": len(found) > len(shown), **ends}


def _with_items(backend: Backend, body: ResponsesBody, client: str | None) -> ResponsesBody:
    """The body without references to items; in the event loop, which changes what is stored."""
    found = with_stored_items(body.input, backend.api.responses, client)
    return body if found is body.input else body.model_copy(update={"input": found})


def _messages(backend: Backend, body: ResponsesBody, client: str | None) -> list[Mapping[str, Any]]:
    """The conversation, without the request's instructions."""
    messages: list[Mapping[str, Any]] = []
    if body.previous_response_id:
        stored = backend.api.responses.get(client, body.previous_response_id)
        if stored is None:
            raise InvalidRequest(
                f"the response {body.previous_response_id!r} is not stored here, or no longer: send the"
                " whole conversation as input",
                param="previous_response_id",
            )
        messages += stored.messages
    return [*messages, *messages_of(body.input)]


async def _prompt(
    backend: Backend, body: ResponsesBody, messages: Sequence[Mapping[str, Any]], client: str | None
) -> ChatPrompt:
    """The prompt; without the conversation's oldest parts if it does not fit, and `truncation` is `auto`."""
    if body.truncation != "auto":
        return await render_prompt(backend, _conversation(body, messages), client)
    num_system = _num_system(messages)
    system, rest = messages[:num_system], messages[num_system:]
    cuts = _cuts(rest)
    context_length = backend.engine.context_length
    room = min(body.token_limit or _ANSWER_ROOM, context_length // 4)

    async def cut(place: int) -> ChatPrompt:
        first, resumed = cuts[place]
        kept = [*rest[first : first + 1], *rest[resumed:]]
        return await render_prompt(backend, _conversation(body, [*system, *kept]), client)

    async def fits(place: int) -> bool:
        try:
            return len((await cut(place)).tokens) + room <= context_length
        except ContextLengthExceeded:
            return False

    # By bisection the first that fits. The shortest is sent in any case: the error then names its length.
    low, high = 0, len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if await fits(middle) else (middle + 1, high)
    return await cut(low)


def _cuts(messages: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Ways to shorten a conversation, each shorter than the one before it; the first leaves out nothing.

    Whole turns are left out first, each of which begins with what the user says; then of the last turn the
    oldest calls, with their results.

    Args:
        messages: The conversation without instructions.

    Returns:
        Of each way the message that it begins with, and the one that it goes on with.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "user"]
    last = turns[-1] if turns else -1
    rounds = [index for index in range(last + 1, len(messages)) if messages[index]["role"] == "assistant"]
    whole_turns = [(index, index + 1) for index in turns if index]
    if turns:
        return [(0, 1), *whole_turns, *((last, index) for index in rounds[1:])]
    return [(0, 1), *((index, index + 1) for index in rounds[1:])]


def _conversation(body: ResponsesBody, messages: Sequence[Mapping[str, Any]]) -> Conversation:
    effort = None if body.reasoning is None else body.reasoning.effort
    return Conversation(
        messages=_instructed(messages, body.instructions),
        tools=tool_use_of(
            body.functions,
            body.tool_choice,
            is_parallel=body.parallel_tool_calls,
            # The place of a function among all is no place in the request where some are in a namespace.
            name_param="tools" if body.namespaced else "tools[{}].name",
        ),
        variables=body.chat_template_kwargs or {},
        reasoning=body.wish(effort=effort),
        effort_param=None if effort is None else "reasoning.effort",
        budget_param=body.budget_field,
        param="input",
    )


async def _turn(backend: Backend, body: ResponsesBody, client: str | None) -> Turn:
    former = backend.api.responses.get(client, body.previous_response_id or "")
    if former is not None and not former.may_record and body.record is None:
        # Its texts would be recorded as a part of this prompt.
        body = body.model_copy(update={"record": False})
    # In a thread, since a conversation of thousands of items takes a while.
    messages = await asyncio.to_thread(_messages, backend, body, client)
    prompt = await _prompt(backend, body, messages, client)
    try:
        job = await make_chat_job(backend, body.as_chat(), prompt, param="input", client=client)
    except InvalidRequest as error:
        raise as_responses_error(error) from None
    repeated = await asyncio.to_thread(repeated_fields, body)
    return Turn(messages, job, await asyncio.to_thread(input_items_of, body.input), repeated)


def _instructed(messages: Sequence[Mapping[str, Any]], instructions: str | None) -> list[Mapping[str, Any]]:
    """The conversation with all leading instructions in one system message, as many templates need."""
    texts = [instructions] if instructions else []
    num_system = _num_system(messages)
    texts += [message["content"] for message in messages[:num_system]]
    system = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    return [*system, *messages[num_system:]]


def _num_system(messages: Sequence[Mapping[str, Any]]) -> int:
    """Number of leading messages with instructions."""
    others = (index for index, message in enumerate(messages) if message["role"] != "system")
    return next(others, len(messages))


def _unknown(response_id: str) -> NotFound:
    return NotFound(
        f"the response {response_id!r} is not stored here, or no longer: each API key's latest are, until"
        " the server is started again",
        param="response_id",
    )
