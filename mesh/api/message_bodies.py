"""Messages, tools and amount of reasoning in request bodies, in other servers' shapes as well."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from mesh.api.picture_parts import (
    ImageUrlPart,
    PicturedText,
    PicturePart,
    is_picture,
    joined,
    picture_of,
    placed,
)
from mesh.api.request_parsing import AS_WHOLE, SHOWN_CHARS, ExactBody, StrictBody, describe, none_if_minus_one
from mesh.text.conversation_repair import THOUGHT_FIELDS
from mesh.text.reasoning_switches import ReasoningWish
from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAX_TOOLS: Final = 256
MAX_NAME_CHARS: Final = 128
MAX_MESSAGES: Final = 4096
SERVER_TOOLS: Final = (
    *("web_search", "web_fetch", "file_search", "code_interpreter", "code_execution", "image_generation"),
    *("mcp", "tool_search"),
)
"""Beginnings of the types of tools that servers of OpenAI and Anthropic run; most go on with a date."""
FREE_TEXT: Final = "input"
"""The one parameter of a custom tool, as the model is shown it."""
CONTINUES: Final = ("prefix", "partial")
"""Fields of a last message that the answer goes on with: DeepSeek's and Mistral's, Qwen's and Moonshot's."""
# Compared, not looked up: a client may send a list or an object in their place.
_TEXT_TYPES: Final = ("text", "input_text", "output_text")
# Parts of an assistant's message that hold reasoning.
_THOUGHT_TYPES: Final = ("thinking", "reasoning")
# The default of `content`: a message without one is a mistake, unlike one with null.
_ABSENT: Final = False

ToolName = Annotated[str, Field(pattern=rf"^[a-zA-Z0-9_.:/-]{{1,{MAX_NAME_CHARS}}}$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_Tokens = Annotated[Annotated[int, Field(ge=0), AS_WHOLE] | None, BeforeValidator(none_if_minus_one)]


class ThinkingBody(ExactBody):
    """Whether the model is to reason, as Z.ai, DeepSeek and Moonshot have it in chats."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: _Tokens = None


class ReasoningObject(ExactBody):
    """Amount of reasoning in chats, as OpenRouter has it, and whether the client is shown it."""

    effort: Effort | None = None
    max_tokens: _Tokens = None
    enabled: bool | None = None
    exclude: bool | None = None


class ReasoningFields(BaseModel):
    """Amount of reasoning; the names are those of Qwen's and vLLM's APIs."""

    enable_thinking: bool | None = None
    thinking_budget: _Tokens = None
    thinking_token_budget: _Tokens = None

    @property
    def budget_field(self) -> str | None:
        """Name of the field with the most tokens of reasoning; None without one."""
        names = ("thinking_budget", "thinking_token_budget")
        return next((name for name in names if getattr(self, name) is not None), None)

    def wish(
        self, *, effort: str | None = None, is_on: bool | None = None, budget_tokens: int | None = None
    ) -> ReasoningWish:
        """All that is said of it.

        Args:
            effort: Amount by the API's own field.
            is_on: Whether there is any, likewise.
            budget_tokens: Most tokens, likewise.
        """
        own = (self.thinking_budget, self.thinking_token_budget, budget_tokens)
        return ReasoningWish(
            is_on if self.enable_thinking is None else self.enable_thinking,
            effort,
            next((number for number in own if number is not None), None),
        )


class FunctionBody(StrictBody):
    """A function that the model may call. `parameters` is a JSON schema; without one it takes nothing."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FreeTextFunction(FunctionBody):
    """A custom tool as a function, which is how the model is shown it."""

    lark: str | None = None
    """Grammar of its text in Lark's notation, if it has one."""


class ToolBody(StrictBody):
    """A function, which runs at the client as all tools do."""

    type: Literal["function"] = "function"
    function: FunctionBody


class TextGrammar(ExactBody):
    """Grammar of a free text."""

    syntax: Literal["lark", "regex"]
    definition: str


class FreeText(ExactBody):
    """Input of a custom tool: any text, or one that a grammar describes."""

    type: Literal["text", "grammar"]
    grammar: TextGrammar | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_responses(cls, value: Any) -> Any:
        """The flat form of responses as the nested one of chats."""
        if not isinstance(value, dict) or value.get("grammar") is not None or "definition" not in value:
            return value
        rest = {name: each for name, each in value.items() if name not in TextGrammar.model_fields}
        return {**rest, "grammar": {name: value.get(name) for name in TextGrammar.model_fields}}

    @model_validator(mode="after")
    def _require_its_own(self) -> FreeText:
        require_grammar(self.type, is_given=self.grammar is not None)
        return self


