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
from mesh.api.chat_prompt import conversation_of, render_prompt
from mesh.api.custom_calls import FreeTextReader, free_text
from mesh.api.errors import json_response
from mesh.api.event_stream import while_connected
from mesh.api.generation_job import make_chat_job, several
from mesh.api.on_demand import answered
from mesh.api.openai_format import CallIds, OpenAiAnswer, chat_logprobs, respond_in
from mesh.api.openapi import ChatCompletion, TokenCount, answers, takes
from mesh.api.protocol import ChatBody
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

    def __init__(self, backend: Backend, body: ChatBody) -> None:
        self._tokenizer = backend.tokenizer
        self._new_call_id = CallIds(backend.api.random_bits, is_short=backend.has_short_call_ids)
        self._is_legacy = body.has_functions
        self._shows_reasoning = body.shows_reasoning
        self._custom_names = body.custom_names
        # Of calls of custom tools under way, by choice and index of the call.
        self._texts: dict[tuple[int, int], FreeTextReader] = {}

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
        reasoning = "".join(piece.text for piece in message_parts if isinstance(piece, Reasoning))
        if reasoning and self._shows_reasoning:
            message["reasoning_content"] = reasoning
        if calls := calls_of(message_parts):
            message["content"] = content or None
            if self._is_legacy:
                message["function_call"] = dict(zip(_CALL, calls[0], strict=True))
            else:
                message["tool_calls"] = [self._call(*call) for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._told(finish),
        }

    def opening(self, index: int) -> str:
        """First chunk, with the role."""
        return self._chunk(index, '{"role":"assistant","content":""}')

    def delta(self, index: int, piece: MessagePart, logprobs_json: str) -> str:
        """Chunk with more of the message."""
        match piece:
            case Content():
                delta = f'{{"content":{_json(piece.text)}}}'
            case Reasoning():
                text = piece.text
                delta = f'{{"reasoning_content":{_json(text)}}}' if self._shows_reasoning else "{}"
            case ToolCallStart():
                delta = self._begun(index, piece)
            case ToolCallArguments():
                function = f'{{"arguments":{_json(piece.text)}}}'
                free = self._texts.get((index, piece.index))
                if self._is_legacy:
                    delta = f'{{"function_call":{function}}}'
                elif free is not None:
                    custom = f'"custom":{{"input":{_json(free.push(piece.text))}}}'
                    delta = f'{{"tool_calls":[{{"index":{piece.index},{custom}}}]}}'
                else:
                    delta = f'{{"tool_calls":[{{"index":{piece.index},"function":{function}}}]}}'
        return self._chunk(index, delta, logprobs=logprobs_json)

    def closing(self, index: int, finish: FinishReason) -> str:
        """Last chunk, with the finish reason, and what was held back of custom tools' texts."""
        rests = [
            f'{{"index":{call},"custom":{{"input":{_json(rest)}}}}}'
            for (choice, call), text in self._texts.items()
            if choice == index and (rest := text.flush())
        ]
        delta = f'{{"tool_calls":[{",".join(rests)}]}}' if rests else "{}"
        return self._chunk(index, delta, finish=json.dumps(self._told(finish)))

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        call_id = self._new_call_id()
        if name in self._custom_names:
            custom = {"name": name, "input": free_text(arguments)}
            return {"id": call_id, "type": "custom", "custom": custom}
        function = dict(zip(_CALL, (name, arguments), strict=True))
        return {"id": call_id, "type": "function", "function": function}

    def _begun(self, index: int, call: ToolCallStart) -> str:
        """Delta with which a call begins."""
        function = f'{{"name":{_json(call.name)},"arguments":""}}'
        if self._is_legacy:
            return f'{{"function_call":{function}}}'
        head = f'"index":{call.index},"id":"{self._new_call_id()}"'
        if call.name in self._custom_names:
            self._texts[index, call.index] = FreeTextReader()
            custom = f'{{"name":{_json(call.name)},"input":""}}'
            return f'{{"tool_calls":[{{{head},"type":"custom","custom":{custom}}}]}}'
        return f'{{"tool_calls":[{{{head},"type":"function","function":{function}}}]}}'

    def _told(self, finish: FinishReason) -> str:
        """The reason in the words of the request."""
        return "function_call" if self._is_legacy and finish == "tool_calls" else finish

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
        return await respond_in(request, backend, body, ChatFormat(backend, body), jobs)

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
    conversation = replace(conversation, splits_reasoning=body.splits_reasoning)
    prompt = await render_prompt(backend, conversation, client)
    job = await make_chat_job(backend, body, prompt, param="messages", client=client)
    return several([job], body.num_choices)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
