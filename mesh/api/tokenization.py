"""Endpoints /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter
from pydantic import BeforeValidator, FailFast, Field
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations
from starlette.responses import Response

from mesh.api.auth import client_of
from mesh.api.backend import backends_of, body_of
from mesh.api.chat_prompt import conversation_of, render_prompt, shown_ids
from mesh.api.errors import json_response
from mesh.api.event_stream import while_connected
from mesh.api.message_bodies import (
    MAX_MESSAGES,
    ConversationBody,
    Message,
    refuse_too_many_messages,
)
from mesh.api.on_demand import answered
from mesh.api.openapi import Detokenized, Tokenized, TokenizerFacts, answers, takes
from mesh.api.request_parsing import AS_WHOLE, StrictBody
from mesh.text.text_encoder import refuse_too_long_text
from mesh.text.text_service import TextRequest
from spanmesh_proto.errors import InvalidRequest
from spanmesh_proto.row_ids import stray_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.api.backend import Backend
    from mesh.text.tokenizer import Tokenizer
router = APIRouter()


class TokenizeBody(ConversationBody):
    """`POST /tokenize`: a text, or a conversation as `/v1/chat/completions` would put it to the model."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[
        list[Message],
        FailFast(),
        Field(min_length=1, json_schema_extra={"maxItems": MAX_MESSAGES}),
        BeforeValidator(refuse_too_many_messages),
    ] = Field(default_factory=list)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(StrictBody):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0), AS_WHOLE]]


@router.post(
    "/tokenize",
    response_model=None,
    responses=answers(Tokenized, 403, 404, 413),
    openapi_extra=takes(TokenizeBody),
)
async def tokenize(request: Request) -> Response:
    """Token ids of a text or a conversation."""
    body = await body_of(request, TokenizeBody)
    if (body.prompt is None) == (not body.messages):
        raise InvalidRequest("send either prompt or messages", param="prompt")

    async def answer(backend: Backend) -> Response:
        client = client_of(request.scope)

        async def list_tokens() -> bytes:
            return await backend.texts.listing(
                await _tokens(backend, body, client),
                context_length=backend.engine.context_length,
                has_names=bool(body.return_token_strs),
                client=client,
            )

        return Response(await while_connected(request, list_tokens()), media_type="application/json")

    return await answered(request, body.model, answer, needs_engine=False)


@router.post(
    "/detokenize",
    response_model=None,
    responses=answers(Detokenized, 403, 404, 413),
    openapi_extra=takes(DetokenizeBody),
)
async def detokenize(request: Request) -> Response:
    """The text that token ids stand for; control tokens have none."""
    body = await body_of(request, DetokenizeBody)

    async def answer(backend: Backend) -> Response:
        require_ids(backend.tokenizer, body.tokens, param="tokens")
        work = backend.texts.text(body.tokens, client=client_of(request.scope))
        return json_response({"prompt": await while_connected(request, work)})

    return await answered(request, body.model, answer, needs_engine=False)


@router.get("/tokenizer_info", response_model=None, responses=answers(TokenizerFacts))
async def tokenizer_info(request: Request) -> Response:
    """Special tokens and chat template of the first model: evaluation harnesses tokenize with them here."""
    backend = backends_of(request).named(None)
    tokenizer = backend.tokenizer
    return json_response(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "bos_token": tokenizer.bos or None,
            "eos_token": tokenizer.eos or None,
            "add_bos_token": tokenizer.adds_bos,
            "chat_template": tokenizer.chat_template,
            "model_max_length": backend.engine.context_length,
        }
    )


def require_ids(tokenizer: Tokenizer, tokens: Sequence[int], *, param: str) -> None:
    """Check that the vocabulary has these token ids.

    Raises:
        InvalidRequest: Naming the first missing one.
    """
    n_vocab = tokenizer.n_vocab
    wrong = stray_id(tokens, n_vocab)
    if wrong is not None:
        raise InvalidRequest(
            f"{param} holds the token id {wrong}: this model's ids go from 0 to {n_vocab - 1}", param=param
        )


async def _tokens(backend: Backend, body: TokenizeBody, client: str | None) -> Sequence[int]:
    if body.messages:
        conversation = await asyncio.to_thread(conversation_of, body)
        return shown_ids((await render_prompt(backend, conversation, client)).tokens)
    most_tokens = backend.engine.context_length
    prompt = body.prompt or ""
    refuse_too_long_text(backend.tokenizer, len(prompt), most_tokens, param="prompt", what="the prompt")
    text = TextRequest(prompt, "prompt", add_special=body.add_special_tokens is not False)
    (tokens,) = await backend.texts.ids([text], most_tokens=most_tokens, client=client)
    return tokens
