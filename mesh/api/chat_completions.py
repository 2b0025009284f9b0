"""Endpoint /v1/chat/completions."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations
from starlette.responses import Response  # noqa: TC002

from mesh.api.auth import client_of
from mesh.api.backend import body_of
from mesh.api.errors import json_response
from mesh.api.event_stream import while_connected
from mesh.api.generation_job import (
    Conversation,
    ending_of,
    make_chat_job,
    render_prompt,
    several,
)
from mesh.api.on_demand import answered
from mesh.api.openai_format import CallIds, OpenAiAnswer, chat_logprobs, respond_in
from mesh.api.openapi import ChatCompletion, TokenCount, answers, takes
from mesh.api.protocol import ChatBody, ConversationBody
from mesh.api.structured_output import tool_use_of
from mesh.text.message_parts import Content, Reasoning, ToolCallArguments, ToolCallStart, calls_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.api.answering import AnswerToken, FinishReason
    from mesh.api.backend import Backend
    from mesh.api.generation_job import GenerationJob
    from mesh.text.message_parts import MessagePart

_CALL: Final = ("name", "arguments")
router = APIRouter()


class ChatFormat:
    """Choices of /v1/chat/completions: messages, and deltas of them."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    has_prompt_ids_in_choices = False

    def __init__(self, backend: Backend) -> None:
        self._tokenizer = backend.tokenizer
        self._new_call_id = CallIds(backend.api.random_bits, is_short=backend.has_short_call_ids)

    def logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        """Log probabilities of some tokens."""
        return chat_logprobs(tokens, self._tokenizer)

    def choice(
        self,
        index: int,
        message_parts: Sequence[MessagePart],
        finish: FinishReason,
        logprobs: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """A choice with the whole message."""
        content = "".join(piece.text for piece in message_parts if isinstance(piece, Content))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning := "".join(piece.text for piece in message_parts if isinstance(piece, Reasoning)):
            message["reasoning_content"] = reasoning
        if calls := calls_of(message_parts):
            message["content"] = content or None
            message["tool_calls"] = [
                {
                    "id": self._new_call_id(),
                    "type": "function",
                    "function": dict(zip(_CALL, call, strict=True)),
                }
                for call in calls
            ]
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def opening(self, index: int) -> str:
        """First chunk, with the role."""
        return self._chunk(index, '{"role":"assistant","content":""}')

    def delta(self, index: int, piece: MessagePart, logprobs_json: str) -> str:
        """Chunk with more of the message."""
        match piece:
            case Content():
                delta = f'{{"content":{_json(piece.text)}}}'
            case Reasoning():
                delta = f'{{"reasoning_content":{_json(piece.text)}}}'
            case ToolCallStart():
                function = f'{{"name":{_json(piece.name)},"arguments":""}}'
                head = f'"index":{piece.index},"id":"{self._new_call_id()}","type":"function"'
                delta = f'{{"tool_calls":[{{{head},"function":{function}}}]}}'
            case ToolCallArguments():
                function = f'{{"arguments":{_json(piece.text)}}}'
                delta = f'{{"tool_calls":[{{"index":{piece.index},"function":{function}}}]}}'
        return self._chunk(index, delta, logprobs=logprobs_json)

    def closing(self, index: int, finish: FinishReason) -> str:
        """Last chunk, with the finish reason."""
        return self._chunk(index, "{}", finish=json.dumps(finish))

    def _chunk(self, index: int, delta: str, *, logprobs: str = "null", finish: str = "null") -> str:
        return f'{{"index":{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{finish}}}'


@router.post(
    "/v1/chat/completions",
    response_model=None,
    responses=answers(ChatCompletion, 403, 404, 413, streamed_as=OpenAiAnswer.form.media_type),
    openapi_extra=takes(ChatBody),
)
async def chat_completions(request: Request) -> Response:
    """Continue a conversation."""
    body = await body_of(request, ChatBody)

    async def answer(backend: Backend) -> Response:
        jobs = await while_connected(request, _jobs(backend, body, client_of(request.scope)))
        return await respond_in(request, backend, body, ChatFormat(backend), jobs)

    return await answered(request, body.model, answer, form=OpenAiAnswer.form if body.stream else None)


@router.post(
    "/v1/chat/completions/input_tokens",
    response_model=None,
    responses=answers(TokenCount, 403, 404, 413),
    openapi_extra=takes(ChatBody),
)
async def count_input_tokens(request: Request) -> Response:
    """Number of tokens of the prompt that a chat would have."""
    body = await body_of(request, ChatBody)

    async def answer(backend: Backend) -> Response:
        conversation = await asyncio.to_thread(conversation_of, body)
        work = render_prompt(backend, conversation, client_of(request.scope))
        prompt = await while_connected(request, work)
        return json_response({"object": "chat.completion.input_tokens", "input_tokens": len(prompt.tokens)})

    return await answered(request, body.model, answer, needs_engine=False)


async def _jobs(backend: Backend, body: ChatBody, client: str | None) -> list[GenerationJob]:
    # In a thread, since a conversation of thousands of messages takes a while.
    conversation = await asyncio.to_thread(conversation_of, body)
    conversation = replace(conversation, splits_reasoning=body.reasoning_format != "none")
    prompt = await render_prompt(backend, conversation, client)
    job = await make_chat_job(backend, body, prompt, param="messages", client=client)
    return several([job], body.num_choices)


def conversation_of(body: ConversationBody) -> Conversation:
    """The conversation of a chat request, checked for contradictions.

    Raises:
        InvalidRequest: If fields contradict each other.
    """
    messages = [message.for_template() for message in body.messages]
    return Conversation(
        messages=messages,
        tools=tool_use_of(
            [tool.function for tool in body.tools or ()],
            body.tool_choice,
            is_parallel=body.parallel_tool_calls,
            name_param="tools[{}].function.name",
        ),
        variables=body.chat_template_kwargs or {},
        reasoning=body.reasoning_wish,
        effort_param=None if body.reasoning_effort is None else "reasoning_effort",
        budget_param=body.budget_field,
        ending=ending_of(
            messages,
            adds_generation_prompt=body.add_generation_prompt,
            continues_final_message=body.continue_final_message,
        ),
    )


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
