"""Output items, stream events and errors of /v1/responses."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mesh.api import server_sent_events
from mesh.api.answering import Answer, made, timings, usage_of
from mesh.api.custom_calls import FreeTextReader
from mesh.api.errors import error_body, is_large_json, json_bytes, large_json_bytes, written_response
from mesh.api.event_stream import StreamForm
from mesh.api.message_bodies import AllowedTools, HostedTool
from mesh.api.openai_format import CallIds, chat_logprobs, usage_fields
from mesh.api.response_store import StoredResponse
from mesh.api.responses.protocol import messages_of
from mesh.text.message_parts import Content, Reasoning, ToolCallArguments, ToolCallStart
from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from starlette.responses import Response

    from mesh.api.answering import AnswerPart, Choices
    from mesh.api.event_stream import Emit
    from mesh.api.generation_job import GenerationJob
    from mesh.api.responses.protocol import ResponsesBody
    from mesh.text.message_parts import MessagePart

_WORDS: Final = (("response_format.json_schema", "text.format"), ("response_format", "text.format"))
Event = dict[str, Any]
_TEXT: Final = "output_text"
_THOUGHT: Final = "reasoning_text"
# Fields of a request that its response repeats.
_REPEATED: Final = (
    *("instructions", "max_output_tokens", "metadata", "previous_response_id", "temperature", "tool_choice"),
    *("tools", "top_p", "truncation", "parallel_tool_calls", "reasoning", "store", "text", "top_logprobs"),
    *("frequency_penalty", "presence_penalty", "max_tool_calls", "prompt_cache_key", "safety_identifier"),
)
_DEFAULTS: Final[Mapping[str, Any]] = {
    "frequency_penalty": 0.0,
    "metadata": {},
    "presence_penalty": 0.0,
    "service_tier": "default",
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "text": {"format": {"type": "text"}},
    "top_logprobs": 0,
}


class Output:
    """Items of one response so far.

    An item is open until another begins, or the answer ends. Every method returns the events for what it did,
    in order, without their sequence number.

    Args:
        new_id: Makes an id with a given prefix.
        new_call_id: Makes the id of a call, to which its result will refer.
        namespaced: Namespace and own name of functions that have one, by the name that the model calls.
        custom_names: Names of custom tools, which are called with a text.

    Attributes:
        items: Current items.
    """

    def __init__(
        self,
        new_id: Callable[[str], str],
        new_call_id: Callable[[], str],
        namespaced: Mapping[str, tuple[str, str]],
        custom_names: frozenset[str] = frozenset(),
    ) -> None:
        self.items: list[dict[str, Any]] = []
        self._namespaced = namespaced
        self._custom_names = custom_names
        # Of the open call of a custom tool.
        self._free_text = FreeTextReader()
        self._new_id = new_id
        self._new_call_id = new_call_id
        self._open: dict[str, Any] | None = None
        # Text of the open item, joined when it is complete.
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        # Log probabilities of tokens whose text is still to come.
        self._early_logprobs: list[dict[str, Any]] = []

    def add(
        self, message_parts: Sequence[MessagePart], logprobs: Sequence[dict[str, Any]] = ()
    ) -> list[Event]:
        """Add parts of the answer.

        Args:
            message_parts: Parts, in order.
            logprobs: Log probabilities of their tokens, if requested; they go with the next text.
        """
        self._early_logprobs += logprobs
        events: list[Event] = []
        for piece in message_parts:
            match piece:
                case Content():
                    told, self._early_logprobs = self._early_logprobs, []
                    events += self._add_text("message", _TEXT, piece.text, told)
                case Reasoning():
                    events += self._add_text("reasoning", _THOUGHT, piece.text, [])
                case ToolCallStart():
                    events += self._begin_call(piece.name)
                case ToolCallArguments():
                    events += self._argue(piece.text)
        return events

    def end(self, *, is_cut: bool) -> list[Event]:
        """End the answer. An empty one has an empty message.

        Args:
            is_cut: Whether a limit ended it, or a stop string within a call: the last item is incomplete.
        """
        events = [] if self.items else self._begin_text("message", _TEXT)
        return events + self._close("incomplete" if is_cut else "completed")

    def _add_text(
        self, item_type: str, part_type: str, text: str, logprobs: list[dict[str, Any]]
    ) -> list[Event]:
        events = []
        if self._open is None or self._open["type"] != item_type:
            events = self._close("completed") + self._begin_text(item_type, part_type)
        self._texts.append(text)
        self._logprobs += logprobs
        more = {"logprobs": logprobs} if part_type == _TEXT else {}
        return [*events, self._event(f"response.{part_type}.delta", content_index=0, delta=text, **more)]

    def _begin_text(self, item_type: str, part_type: str) -> list[Event]:
        prefix = "msg_" if item_type == "message" else "rs_"
        item: dict[str, Any] = {"type": item_type, "id": self._new_id(prefix), "status": "in_progress"}
        item |= (
            {"role": "assistant", "content": []} if item_type == "message" else {"summary": [], "content": []}
        )
        opened = self._begin(item)
        part = _part(part_type, "", [])
        return [opened, self._event("response.content_part.added", content_index=0, part=part)]

    def _argue(self, text: str) -> list[Event]:
        """More arguments of the open call."""
        kind = "response.function_call_arguments.delta"
        if self._open is not None and self._open["type"] == "custom_tool_call":
            kind, text = "response.custom_tool_call_input.delta", self._free_text.push(text)
        self._texts.append(text)
        return [self._event(kind, delta=text)] if text else []

    def _begin_call(self, name: str) -> list[Event]:
        events = self._close("completed")
        if name in self._custom_names:
            self._free_text = FreeTextReader()
            item = {"type": "custom_tool_call", "id": self._new_id("ctc_"), "call_id": self._new_call_id()}
            return [*events, self._begin({**item, "name": name, "input": "", "status": "in_progress"})]
        item = {"type": "function_call", "id": self._new_id("fc_"), "call_id": self._new_call_id()}
        if name in self._namespaced:
            item["namespace"], name = self._namespaced[name]
        item |= {"name": name, "arguments": "", "status": "in_progress"}
        return [*events, self._begin(item)]

    def _begin(self, item: dict[str, Any]) -> Event:
        self.items.append(item)
        self._open, self._texts, self._logprobs = item, [], []
        return {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            # A copy, as the item changes further.
            "item": {**item, "content": []} if "content" in item else dict(item),
        }

    def _close(self, status: str) -> list[Event]:
        item, text = self._open, "".join(self._texts)
        if item is None:
            return []
        if item["type"] == "custom_tool_call":
            item["input"] = text + self._free_text.flush()
            events = [self._event("response.custom_tool_call_input.done", input=item["input"])]
        elif item["type"] == "function_call":
            item["arguments"] = text
            events = [self._event("response.function_call_arguments.done", name=item["name"], arguments=text)]
        else:
            events = self._close_text(item, text)
        item["status"] = status
        self._open = None
        done = {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
        return [*events, done]

    def _close_text(self, item: dict[str, Any], text: str) -> list[Event]:
        part_type = _TEXT if item["type"] == "message" else _THOUGHT
        part = _part(part_type, text, self._logprobs)
        item["content"] = [part]
        more = {"logprobs": self._logprobs} if part_type == _TEXT else {}
        return [
            self._event(f"response.{part_type}.done", content_index=0, text=text, **more),
            self._event("response.content_part.done", content_index=0, part=part),
        ]

    def _event(self, type: str, **fields: Any) -> Event:
        assert self._open is not None  # noqa: S101 - events of an item come while it is open
        return {"type": type, "item_id": self._open["id"], "output_index": len(self.items) - 1, **fields}


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation."""

    messages: Sequence[Mapping[str, Any]]
    """The conversation before it, without the request's instructions."""
    job: GenerationJob
    """The job of its answer."""
    input_items: Sequence[Mapping[str, Any]]
    """Items of the request's input."""
    repeated: Mapping[str, Any]
    """See `repeated_fields`."""


