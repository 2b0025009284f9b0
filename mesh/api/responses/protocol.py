"""Request bodies, items and references to stored items of /v1/responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, PlainValidator, ValidationError, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from mesh.api.message_bodies import (
    FREE_TEXT,
    MAX_MESSAGES,
    MAX_TOOLS,
    SERVER_TOOLS,
    Arguments,
    CalledFunction,
    ChosenTools,
    CustomFunction,
    Effort,
    FreeText,
    FunctionBody,
    HostedTool,
    ReasoningFields,
    TextGrammar,
    ToolName,
    hosted_warnings,
    parse_allowed_tools,
    parts_joined,
    refuse_others,
    require_grammar,
    result_text,
    wrong_type,
)
from mesh.api.picture_parts import InputImage, PicturedText, placed
from mesh.api.protocol import GenerationBody, JsonSchemaBody, ResponseFormatBody, Schema
from mesh.api.request_parsing import (
    ExactBody,
    NumTopLogprobs,
    StrictBody,
    TokenLimit,
    Whole,
    as_invalid_request,
    choice_count,
    limit_of,
)
from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.api.response_store import ResponseStore

MAX_METADATA: Final = 16
WANTS_LOGPROBS: Final = "message.output_text.logprobs"
# Tools that OpenAI runs, or whose form only it has; in names with a date as well.
_HOSTED: Final = (*SERVER_TOOLS, "computer", "local_shell", "shell", "apply_patch")
# Items of a conversation at OpenAI that hold nothing for the model here.
_HOSTED_ITEMS: Final = frozenset(
    {
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
        *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "compaction"),
        *("tool_search_call", "tool_search_output"),
    }
)
# Calls of tools that the client ran, in forms of their own; their results are named `…_output`.
_CLIENT_CALLS: Final = frozenset({"local_shell_call", "shell_call", "apply_patch_call", "computer_call"})
_ABOUT_CALL: Final = frozenset({"type", "id", "call_id", "status", "output"})
ResultParts = Annotated[Any, PlainValidator(result_text, json_schema_input_type=Any)]


class ItemReference(StrictBody):
    """An item of a stored response or of its input, by its id."""

    type: Literal["item_reference"] | None = None
    id: str


class InputText(StrictBody):
    """A piece of text, for the API's document."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class FunctionCallItem(StrictBody):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: Arguments


class CustomCallItem(StrictBody):
    """A call of a custom tool that the model made."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str | None = None


class ReasoningText(StrictBody):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(StrictBody):
    """Reasoning of the model; a summary alone, or an encrypted text, says nothing here."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None


class FunctionCallOutputItem(StrictBody):
    """Result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: ResultParts


class _Tool(StrictBody):
    type: Literal["function"]


class ResponsesTool(FunctionBody, _Tool):
    """A function that the model may call."""


class CustomFormat(ExactBody):
    """Input of a custom tool: any text, or one that a grammar describes."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    @model_validator(mode="after")
    def _require_its_own(self) -> CustomFormat:
        require_grammar(self.type, is_given=self.syntax is not None and self.definition is not None)
        return self


class CustomTool(StrictBody):
    """A tool that takes one text."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None

    @property
    def custom(self) -> CustomFunction:
        """The same as chats have it."""
        given = self.format
        text = None
        if given is not None and given.syntax is not None and given.definition is not None:
            grammar = TextGrammar(syntax=given.syntax, definition=given.definition)
            text = FreeText(type="grammar", grammar=grammar)
        return CustomFunction(name=self.name, description=self.description, format=text)


class PassedOverTool(HostedTool):
    """A tool that OpenAI would run, or whose form only it has: it is passed over."""

    type: Annotated[str, Field(pattern=f"^({'|'.join(_HOSTED)})")]


class NamespaceTool(StrictBody):
    """Functions under a common name, which their calls have beside the function's own."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[ResponsesTool], Field(min_length=1, max_length=MAX_TOOLS)]


class NamedResponsesTool(ExactBody):
    """The one tool that the model is to call."""

    type: Literal["function", "custom"]
    name: str


class AllowedResponsesTools(ExactBody):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedResponsesTool], Field(min_length=1)]


