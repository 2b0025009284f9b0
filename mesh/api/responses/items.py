"""Items of a Responses request: messages, calls, results and reasoning of earlier turns."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from mesh.api.body import as_invalid_request
from mesh.api.strict_body import StrictBody
from mesh.api.tool_schemas import CalledFunction
from spanmesh_proto.errors import InvalidRequest

_TEXT_TYPES: Final = frozenset({"input_text", "output_text", "text"})


class InputText(StrictBody):
    """A piece of text, for the API's document."""

    type: Literal["input_text", "output_text", "text"]
    text: str


def parse_parts(value: Any) -> str:
    """Text given as a string or as a list of parts, which follow one another in lines of their own."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict):
            raise PydanticCustomError("content", "part {index} must be an object", {"index": index})
        if part.get("type") not in _TEXT_TYPES:
            raise PydanticCustomError(
                "content",
                "part {index} is not of type input_text or output_text: this server reads text only",
                {"index": index},
            )
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError("content", "part {index} lacks its text, a string", {"index": index})
        texts.append(part["text"])
    return "\n".join(texts)


Parts = Annotated[str, PlainValidator(parse_parts, json_schema_input_type=str | list[InputText])]


class MessageItem(StrictBody):
    """What somebody said. `type` may be left out."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class FunctionCallItem(StrictBody):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(StrictBody):
    """What a call came to."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts


class ReasoningText(StrictBody):
    """A piece of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(StrictBody):
    """What the model wrote for itself; a summary alone, or an encrypted text, says nothing here."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None


InputItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
_KINDS: Final[dict[str, type[InputItem]]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}

ItemsInput = str | Annotated[list[InputItem], Field(min_length=1)]


def messages_of(value: str | list[Any]) -> list[dict[str, Any]]:
    """The items as messages that chat templates know.

    What an assistant thought, said and called in one turn is one message.

    Args:
        value: The request's `input`.

    Raises:
        InvalidRequest: Naming the item at fault.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[dict[str, Any]] = []
    for index, raw in enumerate(value):
        _add(messages, _parsed(raw, f"input[{index}]"))
    return messages


def _parsed(raw: Any, where: str) -> InputItem:
    if not isinstance(raw, dict):
        raise InvalidRequest(f"{where}: must be an object", param=where)
    fields = {**raw, "type": raw.get("type") or "message"}
    kind = _KINDS.get(fields["type"]) if isinstance(fields["type"], str) else None
    if kind is None:
        raise InvalidRequest(
            f"{where}.type: this server reads {', '.join(_KINDS)}: send the item itself as one of these",
            param=f"{where}.type",
        )
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise as_invalid_request(error, within=where) from None


def _add(messages: list[dict[str, Any]], item: InputItem) -> None:
    match item:
        case MessageItem(role="assistant"):
            turn = _turn(messages, lambda last: not last["content"] and "tool_calls" not in last)
            turn["content"] = item.content
        case MessageItem():
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": item.content})
        case FunctionCallItem():
            function = CalledFunction(name=item.name, arguments=item.arguments).for_template()
            call = {"id": item.call_id, "type": "function", "function": function}
            _turn(messages, lambda _last: True).setdefault("tool_calls", []).append(call)
        case FunctionCallOutputItem():
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        case ReasoningItem():
            if text := "\n".join(part.text for part in item.content or ()):
                messages.append({"role": "assistant", "content": "", "reasoning_content": text})


def _turn(messages: list[dict[str, Any]], fits: Any) -> dict[str, Any]:
    """The assistant's message that is being put together, or a new one."""
    if not (messages and messages[-1]["role"] == "assistant" and fits(messages[-1])):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]
