"""Request bodies and content blocks of /v1/messages."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from mesh.api.message_bodies import (
    MAX_MESSAGES,
    MAX_TOOLS,
    SERVER_TOOLS,
    Arguments,
    CalledFunction,
    Effort,
    FunctionBody,
    ReasoningFields,
    ToolName,
    hosted_warnings,
    note_of,
    refuse_others,
    result_text,
)
from mesh.api.messages.client_tools import described, is_client_tool
from mesh.api.picture_parts import (
    ImageBlock,
    PicturedText,
    PicturePart,
    is_picture,
    joined,
    picture_of,
    placed,
)
from mesh.api.protocol import GenerationBody
from mesh.api.request_parsing import (
    SHOWN_CHARS,
    ExactBody,
    StopList,
    StrictBody,
    TokenLimitOr0,
    Whole,
    as_invalid_request,
    choice_count,
    describe,
    parse_stop,
)
from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mesh.text.reasoning_switches import ReasoningWish

# Blocks about calls that Anthropic ran hold nothing for the model here; their results are named
# `…_tool_result`.
_HOSTED_CALLS: Final = frozenset({"server_tool_use", "mcp_tool_use", "container_upload"})
_RESULT: Final = "_tool_result"


class TextBlock(StrictBody):
    """A text."""

    type: Literal["text"]
    text: str


class ToolUseBlock(StrictBody):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Arguments


class ToolResultBlock(StrictBody):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        Any,
        PlainValidator(
            result_text, json_schema_input_type=str | list[TextBlock | ImageBlock] | dict[str, Any] | None
        ),
    ] = ""
    is_error: bool | None = None

    @property
    def shown(self) -> str | PicturedText:
        """Text for the model."""
        content: str | PicturedText = self.content
        first = content if isinstance(content, str) else content.parts[0]
        if not self.is_error or (isinstance(first, str) and first.startswith("Error")):
            return content
        if isinstance(content, str):
            return f"Error: {content}"
        return content.model_copy(update={"prefix": "Error: "})


class ThinkingBlock(StrictBody):
    """Reasoning of an earlier answer. Signatures are not checked: this server makes none."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(StrictBody):
    """Encrypted reasoning of another server, which says nothing here."""

    type: Literal["redacted_thinking"]


class ToolChangeBlock(StrictBody):
    """A tool that is offered or withdrawn from here on; the model is shown all of `tools` anyhow."""

    type: Literal["tool_addition", "tool_removal"]
    tool: dict[str, Any]


Block = (
    TextBlock
    | PicturePart
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolChangeBlock
)
_KINDS: Final[dict[str, type[Block]]] = {
    "text": TextBlock,
    "tool_addition": ToolChangeBlock,
    "tool_removal": ToolChangeBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
}
_BY_ROLE: Final[dict[str, tuple[type[Block], ...]]] = {
    "system": (TextBlock, ToolChangeBlock),
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ToolUseBlock, ThinkingBlock, RedactedThinkingBlock),
}


class SystemTurn(StrictBody):
    """Instructions within the conversation, if it has any. `output_config` changes nothing."""

    role: Literal["system"]
    content: str | list[TextBlock | ToolChangeBlock] | None = None
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: dict[str, Any] | None = None


class UserTurn(StrictBody):
    """Texts and pictures of the user, and results of calls."""

    role: Literal["user"]
    content: str | Annotated[list[TextBlock | ImageBlock | ToolResultBlock], Field(min_length=1)]


class AssistantTurn(StrictBody):
    """An answer of the model."""

    role: Literal["assistant"]
    content: str | list[TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock]


Turns = Annotated[list[SystemTurn | UserTurn | AssistantTurn], Field(min_length=1)]


class ToolParam(StrictBody):
    """A tool that the client runs."""

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    type: Literal["custom"] | None = None