class CustomFunction(StrictBody):
    """A tool that takes one text."""

    name: ToolName
    description: str | None = None
    format: FreeText | None = None

    @property
    def function(self) -> FreeTextFunction:
        """The tool as a function."""
        grammar = None if self.format is None else self.format.grammar
        text: dict[str, Any] = {"type": "string"}
        description, lark = self.description, None
        if grammar is not None and grammar.syntax == "regex":
            text["pattern"] = f"^(?:{grammar.definition})$"
        elif grammar is not None:
            lark = grammar.definition
            shown = f"The input follows this Lark grammar:\n{lark}"
            description = shown if description is None else f"{description}\n\n{shown}"
        return FreeTextFunction(
            name=self.name,
            description=description,
            parameters={"type": "object", "properties": {FREE_TEXT: text}, "required": [FREE_TEXT]},
            strict=grammar is not None or None,
            lark=lark,
        )


class CustomToolBody(StrictBody):
    """A custom tool of a chat."""

    type: Literal["custom"]
    custom: CustomFunction

    @property
    def function(self) -> FunctionBody:
        """The tool as a function."""
        return self.custom.function


class HostedTool(StrictBody):
    """A tool that a server of its maker would run: it is passed over."""

    type: Annotated[str, Field(pattern=f"^({'|'.join(SERVER_TOOLS)})")]


class FunctionName(ExactBody):
    """The one function that the model is to call."""

    name: str


class NamedTool(ExactBody):
    """The one tool that the model is to use."""

    type: Literal["function"]
    function: FunctionName


class NamedCustomTool(ExactBody):
    """The one custom tool that the model is to use."""

    type: Literal["custom"]
    custom: FunctionName


@dataclass(frozen=True)
class AllowedTools:
    """Functions of a request among which an answer may choose."""

    mode: Literal["auto", "required"]
    """`auto` or `required`."""
    names: tuple[str, ...]
    """Their names."""


# `none`, `auto`, `required`, some of the functions, or the name of the one to call, as a tuple of one.
ChosenTools = str | tuple[str] | AllowedTools | None


class AllowedToolsList(ExactBody):
    """Tools that may be used, of those of the request."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool | NamedCustomTool], Field(min_length=1)]


class AllowedToolsBody(ExactBody):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolsList


ToolChoiceInput = (
    Literal["", "none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedToolsBody | None
)


class TextPart(StrictBody):
    """A piece of a message; for the API's document."""

    type: Literal["text"]
    text: str


def hosted_warnings(types: Iterable[tuple[int, str]]) -> tuple[str, ...]:
    """What is told of tools that are passed over.

    Args:
        types: Place of each in `tools`, and its type.
    """
    return tuple(
        f"tools[{index}]: {kind[:SHOWN_CHARS]} is left out, as this server runs no tools"
        for index, kind in types
    )


def require_grammar(kind: str, *, is_given: bool) -> None:
    """Check that the format of a custom tool has a grammar if, and only if, it is one.

    Raises:
        PydanticCustomError: If not.
    """
    if is_given is not (kind == "grammar"):
        raise PydanticCustomError(
            "format", "has a grammar by its type or by its fields alone: send both, or neither"
        )


def wrong_type(kind: str, reason: str) -> ValidationError:
    """The error of an object with a type that does not work here.

    Args:
        kind: The type.
        reason: Reason, and the remedy.
    """
    told = PydanticCustomError(
        "type", "{kind}: {reason}", {"kind": repr(kind)[:SHOWN_CHARS], "reason": reason}
    )
    error = InitErrorDetails(type=told, loc=("type",), input=kind)
    return ValidationError.from_exception_data("tool", [error])


