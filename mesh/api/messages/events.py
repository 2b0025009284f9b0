"""Content blocks, stream events and errors of /v1/messages.

Requests are refused in many places, by middleware too. So errors are rewritten where they leave.
"""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, NoReturn

from mesh.api import server_sent_events
from mesh.api.answering import Answer, timings, usage_of
from mesh.api.errors import error_body, json_bytes, json_response
from mesh.api.event_stream import StreamForm
from mesh.api.openai_format import CallIds
from mesh.text.message_parts import Content, Reasoning, ToolCallArguments, ToolCallStart

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from starlette.responses import Response
    from starlette.types import Message, Send

    from mesh.api.answering import AnswerPart, Choices
    from mesh.api.event_stream import Emit
    from mesh.api.messages.protocol import MessagesBody
    from mesh.text.message_parts import MessagePart

PATH: Final = "/v1/messages"
_REQUEST_ID: Final = b"x-request-id"
_KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_ELSE: Final = "api_error"
_BY_TYPE: Final = {
    "invalid_request_error": "invalid_request_error",
    "rate_limit_error": "rate_limit_error",
    "authentication_error": "authentication_error",
}
Event = dict[str, Any]
_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesResponse:
    """A response of this API: errors in its words, the request named as its clients expect; see `Rewritten`.

    Args:
        send: Sends it on.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def send(self, message: Message) -> None:
        """Pass on, or hold until the error is whole."""
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            headers += [(b"request-id", value) for name, value in headers if name == _REQUEST_ID]
            message = {**message, "headers": headers}
            if message["status"] >= 400:
                self._start = message
                return
        elif self._start is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_error(self._start)
            return
        await self._send(message)

    async def _send_error(self, start: Message) -> None:
        headers = dict(start["headers"])
        body = self._body
        try:
            refused = json.loads(body)["error"]
            message = refused["message"]
        except (ValueError, KeyError, TypeError):
            pass
        else:
            # With the fields of this server's other errors, which clients of Anthropic's do not read.
            error = {**refused, "type": _KINDS.get(start["status"], _ELSE), "message": message}
            request_id = headers.get(_REQUEST_ID, b"").decode("latin-1") or None
            body = json_bytes({"type": "error", "error": error, "request_id": request_id})
        headers[b"content-length"] = str(len(body)).encode()
        await self._send({**start, "headers": list(headers.items())})
        await self._send({"type": "http.response.body", "body": body})


class ContentBlocks:
    """Content blocks of one message so far.

    A block is open until another begins, or the message ends. Every method returns the events for what it
    did.

    Args:
        new_call_id: Makes the id of a call, to which its result will refer.
        shows_thinking: Whether blocks of reasoning have their text.

    Attributes:
        blocks: Blocks that are complete.
    """

    def __init__(self, new_call_id: Callable[[], str], *, shows_thinking: bool = True) -> None:
        self._shows_thinking = shows_thinking
        self.blocks: list[dict[str, Any]] = []
        self._new_call_id = new_call_id
        self._open: dict[str, Any] | None = None
        # Text of the open block, joined when it is complete.
        self._texts: list[str] = []

    def add(self, message_parts: Sequence[MessagePart]) -> list[Event]:
        """Add parts of the answer, in order."""
        events: list[Event] = []
        for piece in message_parts:
            match piece:
                case Content():
                    events += self._require("text", {"text": ""})
                    events.append(self._delta({"type": "text_delta", "text": piece.text}, piece.text))
                case Reasoning():
                    events += self._require("thinking", {"thinking": "", "signature": ""})
                    if self._shows_thinking:
                        delta = {"type": "thinking_delta", "thinking": piece.text}
                        events.append(self._delta(delta, piece.text))
                case ToolCallStart():
                    events += self.close()
                    call = {"id": self._new_call_id(), "name": piece.name, "input": {}}
                    events += self._require("tool_use", call)
                case ToolCallArguments():
                    events.append(
                        self._delta({"type": "input_json_delta", "partial_json": piece.text}, piece.text)
                    )
        return events

    def close(self, *, is_cut: bool = False) -> list[Event]:
        """End the open block, if there is one.

        Args:
            is_cut: Whether it is a call that was cut: no object is what was generated, so it is left out.
        """
        block, text = self._open, "".join(self._texts)
        if block is None:
            return []
        events: list[Event] = []
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        elif block["type"] == "thinking":
            block["thinking"] = text
            # Clients send it back; it is not checked.
            events.append(self._delta({"type": "signature_delta", "signature": block["signature"]}, ""))
        else:
            block["text"] = text
        events.append({"type": "content_block_stop", "index": len(self.blocks)})
        if not is_cut:
            self.blocks.append(block)
        self._open, self._texts = None, []
        return events

    def _require(self, kind: str, fields: dict[str, Any]) -> list[Event]:
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self.close()
        self._open = {"type": kind, **fields}
        start = {"type": "content_block_start", "index": len(self.blocks), "content_block": dict(self._open)}
        return [*events, start]

    def _delta(self, delta: dict[str, Any], text: str) -> Event:
        self._texts.append(text)
        return {"type": "content_block_delta", "index": len(self.blocks), "delta": delta}


def error_event(error: BaseException) -> bytes:
    """Event that ends a stream with an error."""
    told = error_body(error)["error"]
    kind = _BY_TYPE.get(str(told["type"]), _ELSE)
    return encoded([{"type": "error", "error": {"type": kind, "message": told["message"]}}])


MESSAGES_STREAM: Final = StreamForm(server_sent_events.MEDIA_TYPE, server_sent_events.comment, error_event)
"""Form of streams of messages."""


class MessagesAnswer(Answer):
    """One answer as a message, whole or as events.

    Args:
        choices: The answer, of one choice.
        body: Body of the request.
    """

    form = MESSAGES_STREAM

    def __init__(self, choices: Choices, body: MessagesBody) -> None:
        super().__init__(choices)
        backend = choices.backend
        self._model = backend.model_id
        self._max_tokens = body.token_limit or 0
        (self._job,) = choices.jobs
        self._id = choices.new_id("msg_")
        call_ids = CallIds(backend.api.random_bits, is_short=backend.has_short_call_ids, prefix="toolu_")
        self._content = ContentBlocks(call_ids, shows_thinking=body.shows_thinking)
        self._has_begun = False

    async def whole(self) -> Response:
        """The response with the whole message."""
        async with aclosing(self.choices.parts()) as parts:
            async for part in parts:
                self._content.add(part.message_parts)
        self._content.close(is_cut=part.has_cut_call)
        fields = self._fields(self._content.blocks, part)
        return json_response({**fields, **self._ending(part), "timings": timings(self._job, part)})

    async def produce(self, emit: Emit) -> None:
        """Emit the message's events as they come."""
        async with aclosing(self.choices.parts()) as parts:
            async for part in parts:
                events: list[Event] = []
                if not self._has_begun:
                    self._has_begun = True
                    message = {**self._fields([], part), "stop_reason": None, "stop_sequence": None}
                    events.append({"type": "message_start", "message": message})
                events += self._content.add(part.message_parts)
                if part.finish is not None:
                    events += self._content.close()
                    events.append(
                        {
                            "type": "message_delta",
                            "delta": self._ending(part),
                            "usage": self._usage(part),
                            "timings": timings(self._job, part),
                        }
                    )
                    events.append({"type": "message_stop"})
                if events:
                    await emit(encoded(events))

    def _fields(self, content: Sequence[dict[str, Any]], part: AnswerPart) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(content),
            "usage": self._usage(part),
            **({"warnings": self._job.warnings} if self._job.warnings else {}),
        }

    def _usage(self, part: AnswerPart) -> dict[str, Any]:
        """Token counts; those that a cache held are not in `input_tokens`, as at Anthropic."""
        usage = usage_of([self._job], [part])
        return {
            "input_tokens": usage.num_prompt - usage.num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.num_cached,
            "output_tokens": usage.num_answer,
        }

    def _ending(self, part: AnswerPart) -> dict[str, Any]:
        assert part.finish is not None  # noqa: S101 - the last part has one
        reason = _STOP_REASONS[part.finish]
        if part.stop_string is not None:
            reason = "stop_sequence"
        elif part.finish == "length" and part.num_tokens < self._max_tokens:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": part.stop_string}


def encoded(events: Sequence[Mapping[str, Any]]) -> bytes:
    """Events of a stream, each named by its type."""
    return b"".join(server_sent_events.event(json_bytes(event), event["type"]) for event in events)


def _object(arguments: str) -> Any:
    """Arguments of a call; empty if they are no object."""
    try:
        found = json.loads(arguments or "{}", strict=False, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