class ReasoningBody(ExactBody):
    """Reasoning effort, for templates that ask. Of summaries there are none."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(ExactBody):
    """Form of the text; OpenAI's `strict` makes no difference, as answers always keep to it."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _require_its_own(self) -> TextFormat:
        if self.type == "text" and self.schema_ is not None:
            raise PydanticCustomError("format", "of type text has no schema: send type json_schema")
        return self


class TextBody(ExactBody):
    """Form and length of the text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


def parse_parts(value: Any, item: ValidationInfo) -> str | PicturedText:
    """Text given as a string or as a list of parts, each on a line of its own except beside pictures."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    parts = ((part, index) for index, part in enumerate(value))
    is_user = item.data.get("role") == "user"
    return parts_joined(parts, has_pictures=is_user, wanted="input_text or output_text")


Parts = Annotated[
    Any, PlainValidator(parse_parts, json_schema_input_type=str | list[InputText | InputImage] | None)
]


class MessageItem(StrictBody):
    """A message. `type` may be left out."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


InputItem = MessageItem | FunctionCallItem | CustomCallItem | FunctionCallOutputItem | ReasoningItem


_KINDS: Final[dict[str, type[InputItem]]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}


ItemsInput = str | Annotated[list[InputItem | ItemReference], Field(min_length=1)]


def messages_of(value: str | list[Any]) -> list[dict[str, Any]]:
    """The items as messages in the form of chat templates.

    Reasoning, text and calls of an assistant in one turn are one message.

    Args:
        value: `input` of the request.

    Raises:
        InvalidRequest: Naming the item at fault.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[dict[str, Any]] = []
    for index, raw in enumerate(value):
        for item in _of_elsewhere(raw):
            where = f"input[{index}]"
            _add(messages, _parsed(item, where), where)
    return messages