def early_error(error: BaseException) -> bytes:
    """Event that ends a stream with an error before there is a response."""
    told = error_body(error)["error"]
    event = {"type": "error", "code": told["code"], "message": told["message"], "param": told["param"]}
    return numbered([event], 0)


RESPONSES_STREAM: Final = StreamForm(server_sent_events.MEDIA_TYPE, server_sent_events.comment, early_error)
"""Form of streams of responses."""


class ResponsesAnswer(Answer):
    """One answer as a response, whole or as events.

    Args:
        choices: The answer, of one choice.
        body: Body of the request.
        turn: The turn.
    """

    form = RESPONSES_STREAM

    def __init__(self, choices: Choices, body: ResponsesBody, turn: Turn) -> None:
        super().__init__(choices)
        self._backend = backend = choices.backend
        (self._job,) = choices.jobs
        self._turn = turn
        self._keeps = body.store is not False
        self._num_events = 0
        self._base = self._base_of()
        call_ids = CallIds(backend.api.random_bits, is_short=backend.has_short_call_ids)
        self._output = Output(choices.new_id, call_ids, body.namespaced, body.custom_names)

    async def whole(self) -> Response:
        """The whole response."""
        async with aclosing(self.choices.parts()) as parts:
            async for part in parts:
                self._take(part)
        return await written_response(await self._finished(part))

    async def produce(self, emit: Emit) -> None:
        """Emit the response's events as they come."""
        async with aclosing(self.choices.parts()) as parts:
            async for part in parts:
                events = self._take(part)
                if part.finish is not None:
                    response = await self._finished(part)
                    events.append({"type": f"response.{response['status']}", "response": response})
                # The first and the last events repeat what the request said.
                is_told = self._num_events > 0 and part.finish is None
                is_large = not is_told and is_large_json([self._base, events])
                await emit(await made(is_large, self._opened, events))

    def failed(self, error: BaseException) -> bytes:
        """Events that end a stream with an error."""
        told = error_body(error)["error"]
        response = self._response("failed", error={"code": told["code"], "message": told["message"]})
        return self._opened([{"type": "response.failed", "response": response}])

    def _take(self, part: AnswerPart) -> list[Event]:
        logprobs = chat_logprobs(part.tokens, self._backend.tokenizer)["content"] if part.tokens else []
        for entry in logprobs:
            for each in (entry, *entry["top_logprobs"]):
                # A list in any case, unlike in chats.
                each["bytes"] = each["bytes"] or []
        events = self._output.add(part.message_parts, logprobs)
        if part.finish is not None:
            events += self._output.end(is_cut=part.finish == "length" or part.has_cut_call)
        return events

    def _opened(self, events: list[Event]) -> bytes:
        """Some events, after those that begin a response if these are its first."""
        if not self._num_events:
            response = self._response("in_progress")
            names = ("created", "in_progress")
            events = [*({"type": f"response.{name}", "response": response} for name in names), *events]
        data = numbered(events, self._num_events)
        self._num_events += len(events)
        return data

    async def _finished(self, part: AnswerPart) -> dict[str, Any]:
        counts = usage_fields(usage_of([self._job], [part]))
        is_cut = part.finish == "length"
        response = self._response(
            "incomplete" if is_cut else "completed",
            completed_at=int(self._backend.api.now_s()),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            output=self._output.items,
            usage={
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": counts["completion_tokens_details"],
                "total_tokens": counts["total_tokens"],
            },
            timings=timings(self._job, part),
        )
        if self._keeps:
            messages = [*self._turn.messages, *messages_of(self._output.items)]
            items = [
                {**item, "id": item.get("id") or self.choices.new_id("msg_")}
                for item in self._turn.input_items
            ]
            may_record = self._job.record is not False
            stored = StoredResponse(messages, response, items, may_record)
            await self._backend.api.responses.put(self._job.request.client, response["id"], stored)
        return response

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        return {**self._base, "status": status, "output": [], **fields}

    def _base_of(self) -> dict[str, Any]:
        return {
            "id": self.choices.new_id("resp_"),
            "object": "response",
            "created_at": int(self._backend.api.now_s()),
            "model": self._backend.model_id,
            "error": None,
            "incomplete_details": None,
            "background": False,
            "usage": None,
            **({"warnings": self._job.warnings} if self._job.warnings else {}),
            **dict.fromkeys(_REPEATED),
            **_DEFAULTS,
            **self._turn.repeated,
        }