class AnyToolChoice(ExactBody):
    """Whether tools may or must be called."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedToolChoice(ExactBody):
    """The tool to call."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class Thinking(ExactBody):
    """Whether the model is to reason first, for templates that ask, and whether the client is shown it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Whole | None = None
    # Clients send values that are newer than this server, such as `updates`: only `omitted` hides anything.
    display: str | None = None


class OutputFormat(ExactBody):
    """A JSON schema that the answer must match."""

    type: Literal["json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(ExactBody):
    """Amount of reasoning, and format of the answer."""

    effort: Effort | None = None
    format: OutputFormat | None = None


def parse_choice(value: Any) -> AnyToolChoice | NamedToolChoice | None:
    """The choice of tools."""
    if value is None:
        return None
    kind, name, is_alone = (
        map(value.get, ("type", "name", "disable_parallel_tool_use"))
        if isinstance(value, dict)
        else (None, None, None)
    )
    if value == "":
        return None
    if not isinstance(kind, str) or kind not in {"auto", "any", "none", "tool"}:
        raise PydanticCustomError(
            "tool_choice", 'must be {"type": "auto"}, "any" or "none", or {"type": "tool", "name": …}'
        )
    if is_alone is not None and not isinstance(is_alone, bool):
        raise PydanticCustomError("tool_choice", "has disable_parallel_tool_use, which must be true or false")
    known = {"type", "disable_parallel_tool_use"}
    refuse_others("tool_choice", value, known if kind != "tool" else known | {"name"})
    if kind != "tool":
        return AnyToolChoice(type=kind, disable_parallel_tool_use=is_alone)  # type: ignore[arg-type]
    if not isinstance(name, str):
        raise PydanticCustomError("tool_choice", "of type tool must have the name of a tool")
    return NamedToolChoice(type="tool", name=name, disable_parallel_tool_use=is_alone)


def parse_turns(value: Any) -> list[Any]:
    """A list of turns, which are checked later: the first that is wrong is enough."""
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("messages", "must be a list of one or more messages")
    if len(value) > MAX_MESSAGES:
        raise PydanticCustomError(
            "messages",
            "holds {count} messages: at most {most} work",
            {"count": len(value), "most": MAX_MESSAGES},
        )
    return value


def is_hosted(tool: Any) -> bool:
    """Whether a tool is one that Anthropic's servers run."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind.startswith(SERVER_TOOLS)