def parse_tool(value: Any) -> ToolBody | CustomToolBody | HostedTool:
    """One entry of `tools` of a chat."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "custom":
        return CustomToolBody.model_validate(value)
    if isinstance(kind, str) and kind.startswith(SERVER_TOOLS):
        return HostedTool.model_validate(value)
    if isinstance(kind, str) and kind != "function":
        raise wrong_type(kind, "this server runs no tools, send those of type function or custom")
    return ToolBody.model_validate(value)


_AnyTool = Annotated[
    Any, PlainValidator(parse_tool, json_schema_input_type=ToolBody | CustomToolBody | HostedTool)
]


def parse_arguments(value: Any) -> Any:
    """Arguments of a call in a conversation: a JSON text, or what it stands for."""
    if value is None:
        return ""
    if not isinstance(value, str | dict):
        raise PydanticCustomError("arguments", "must be a JSON text or an object")
    return value


Arguments = Annotated[
    Any, PlainValidator(parse_arguments, json_schema_input_type=str | dict[str, Any] | None)
]


class CalledFunction(StrictBody):
    """Function that an assistant's message called, with its arguments."""

    name: str
    arguments: Arguments

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it: the arguments as values, if they are JSON."""
        arguments = self.arguments
        if isinstance(arguments, str):
            # Line breaks within strings come back from clients that had them from elsewhere.
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments or "{}", strict=False)
        return {"name": self.name, "arguments": arguments}


class ToolCallBody(StrictBody):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _with_function(cls, value: Any) -> Any:
        """A call of a custom tool as one of a function with the text as its only argument."""
        custom = value.get("custom") if isinstance(value, dict) else None
        if not isinstance(custom, dict):
            return value
        text = custom.get("input")
        called = {"name": custom.get("name"), "arguments": {FREE_TEXT: "" if text is None else text}}
        return {**value, "function": called}


def parse_tool_choice(value: Any) -> ChosenTools:
    """The choice of tools of a chat."""
    if value in (None, ""):
        return None
    if isinstance(value, str) and value in {"none", "auto", "required"}:
        return value
    if isinstance(value, dict) and value.get("type") in ("function", "custom"):
        if (name := _function_name(value)) is not None:
            return (name,)
    elif isinstance(value, dict) and value.get("type") == "allowed_tools":
        given = value.get("allowed_tools")
        if isinstance(given, dict):
            refuse_others("tool_choice", value, {"type", "allowed_tools"})
            return parse_allowed_tools(given, _function_name)
    raise PydanticCustomError(
        "tool_choice",
        'must be "none", "auto", "required", {"type": "function", "function": {"name": …}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}',
    )


def refuse_others(kind: str, value: dict[str, Any], known: set[str]) -> None:
    """Check that an object of a choice has known fields only.

    Raises:
        PydanticCustomError: Naming the first other one.
    """
    for name, each in value.items():
        if name not in known and each is not None:
            # Half a surrogate pair would be an error of its own.
            shown = name[:SHOWN_CHARS].encode(errors="backslashreplace").decode()
            raise PydanticCustomError(
                kind, "has a field {name}, which is not supported: leave it out", {"name": shown}
            )


def parse_allowed_tools(given: dict[str, Any], name_of: Callable[[Any], str | None]) -> AllowedTools:
    """Functions that may be called.

    Args:
        given: Object with `mode` and `tools`.
        name_of: Returns the name of a function in `tools`; None if it has none.
    """
    mode, tools = given.get("mode"), given.get("tools")
    refuse_others("tool_choice", given, {"type", "mode", "tools"})
    names = [name_of(tool) for tool in tools] if isinstance(tools, list) else []
    known = tuple(name for name in names if name is not None)
    if mode not in ("auto", "required") or not known or len(known) < len(names):
        raise PydanticCustomError(
            "tool_choice",
            'of type allowed_tools must have a mode, "auto" or "required", and one or more functions as tools'
            ", each with its name",
        )
    return AllowedTools(mode, known)


def _function_name(tool: Any) -> str | None:
    kind = _type_of(tool)
    if kind not in ("function", "custom"):
        return None
    function = tool.get(kind)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    refuse_others("tool_choice", tool, {"type", kind})
    refuse_others("tool_choice", function, {"name"})
    name: str = function["name"]
    return name


def parse_content(value: Any, message: ValidationInfo) -> str | PicturedText:
    """A message's text, given as a string or a list of parts; null says nothing.

    The result of a tool may be any JSON, and has a note in place of a part that is no text and no picture.
    """
    role = message.data.get("role")
    if value is None or (value is _ABSENT and role in ("assistant", "tool")):
        return ""
    if isinstance(value, str):
        return value
    if role == "tool" and value is not _ABSENT:
        return result_text(value)
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    is_answer = role == "assistant"
    shown = ((part, index) for index, part in enumerate(value) if not (is_answer and is_thought(part)))
    return parts_joined(shown, has_pictures=role == "user")


def parts_joined(
    parts: Iterable[tuple[Any, int]], *, has_pictures: bool, wanted: str = "text"
) -> str | PicturedText:
    """Text of a message's parts, each on a line of its own except beside pictures.

    Args:
        parts: The parts, any JSON, each with its index.
        has_pictures: Whether the message may have pictures.
        wanted: Types of parts with text that the API knows, for errors.

    Raises:
        PydanticCustomError: Naming the part at fault.
    """

    def read(part: Any, index: int) -> str | PicturePart:
        if not is_picture(part):
            return part_text(part, index, wanted)
        if not has_pictures:
            raise PydanticCustomError(
                "content",
                "part {index} is a picture: these are read in messages of the user and in results of tools",
                {"index": index},
            )
        return picture_of(part, index)

    return joined(read(part, index) for part, index in parts)


class Message(StrictBody):
    """One turn of a conversation. Fields beyond these go to the template as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Any,
        PlainValidator(parse_content, json_schema_input_type=str | list[TextPart | ImageUrlPart] | None),
        Field(validate_default=True, json_schema_extra=lambda schema: schema.pop("default", None)),
    ] = _ABSENT
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_elsewhere(cls, value: Any) -> Any:
        """Shapes of other servers that mean the same."""
        if not isinstance(value, dict):
            return value
        fields = dict(value)
        if fields.get("role") == "function":
            fields["role"] = "tool"
        call = fields.pop("function_call", None)
        if call is not None and not fields.get("tool_calls"):
            fields["tool_calls"] = [{"type": "function", "function": call}]
        if fields.get("role") == "assistant":
            thoughts = [fields[name] for name in THOUGHT_FIELDS if isinstance(fields.get(name), str)]
            thoughts += thoughts_of(fields.get("content"))
            if thoughts and fields.get("reasoning_content") is None:
                fields["reasoning_content"] = thoughts[0]
            if not fields.get("content") and isinstance(fields.get("refusal"), str):
                fields["content"] = fields["refusal"]
        return fields

    @property
    def is_continued(self) -> bool:
        """Whether the answer is to go on with it."""
        return any((self.model_extra or {}).get(name) is True for name in CONTINUES)

    def for_template(self, where: str) -> dict[str, Any]:
        """As chat templates know it: `developer` is OpenAI's newer word for `system`.

        Args:
            where: Path of the message in the request.
        """
        role = "system" if self.role == "developer" else self.role
        content = self.content if isinstance(self.content, str) else placed(self.content, where)
        found = {**(self.model_extra or {}), "role": role, "content": content}
        if self.tool_calls:
            found["tool_calls"] = [
                {"id": call.id or "", "type": "function", "function": call.function.for_template()}
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            found["tool_call_id"] = self.tool_call_id
        if self.reasoning_content is not None:
            found["reasoning_content"] = self.reasoning_content
        return found


def is_thought(part: Any) -> bool:
    """Whether a part of a message is reasoning."""
    return isinstance(part, dict) and part.get("type") in _THOUGHT_TYPES


def thoughts_of(content: Any) -> list[str]:
    """Reasoning in the parts of a message, joined; empty if there is none."""
    found = []
    for part in content if isinstance(content, list) else ():
        text = part.get("thinking", part.get("text")) if is_thought(part) else None
        texts = text if isinstance(text, list) else [text]
        found += [each.get("text") if isinstance(each, dict) else each for each in texts]
    said = [text for text in found if isinstance(text, str) and text]
    return ["\n".join(said)] if said else []


def result_text(value: Any) -> str | PicturedText:
    """A tool's result: its texts and pictures, with a note for each other part, or else as JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(_type_of(part), str) for part in value):
        return joined(_result_part(part, index) for index, part in enumerate(value))
    return json.dumps(value, ensure_ascii=False)


def _type_of(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else None


def _result_part(part: dict[str, Any], index: int) -> str | PicturePart:
    if part["type"] in _TEXT_TYPES:
        return part_text(part, index)
    if not is_picture(part):
        return note_of(part["type"])
    try:
        return picture_of(part, index)
    except PydanticCustomError as error:
        # A client cannot choose what its tools return: a note tells the model, and nothing is refused.
        return PicturePart(text="", kind=part["type"], fault=error.message())


def note_of(part_type: object, reason: str = "this model reads text only") -> str:
    """Text for the model in place of a part of a tool's result that it is not shown.

    A client cannot choose what its tools return: a refusal would end its conversation.

    Args:
        part_type: The type that the client gave the part.
        reason: Reason.
    """
    name = part_type if isinstance(part_type, str) and part_type.isidentifier() else "part"
    return f"[{name[:SHOWN_CHARS]} left out: {reason}]"


def part_text(part: Any, index: int, wanted: str = "text") -> str:
    """Text of a part of a message.

    Args:
        part: The part, any JSON.
        index: Its index in the message, for errors.
        wanted: Types of parts that the API knows, for errors.

    Raises:
        PydanticCustomError: If it is no text.
    """
    if not isinstance(part, dict):
        raise PydanticCustomError("content", "part {index} must be an object", {"index": index})
    kind = part.get("type")
    if kind != "refusal" and kind not in _TEXT_TYPES:
        raise PydanticCustomError(
            "content",
            "part {index} is not of type {wanted}: this server accepts texts and pictures only",
            {"index": index, "wanted": wanted},
        )
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise PydanticCustomError("content", "part {index} has no text, a string", {"index": index})
    return text


def refuse_too_many_messages(value: Any) -> Any:
    """A conversation as it came, unless it is longer than any that is read."""
    if isinstance(value, list) and len(value) > MAX_MESSAGES:
        raise PydanticCustomError(
            "messages",
            "holds {count} messages: at most {most} work",
            {"count": len(value), "most": MAX_MESSAGES},
        )
    return value


class ConversationBody(ReasoningFields, StrictBody):
    """Fields that make the prompt of a chat."""

    model_config = ConfigDict(json_schema_extra=describe)

    # The first one that is wrong is enough: thousands of them would take seconds to tell.
    messages: Annotated[
        list[Message],
        FailFast(),
        Field(min_length=1, json_schema_extra={"maxItems": MAX_MESSAGES}),
        BeforeValidator(refuse_too_many_messages),
    ]
    tools: Annotated[list[_AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        ChosenTools,
        PlainValidator(parse_tool_choice, json_schema_input_type=ToolChoiceInput),
    ] = None
    # What OpenAI had before `tools`; an answer then has its `function_call`.
    functions: Annotated[list[FunctionBody], Field(max_length=MAX_TOOLS)] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningObject | None = None
    thinking: ThinkingBody | None = None

    @property
    def budget_field(self) -> str | None:
        """Name of the field with the most tokens of reasoning; None without one."""
        if (found := super().budget_field) is not None:
            return found
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            return "thinking.budget_tokens"
        return "reasoning.max_tokens" if self._reasoning.max_tokens is not None else None

    @property
    def effort_field(self) -> str | None:
        """Name of the field with the amount of reasoning as a word; None without one.

        Raises:
            InvalidRequest: If there are two, and they differ.
        """
        ours, theirs = self.reasoning_effort, self._reasoning.effort
        if ours is not None and theirs not in (None, ours):
            raise InvalidRequest(
                f"reasoning.effort is {theirs} and reasoning_effort {ours}: they are the same setting, send"
                " one of them",
                param="reasoning.effort",
            )
        return "reasoning_effort" if ours is not None else "reasoning.effort" if theirs is not None else None

    @property
    def reasoning_wish(self) -> ReasoningWish:
        """Wanted amount of reasoning."""
        said, of_object = self.thinking, self._reasoning
        is_on, budget_tokens = of_object.enabled, of_object.max_tokens
        if said is not None:
            is_on = is_on if said.type == "auto" else said.type != "disabled"
            budget_tokens = budget_tokens if said.budget_tokens is None else said.budget_tokens
        effort = self.reasoning_effort or of_object.effort
        return self.wish(effort=effort, is_on=is_on, budget_tokens=budget_tokens)

    @property
    def _reasoning(self) -> ReasoningObject:
        return self.reasoning or ReasoningObject()

    @property
    def has_functions(self) -> bool:
        """Whether the request has `functions` in place of `tools`.

        Raises:
            InvalidRequest: If it has both.
        """
        if self.functions and self.tools:
            raise InvalidRequest(
                "functions and tools are the same: send tools alone, with tool_choice", param="functions"
            )
        return bool(self.functions)

    @property
    def offered(self) -> list[FunctionBody]:
        """All functions that the request offers."""
        if self.has_functions:
            return list(self.functions or ())
        return [tool.function for tool in self.tools or () if not isinstance(tool, HostedTool)]

    @property
    def choice(self) -> ChosenTools:
        """Which of them may or must be called."""
        wanted = self.function_call
        if not self.has_functions and wanted in (None, "none", "auto"):
            return self.tool_choice
        return (wanted.name,) if isinstance(wanted, FunctionName) else wanted

    @property
    def custom_names(self) -> frozenset[str]:
        """Names of custom tools."""
        tools = self.tools or ()
        return frozenset(tool.custom.name for tool in tools if isinstance(tool, CustomToolBody))