def as_responses_error(error: InvalidRequest) -> InvalidRequest:
    """An error about `response_format` as one about `text.format`."""
    message, param = error.message, error.param
    for theirs, ours in _WORDS:
        message = message.replace(theirs, ours)
        param = None if param is None else param.replace(theirs, ours)
    return InvalidRequest(message, param=param)


def numbered(events: Iterable[Mapping[str, Any]], first: int) -> bytes:
    """Events of a stream, each named by its type.

    Args:
        events: The events, in order.
        first: Number of the first one in its stream.
    """
    data = []
    for number, event in enumerate(events, first):
        fields = {**event, "sequence_number": number}
        write = large_json_bytes if is_large_json(fields) else json_bytes
        data.append(server_sent_events.event(write(fields), event["type"]))
    return b"".join(data)


def _part(part_type: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if part_type == _THOUGHT:
        return {"type": part_type, "text": text}
    return {"type": part_type, "text": text, "annotations": [], "logprobs": logprobs}


def repeated_fields(body: ResponsesBody) -> dict[str, Any]:
    """Fields of a request as its response repeats them; for a thread, as a schema may have many values."""
    repeated = set(_REPEATED) - {"tool_choice"}
    said = body.model_dump(include=repeated, exclude_none=True, exclude_unset=True, by_alias=True)
    if body.tools:
        kept = zip(body.tools, said["tools"], strict=True)
        said["tools"] = [_with_strict(told) for tool, told in kept if not isinstance(tool, HostedTool)]
    choice = body.tool_choice
    if isinstance(choice, str):
        said["tool_choice"] = choice
    elif isinstance(choice, tuple):
        said["tool_choice"] = {"type": _kind_of(body, choice[0]), "name": choice[0]}
    elif isinstance(choice, AllowedTools):
        tools = [{"type": _kind_of(body, name), "name": name} for name in choice.names]
        said["tool_choice"] = {"type": "allowed_tools", "mode": choice.mode, "tools": tools}
    return said


def _kind_of(body: ResponsesBody, name: str) -> str:
    return "custom" if name in body.custom_names else "function"


def _with_strict(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as its response repeats it: a function says whether its schema is enforced."""
    if tool["type"] == "namespace":
        return {**tool, "tools": [_with_strict(each) for each in tool["tools"]]}
    return tool if tool["type"] == "custom" else {**tool, "strict": tool.get("strict", False)}