def parse_tools(value: Any) -> list[Any]:
    """A list of tools; those that clients run in a form that is not known here are refused by name."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise PydanticCustomError("tools", "must be a list of tools")
    if len(value) > MAX_TOOLS:
        raise PydanticCustomError(
            "tools", "holds {count} tools: at most {most} work", {"count": len(value), "most": MAX_TOOLS}
        )
    for index, tool in enumerate(value):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in (None, "custom", "function") and not (is_client_tool(str(kind)) or is_hosted(tool)):
            raise PydanticCustomError(
                "tools",
                "tool {index} has the type {kind}, of which this server knows bash, text_editor and memory "
                "only: leave the type out, and describe the tool by its input_schema",
                {"index": index, "kind": repr(kind)[:64]},
            )
    return value


class ConversationParams(ReasoningFields, StrictBody):
    """Fields that make the prompt."""

    model_config = ConfigDict(json_schema_extra=describe)

    model: str | None = None
    messages: Annotated[list[Any], PlainValidator(parse_turns, json_schema_input_type=Turns)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[
        list[Any], PlainValidator(parse_tools, json_schema_input_type=list[ToolParam] | None)
    ] = Field(default_factory=list)
    tool_choice: Annotated[
        AnyToolChoice | NamedToolChoice | None,
        PlainValidator(
            parse_choice, json_schema_input_type=AnyToolChoice | NamedToolChoice | Literal[""] | None
        ),
    ] = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def functions(self) -> list[FunctionBody]:
        """The tools as functions.

        Raises:
            InvalidRequest: Naming the tool at fault.
        """
        found = []
        for index, raw in enumerate(self.tools):
            if is_hosted(raw):
                continue
            given = described(raw) if isinstance(raw, dict) else raw
            tool = _checked(ToolParam, given, f"tools[{index}]")
            found.append(
                FunctionBody(
                    name=tool.name,
                    description=tool.description,
                    parameters=tool.input_schema,
                    strict=tool.strict,
                )
            )
        return found

    @property
    def choice(self) -> str | tuple[str] | None:
        """`none`, `auto`, `required`, or the name of the tool to call, as a tuple of one."""
        wanted = self.tool_choice
        if wanted is None:
            return None
        if isinstance(wanted, NamedToolChoice):
            return (wanted.name,)
        return "required" if wanted.type == "any" else wanted.type

    @property
    def is_parallel(self) -> bool | None:
        """Whether several calls are allowed."""
        return None if self.tool_choice is None else not self.tool_choice.disable_parallel_tool_use

    @property
    def effort(self) -> str | None:
        """Amount of reasoning, if it is named."""
        return None if self.output_config is None else self.output_config.effort

    @property
    def reasoning_wish(self) -> ReasoningWish:
        """Wanted amount of reasoning."""
        budget_tokens = None if self.thinking is None else self.thinking.budget_tokens
        return self.wish(effort=self.effort, is_on=self.is_thinking, budget_tokens=budget_tokens)

    @property
    def shows_thinking(self) -> bool:
        """Whether the client is shown the reasoning."""
        return self.thinking is None or self.thinking.display != "omitted"

    @property
    def is_thinking(self) -> bool:
        """Whether the model is to reason first: only where a request says so, as at Anthropic."""
        return self.thinking is not None and self.thinking.type != "disabled"


class CountBody(ConversationParams):
    """`POST /v1/messages/count_tokens`."""


def parse_stops(value: Any) -> tuple[str, ...]:
    """A list of strings that end the answer."""
    if isinstance(value, str) and value:
        raise PydanticCustomError("stop_sequences", "must be a list of strings")
    return parse_stop(value)


class MessagesBody(GenerationBody, ConversationParams):
    """`POST /v1/messages`."""

    # 0 reads the prompt into the caches, and answers nothing.
    max_tokens: TokenLimitOr0
    output_format: OutputFormat | None = None
    stop_sequences: Annotated[
        tuple[str, ...], PlainValidator(parse_stops, json_schema_input_type=StopList | Literal[""] | None)
    ] = ()
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    # Edits of the conversation that Anthropic's servers would make.
    context_management: dict[str, Any] | None = None
    # One answer.
    n: choice_count(1) = None  # type: ignore[valid-type]

    neutral: ClassVar = {"container": (), "functions": (), "mcp_servers": (), "prompt": ()}

    @property
    def schema_format(self) -> OutputFormat | None:
        """The schema that the answer must match.

        Raises:
            InvalidRequest: If there are two.
        """
        inner = None if self.output_config is None else self.output_config.format
        if inner is not None and self.output_format is not None:
            raise InvalidRequest(
                "output_format and output_config.format are the same: send the latter", param="output_format"
            )
        return self.output_format if inner is None else inner

    @property
    def warnings(self) -> tuple[str, ...]:
        """What of the request has no effect."""
        edits = (self.context_management or {}).get("edits")
        # Reasoning of earlier answers is kept, or not, as the model's template has it.
        kinds = [edit.get("type") for edit in edits or () if isinstance(edit, dict)]
        others = [str(kind)[:SHOWN_CHARS] for kind in kinds if not str(kind).startswith("clear_thinking")]
        hosted = ((index, tool["type"]) for index, tool in enumerate(self.tools) if is_hosted(tool))
        told = (f"context_management: {', '.join(others)} has no effect",) if others else ()
        return (*hosted_warnings(hosted), *told)

    @property
    def token_limit(self) -> int | None:
        """Most tokens of the answer."""
        return 0 if self.max_tokens == 0 and self.n_predict in (None, 0) else super().token_limit


def messages_of(turns: list[Any], system: str | list[TextBlock] | None) -> list[dict[str, Any]]:
    """The conversation as messages in the form of chat templates.

    Consecutive turns of one role are one message, as at Anthropic, and so are instructions at the beginning.
    Results of calls come before what the user says in the same turn. Instructions without a text are left
    out, and so are those that a later turn of the user clears.

    Args:
        turns: `messages` of the request.
        system: `system` of the request.

    Raises:
        InvalidRequest: Naming the block at fault, or if nothing is left.
    """
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    instructions = [text for text in texts if text]
    messages: list[dict[str, Any]] = []
    for role, same in itertools.groupby(_shown_turns(turns), key=lambda turn: turn[0]):
        blocks = [block for _role, found in same for block in found]
        if role == "system":
            said = [block.text for block in blocks if isinstance(block, TextBlock) and block.text]
            if messages:
                messages.append({"role": "system", "content": "\n\n".join(said)})
            else:
                instructions += said
        elif role == "user":
            messages += _user_messages(blocks)
        else:
            messages.append(_assistant_message(blocks))
    if instructions:
        messages.insert(0, {"role": "system", "content": "\n\n".join(instructions)})
    if not messages:
        raise InvalidRequest("messages: they say nothing: send a message of the user", param="messages")
    return messages


def _shown_turns(turns: list[Any]) -> Iterator[tuple[str, list[Block]]]:
    """Role and blocks of each turn that the model is shown."""
    last_user = max(
        (index for index, turn in enumerate(turns) if isinstance(turn, dict) and turn.get("role") == "user"),
        default=-1,
    )
    for index, turn in enumerate(turns):
        where = f"messages[{index}]"
        role, blocks = _blocks_of(turn, where)
        if role == "system":
            is_cleared = _is_cleared_by_user(turn, where) and index < last_user
            if is_cleared or not any(isinstance(block, TextBlock) and block.text for block in blocks):
                continue
        yield role, blocks


def _is_cleared_by_user(turn: dict[str, Any], where: str) -> bool:
    clear_at = turn.get("clear_at")
    if clear_at not in (None, "never", "next_user_message"):
        param = f"{where}.clear_at"
        raise InvalidRequest(f"{param}: must be next_user_message or never", param=param)
    return clear_at == "next_user_message"


def _blocks_of(turn: Any, where: str) -> tuple[str, list[Block]]:
    if not isinstance(turn, dict):
        raise InvalidRequest(f"{where}: must be an object", param=where)
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(role, str) or role not in _BY_ROLE:
        raise InvalidRequest(f"{where}.role: must be user, assistant or system", param=f"{where}.role")
    if isinstance(content, str):
        return role, [TextBlock(type="text", text=content)]
    if content is None and ("content" in turn or role == "system"):
        return role, []
    if not isinstance(content, list):
        raise InvalidRequest(
            f"{where}.content: must be a string or a list of content blocks", param=f"{where}.content"
        )
    if not content and role == "user":
        raise InvalidRequest(f"{where}.content: must not be empty", param=f"{where}.content")
    found = (_block(raw, role, where, place) for place, raw in enumerate(content))
    return role, [block for block in found if block is not None]


def _block(raw: Any, role: str, turn: str, place: int) -> Block | None:
    where = f"{turn}.content[{place}]"
    if not isinstance(raw, dict):
        raise InvalidRequest(f"{where}: must be an object", param=where)
    name = raw.get("type")
    if role == "assistant" and isinstance(name, str):
        if name in _HOSTED_CALLS:
            return None
        if name.endswith(_RESULT):
            return TextBlock(type="text", text=note_of(name))
    if role == "user" and is_picture(raw):
        try:
            return picture_of(raw, place).at(turn)
        except PydanticCustomError as error:
            raise InvalidRequest(f"{turn}.content: {error.message()}", param=where) from None
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None or kind not in _BY_ROLE[role]:
        names = ", ".join(name for name, each in _KINDS.items() if each in _BY_ROLE[role])
        raise InvalidRequest(
            f"{where}.type: this server reads texts and pictures only: blocks of the {role} are"
            f" {f'{names}, image' if role == 'user' else names}",
            param=f"{where}.type",
        )
    found: Block = _checked(kind, raw, where)
    if isinstance(found, ToolResultBlock):
        return found.model_copy(update={"content": placed(found.content, where)})
    return found


def _checked(kind: Any, raw: Any, where: str) -> Any:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise as_invalid_request(error, within=where) from None


def _user_messages(blocks: list[Block]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.shown}
        for block in blocks
        if isinstance(block, ToolResultBlock)
    ]
    said = [
        block.text if isinstance(block, TextBlock) else block
        for block in blocks
        if isinstance(block, TextBlock | PicturePart)
    ]
    if said:
        messages.append({"role": "user", "content": joined(said)})
    return messages


def _assistant_message(blocks: list[Block]) -> dict[str, Any]:
    texts = [block.text for block in blocks if isinstance(block, TextBlock) and block.text]
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock) and block.thinking]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": CalledFunction(name=call.name, arguments=call.input).for_template(),
            }
            for call in calls
        ]
    return message