def _of_elsewhere(raw: Any) -> list[Any]:
    """An item as those that this server knows; tools that OpenAI or its clients run have others."""
    kind = raw.get("type") if isinstance(raw, dict) else None
    if not isinstance(kind, str) or kind in _KINDS:
        return [raw]
    if kind in _HOSTED_ITEMS:
        return []
    call_id = raw.get("call_id") or raw.get("id")
    if kind == "mcp_call":
        call = {"type": "function_call", "call_id": call_id, "name": raw.get("name")}
        result = raw.get("output") if raw.get("error") is None else raw.get("error")
        return [
            {**call, "arguments": raw.get("arguments")},
            {"type": "function_call_output", "call_id": call_id, "output": result},
        ]
    if kind in _CLIENT_CALLS:
        arguments = {name: value for name, value in raw.items() if name not in _ABOUT_CALL}
        name = kind.removesuffix("_call")
        return [{"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}]
    if kind.removesuffix("_output") in _CLIENT_CALLS:
        return [{"type": "function_call_output", "call_id": call_id, "output": raw.get("output")}]
    return [raw]


def input_items_of(value: str | list[Any]) -> list[dict[str, Any]]:
    """The items of a request's input, texts as messages with parts."""
    given = [{"role": "user", "content": value}] if isinstance(value, str) else value
    return [_with_parts(item) for item in given]


def _with_parts(item: dict[str, Any]) -> dict[str, Any]:
    if "role" not in item:
        return item
    content = item.get("content")
    if isinstance(content, str):
        is_answer = item["role"] == "assistant"
        part = {"type": "output_text", "annotations": []} if is_answer else {"type": "input_text"}
        content = [{**part, "text": content}]
    return {"type": "message", "status": "completed", **item, "content": content}


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


def _add(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    match item:
        case MessageItem(role="assistant"):
            turn = _turn(messages, lambda last: not last["content"] and "tool_calls" not in last)
            turn["content"] = item.content
        case MessageItem():
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": placed(item.content, where)})
        case FunctionCallItem():
            name = item.name if item.namespace is None else flat_name(item.namespace, item.name)
            function = CalledFunction(name=name, arguments=item.arguments).for_template()
            call = {"id": item.call_id, "type": "function", "function": function}
            _turn(messages, lambda _last: True).setdefault("tool_calls", []).append(call)
        case CustomCallItem():
            function = {"name": item.name, "arguments": {FREE_TEXT: item.input or ""}}
            call = {"id": item.call_id, "type": "function", "function": function}
            _turn(messages, lambda _last: True).setdefault("tool_calls", []).append(call)
        case FunctionCallOutputItem():
            # A picture's path then says `content` for `output`, as in other results.
            content = placed(item.output, where)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        case ReasoningItem():
            if text := "\n".join(part.text for part in item.content or ()):
                messages.append({"role": "assistant", "content": "", "reasoning_content": text})


def _turn(messages: list[dict[str, Any]], fits: Any) -> dict[str, Any]:
    """The assistant's message in progress, or a new one."""
    if not (messages and messages[-1]["role"] == "assistant" and fits(messages[-1])):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def parse_input(value: Any) -> str | list[Any]:
    """A text or a list of items, which are checked later."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("input", "must be a string or a list of one or more items")
    if len(value) > MAX_MESSAGES:
        raise PydanticCustomError(
            "input", "holds {count} items: at most {most} work", {"count": len(value), "most": MAX_MESSAGES}
        )
    return value


def parse_choice(value: Any) -> ChosenTools:
    """The choice of tools of a response."""
    if value in (None, ""):
        return None
    if isinstance(value, str) and value in {"none", "auto", "required"}:
        return value
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return parse_allowed_tools(value, _function_name)
    if (name := _function_name(value)) is not None:
        return (name,)
    raise PydanticCustomError(
        "tool_choice",
        'must be "none", "auto", "required", {"type": "function", "name": …} or {"type": "allowed_tools", '
        '"mode": …, "tools": […]}',
    )


def _function_name(tool: Any) -> str | None:
    is_tool = isinstance(tool, dict) and tool.get("type") in ("function", "custom")
    if not is_tool or not isinstance(tool.get("name"), str):
        return None
    refuse_others("tool_choice", tool, {"type", "name"})
    name: str = tool["name"]
    return name


def parse_tool(value: Any) -> ResponsesTool | NamespaceTool | CustomTool | PassedOverTool:
    """One entry of `tools`."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "namespace":
        return NamespaceTool.model_validate(value)
    if kind == "custom":
        return CustomTool.model_validate(value)
    if isinstance(kind, str) and kind.startswith(_HOSTED):
        return PassedOverTool.model_validate(value)
    if isinstance(kind, str) and kind != "function":
        raise wrong_type(kind, "this server knows no such tools, send those of type function or custom")
    return ResponsesTool.model_validate(value)


_AnyTool = Annotated[
    Any,
    PlainValidator(
        parse_tool, json_schema_input_type=ResponsesTool | NamespaceTool | CustomTool | PassedOverTool
    ),
]


class ResponsesBody(ReasoningFields, GenerationBody):
    """`POST /v1/responses`."""

    input: Annotated[str | list[Any], PlainValidator(parse_input, json_schema_input_type=ItemsInput)]
    instructions: str | None = None
    max_output_tokens: TokenLimit | None = None
    tools: Annotated[list[_AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        ChosenTools,
        PlainValidator(
            parse_choice,
            json_schema_input_type=Literal["", "none", "auto", "required"]
            | NamedResponsesTool
            | AllowedResponsesTools
            | None,
        ),
    ] = None
    parallel_tool_calls: bool | None = None
    text: TextBody | None = None
    reasoning: ReasoningBody | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    top_logprobs: NumTopLogprobs = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Answered to the client as they came; nothing here depends on them.
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Of calls that OpenAI would run: there are none.
    max_tool_calls: Whole | None = None
    # One answer, generated while its client waits.
    n: choice_count(1) = None  # type: ignore[valid-type]

    neutral: ClassVar = {
        "background": (False,),
        "context_management": (),
        "conversation": (),
        "moderation": (),
        "prompt": (),
    }

    @property
    def functions(self) -> list[FunctionBody]:
        """All functions, those of namespaces by their flat names.

        Raises:
            InvalidRequest: If they are too many.
        """
        found: list[FunctionBody] = []
        for tool in self.tools or ():
            if isinstance(tool, NamespaceTool):
                found += (
                    each.model_copy(update={"name": flat_name(tool.name, each.name)}) for each in tool.tools
                )
            elif isinstance(tool, CustomTool):
                found.append(tool.custom.function)
            elif isinstance(tool, ResponsesTool):
                found.append(tool)
        if len(found) > MAX_TOOLS:
            raise InvalidRequest(
                f"tools: they hold more than {MAX_TOOLS} functions: send less", param="tools"
            )
        return found

    @property
    def namespaced(self) -> dict[str, tuple[str, str]]:
        """Namespace and own name of each function that has one, by its flat name."""
        return {
            flat_name(tool.name, each.name): (tool.name, each.name)
            for tool in self.tools or ()
            if isinstance(tool, NamespaceTool)
            for each in tool.tools
        }

    @property
    def custom_names(self) -> frozenset[str]:
        """Names of custom tools."""
        return frozenset(tool.name for tool in self.tools or () if isinstance(tool, CustomTool))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What of the request has no effect."""
        tools = enumerate(self.tools or ())
        hosted = ((index, tool.type) for index, tool in tools if isinstance(tool, HostedTool))
        found = [*hosted_warnings(hosted)]
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            found.append("text.verbosity has no effect: no model here is told how much to write")
        return tuple(found)

    @property
    def token_limit(self) -> int | None:
        """Most tokens of the answer."""
        newer = limit_of("max_output_tokens", self.max_output_tokens, permits_none=False)
        return super().token_limit if newer is None else newer

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of likeliest tokens to report beside each token's logprob; None reports nothing."""
        wanted = self.top_logprobs is not None or WANTS_LOGPROBS in (self.include or ())
        return self.top_logprobs or 0 if wanted else None

    def as_chat(self) -> ResponsesBody:
        """The body with `response_format` in place of `text.format`.

        Raises:
            InvalidRequest: If it has both.
        """
        wanted = None if self.text is None else self.text.format
        if wanted is None or wanted.type == "text":
            return self
        if self.response_format is not None:
            raise InvalidRequest(
                "text.format and response_format are the same: send one of them", param="text.format"
            )
        schema, of_object = None, None
        if wanted.type == "json_object":
            of_object = wanted.schema_
        else:
            given = {"schema": wanted.schema_} if "schema_" in wanted.model_fields_set else {}
            schema = JsonSchemaBody.model_validate({"name": wanted.name, **given})
        as_chat = ResponseFormatBody.model_validate(
            {"type": wanted.type, "json_schema": schema, "schema": of_object}
        )
        return self.model_copy(update={"response_format": as_chat})


def with_stored_items(
    value: str | list[Any], store: ResponseStore, client: str | None
) -> str | list[Mapping[str, Any]]:
    """The input of a request, with the items themselves in place of references.

    Args:
        value: `input` of the request.
        store: Stored responses.
        client: Identity of the API key, whose items alone are found.

    Raises:
        InvalidRequest: Naming the reference at fault.
    """
    if isinstance(value, str):
        return value
    ids = {index: _id_of(item, index) for index, item in enumerate(value) if _is_reference(item)}
    if not ids:
        return value
    seen: set[str] = set()
    for index, item_id in ids.items():
        # Each could stand for an item of any size.
        if item_id in seen:
            raise InvalidRequest(
                f"input[{index}].id: the item {item_id!r} is referred to twice: refer to it once",
                param=f"input[{index}].id",
            )
        seen.add(item_id)
    items = store.items(client, seen)
    for index, item_id in ids.items():
        if item_id not in items:
            raise InvalidRequest(
                f"input[{index}].id: the item {item_id!r} is not stored here, or no longer: send the item"
                " itself",
                param=f"input[{index}].id",
            )
    return [items[ids[index]] if index in ids else item for index, item in enumerate(value)]


def _is_reference(item: Any) -> bool:
    """Whether an item is a reference: untyped, it has an id and, unlike a message, no role or content."""
    if not isinstance(item, dict):
        return False
    is_untyped = "id" in item and not any(item.get(name) for name in ("type", "role", "content"))
    return is_untyped or item.get("type") == "item_reference"


def _id_of(item: Mapping[str, Any], index: int) -> str:
    item_id = item.get("id")
    if not isinstance(item_id, str):
        where = f"input[{index}].id"
        raise InvalidRequest(f"{where}: must be a string, the id of a stored item", param=where)
    return item_id


def flat_name(namespace: str, name: str) -> str:
    """Name of a function in a namespace, as the model is shown it."""
    return f"{namespace}__{name}"
