"""Request bodies of the OpenAI API, tools included.

Fields that are not named here are in `model_extra`, which `mesh.api.request_parsing` checks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationInfo,
)
from pydantic_core import PydanticCustomError

from mesh.api import request_parsing
from mesh.api.reasoning_fields import ReasoningFields, ThinkingBody
from mesh.engine import SpeculationLimits, SpeculationMode
from spanmesh_proto.errors import InvalidRequest
from stages.sampling.sampler import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TOP_LOGPROBS,
    MIN_REPETITION_PENALTY,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.text.reasoning_switches import ReasoningWish

_SHOWN_CHARS = 32
MAX_TOOLS: Final = 256
MAX_NAME_CHARS: Final = 128
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 512
MAX_PROMPTS: Final = 64
MAX_MESSAGES: Final = 4096
MAX_CHOICES: Final = 16
_NO_LIMIT: Final = 2**31 - 1
Prompt = str | tuple[int, ...]
_BiasInput = (
    Annotated[
        dict[
            Annotated[str, Field(pattern=r"^[0-9]{1,18}$")],
            Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)],
        ],
        Field(max_length=MAX_BIASES),
    ]
    | None
)
_SeveralPrompts = Field(min_length=1, max_length=MAX_PROMPTS)

ToolName = Annotated[str, Field(pattern=rf"^[a-zA-Z0-9_.-]{{1,{MAX_NAME_CHARS}}}$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopList = Annotated[list[_StopString], Field(max_length=MAX_STOPS)]

_StopInput = _StopString | StopList | None

_Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]

_PromptInput = str | _Ids | Annotated[list[str], _SeveralPrompts] | Annotated[list[_Ids], _SeveralPrompts]


class StrictBody(BaseModel):
    """Types are strict: a number in quotes is an error, as at OpenAI. Other fields land in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class FunctionBody(StrictBody):
    """A function that the model may call. `parameters` is a JSON schema; without one it takes nothing."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(StrictBody):
    """A tool: functions are the only kind that runs at the client."""

    type: Literal["function"]
    function: FunctionBody


class CalledFunction(StrictBody):
    """Function that an assistant's message called, with its arguments."""

    name: str
    arguments: str

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it: the arguments as values, if they are JSON."""
        try:
            # Line breaks within strings come back from clients that had them from elsewhere.
            arguments = json.loads(self.arguments or "{}", strict=False)
        except (ValueError, RecursionError):
            arguments = self.arguments
        return {"name": self.name, "arguments": arguments}


class ToolCallBody(StrictBody):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class FunctionName(StrictBody):
    """The one function that the model is to call."""

    name: str


class NamedTool(StrictBody):
    """The one tool that the model is to use."""

    type: Literal["function"]
    function: FunctionName


@dataclass(frozen=True)
class AllowedTools:
    """Functions of a request among which an answer may choose."""

    mode: Literal["auto", "required"]
    """`auto` or `required`."""
    names: tuple[str, ...]
    """Their names."""


# `none`, `auto`, `required`, some of the functions, or the name of the one to call, as a tuple of one.
ChosenTools = str | tuple[str] | AllowedTools | None


class AllowedToolsList(StrictBody):
    """Tools that may be used, of those of the request."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedToolsBody(StrictBody):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolsList


ToolChoiceInput = Literal["none", "auto", "required"] | NamedTool | AllowedToolsBody | None


class StreamOptions(StrictBody):
    """Contents of a stream beside text."""

    include_usage: bool | None = None


class SpeculationBody(BaseModel):
    """Limits of this request's speculation; ours alone, so that a field with another name is a slip."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    mode: SpeculationMode | None = None
    max_width: Annotated[int, Field(ge=0)] | None = None
    depth: Annotated[int, Field(ge=1)] | None = None

    def as_limits(self) -> SpeculationLimits:
        """As the engine takes it."""
        return SpeculationLimits(self.mode, self.max_width, self.depth)


class TextPart(StrictBody):
    """A piece of a message; for the API's document."""

    type: Literal["text"]
    text: str


class JsonSchemaBody(StrictBody):
    """A named schema; OpenAI's `strict` makes no difference, as answers always keep to it."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[Any, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormatBody(StrictBody):
    """Form that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaBody | None = None


def between(least: float, most: float, note: str = "") -> AfterValidator:
    """A validator for a field with an optional number.

    Args:
        least: Smallest permitted value.
        most: Largest permitted value.
        note: Addition to the error, such as the value that switches the field off.
    """

    def check(value: float | None) -> float | None:
        if value is not None and not least <= value <= most:
            raise PydanticCustomError(
                "range",
                "{value} is out of range: send {least} to {most}{note}",
                {
                    "value": str(value)[:_SHOWN_CHARS],
                    "least": f"{least:g}",
                    "most": f"{most:g}",
                    "note": note,
                },
            )
        return value

    return AfterValidator(check)


def parse_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias; empty for null. Whether the ids exist is checked later.

    Raises:
        PydanticCustomError: Naming the entry at fault.
    """
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", 'must be an object such as {"42": -100}')
    if len(value) > MAX_BIASES:
        raise PydanticCustomError(
            "logit_bias",
            "has {count} entries: at most {most} work",
            {"count": len(value), "most": MAX_BIASES},
        )
    pairs = tuple((_token(key), _bias(key, bias)) for key, bias in value.items())
    if len({token for token, _ in pairs}) < len(pairs):
        raise PydanticCustomError("logit_bias", "has a token twice: give each once")
    return pairs


def _token(key: str) -> int:
    digits = key.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 19):
        raise PydanticCustomError(
            "logit_bias", "{key} is not a token id: write ids in digits", {"key": repr(key[:_SHOWN_CHARS])}
        )
    return int(key)


def _bias(key: str, bias: Any) -> float:
    is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
    if not is_number or not -MAX_BIAS <= bias <= MAX_BIAS:
        shown = repr(bias)[:_SHOWN_CHARS] if is_number else "no number"
        raise PydanticCustomError(
            "logit_bias",
            "of token {key} is {bias}: send a number from -100 (never) to 100 (always)",
            {"key": key, "bias": shown},
        )
    return float(bias)


def parse_tool_choice(value: Any) -> ChosenTools:
    """The choice of tools of a chat."""
    if value is None or (isinstance(value, str) and value in {"none", "auto", "required"}):
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        if (name := _function_name(value)) is not None:
            return (name,)
    elif isinstance(value, dict) and value.get("type") == "allowed_tools":
        given = value.get("allowed_tools")
        if isinstance(given, dict):
            return parse_allowed_tools(given, _function_name)
    raise PydanticCustomError(
        "tool_choice",
        'must be "none", "auto", "required", {"type": "function", "function": {"name": …}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}',
    )


def parse_allowed_tools(given: dict[str, Any], name_of: Callable[[Any], str | None]) -> AllowedTools:
    """Functions that may be called.

    Args:
        given: Object with `mode` and `tools`.
        name_of: Returns the name of a function in `tools`; None if it has none.
    """
    mode, tools = given.get("mode"), given.get("tools")
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
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _in_document(least: float, most: float) -> Any:
    """Range that a validator of ours checks, for the API's document."""
    return Field(json_schema_extra={"minimum": least, "maximum": most})


Penalty = Annotated[
    float | None,
    between(-MAX_PENALTY, MAX_PENALTY, "; 0 switches it off"),
    _in_document(-MAX_PENALTY, MAX_PENALTY),
]
RepetitionPenalty = Annotated[
    float | None,
    between(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY, "; 1 switches it off"),
    _in_document(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
]
NumTopLogprobs = Annotated[int | None, between(0, MAX_TOP_LOGPROBS), _in_document(0, MAX_TOP_LOGPROBS)]


def parse_stop(value: Any) -> tuple[str, ...]:
    """One stop string or a list of them, as a tuple."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise PydanticCustomError(
            "stop", "holds {count} strings: at most {most} work", {"count": len(stops), "most": MAX_STOPS}
        )
    if any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise PydanticCustomError(
            "stop", "must hold strings of 1 to {most} characters", {"most": MAX_STOP_CHARS}
        )
    return tuple(stops)


def parse_content(value: Any, message: ValidationInfo) -> str:
    """A message's text, given as a string or a list of text parts; an assistant may have said nothing."""
    if value is None and message.data.get("role") == "assistant":
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    return "\n".join(_part_text(part, index) for index, part in enumerate(value))


class Message(StrictBody):
    """One turn of a conversation. Fields beyond these go to the template as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Any,
        PlainValidator(parse_content, json_schema_input_type=str | list[TextPart] | None),
        Field(validate_default=True),
    ] = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it: `developer` is OpenAI's newer word for `system`."""
        role = "system" if self.role == "developer" else self.role
        found = {**(self.model_extra or {}), "role": role, "content": self.content}
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


def parse_schema(value: Any) -> Any:
    """A JSON Schema as it came; what is in it, others look at."""
    if value is not None and not isinstance(value, dict | bool):
        raise PydanticCustomError("schema", "must be a JSON Schema: an object, true or false")
    return value


def parse_prediction(value: Any) -> str:
    """An expected answer: a string, or a list of text parts that follow one another without a gap."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    return "".join(_part_text(part, index) for index, part in enumerate(value))


class PredictionBody(StrictBody):
    """Whole answer that the client expects (OpenAI's predicted outputs)."""

    type: Literal["content"]
    content: Annotated[str, PlainValidator(parse_prediction, json_schema_input_type=str | list[TextPart])]


class GenerationBody(StrictBody):
    """Fields of both endpoints."""

    model_config = ConfigDict(json_schema_extra=request_parsing.describe)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    # llama.cpp's name of it; -1 sets no limit.
    n_predict: Annotated[int, Field(ge=-1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    frequency_penalty: Penalty = None
    presence_penalty: Penalty = None
    repetition_penalty: RepetitionPenalty = None
    repeat_penalty: RepetitionPenalty = None
    repeat_last_n: Annotated[
        int | None, between(-1, 2**31 - 1, "; -1 counts all, 0 none"), _in_document(-1, 2**31 - 1)
    ] = None
    logit_bias: Annotated[
        tuple[tuple[int, float], ...], PlainValidator(parse_logit_bias, json_schema_input_type=_BiasInput)
    ] = ()
    stop: Annotated[tuple[str, ...], PlainValidator(parse_stop, json_schema_input_type=_StopInput)] = ()
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    speculation: SpeculationBody | None = None
    prediction: PredictionBody | None = None
    response_format: ResponseFormatBody | None = None
    json_schema: Annotated[
        Any, PlainValidator(parse_schema, json_schema_input_type=dict[str, Any] | bool | None)
    ] = None
    grammar: str | None = None
    return_token_ids: bool | None = None
    return_progress: bool | None = None
    n: Annotated[int | None, between(1, MAX_CHOICES), _in_document(1, MAX_CHOICES)] = None

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        """Most tokens of the answer, if the request names a number.

        Raises:
            InvalidRequest: If `max_tokens` and `n_predict` differ, or nothing would be answered.
        """
        theirs = _NO_LIMIT if self.n_predict == -1 else self.n_predict
        if None not in (self.max_tokens, theirs) and self.max_tokens != theirs:
            raise InvalidRequest(
                f"max_tokens is {self.max_tokens} and n_predict {self.n_predict}: they are the same setting,"
                " send one of them",
                param="n_predict",
            )
        limit = theirs if self.max_tokens is None else self.max_tokens
        if limit == 0 and not self.has_echo:
            name = "n_predict" if self.max_tokens is None else "max_tokens"
            raise InvalidRequest(
                f"{name} is 0, so there would be no answer: send at least 1, or echo to have the prompt back",
                param=name,
            )
        return limit

    @property
    def has_echo(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's tokens have logprobs, too."""
        return False

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of likeliest tokens to report beside each token's logprob; None reports nothing."""
        return None


def note_of(part_type: object) -> str:
    """Text for the model in place of a tool's result that is no text, such as a screenshot.

    A client cannot choose what its tools return: a refusal would end its conversation.

    Args:
        part_type: The type that the client gave the part.
    """
    name = part_type if isinstance(part_type, str) and part_type.isidentifier() else "part"
    return f"[{name[:_SHOWN_CHARS]} left out: this model reads text only]"


def _part_text(part: Any, index: int) -> str:
    if not isinstance(part, dict):
        raise PydanticCustomError("content", "part {index} must be an object", {"index": index})
    if part.get("type") != "text":
        raise PydanticCustomError(
            "content", "part {index} is not of type text: this server accepts text only", {"index": index}
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise PydanticCustomError("content", "part {index} has no text, a string", {"index": index})
    return text


def parse_prompts(value: Any) -> tuple[Prompt, ...]:
    """The four shapes of a completion's prompt; see `parse_several`."""
    return parse_several(value, MAX_PROMPTS, "prompt")


def parse_several(value: Any, most: int, kind: str) -> tuple[Prompt, ...]:
    """One or several of what a model reads: text, texts, token ids, lists of token ids.

    Args:
        value: The field, as it came.
        most: How many there may be.
        kind: Type of the error.

    Raises:
        PydanticCustomError: If it has none of these shapes, or there are more.
    """
    if isinstance(value, str):
        return (value,)
    if _are_ids(value):
        return (tuple(value),)
    if isinstance(value, list) and 0 < len(value) <= most:
        if all(isinstance(prompt, str) for prompt in value):
            return tuple(value)
        if all(_are_ids(prompt) for prompt in value):
            return tuple(tuple(prompt) for prompt in value)
    raise PydanticCustomError(
        kind,
        "must be a string, a list of token ids, or a list of 1 to {most} of either",
        {"most": most},
    )


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    )


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

    # The first one that is wrong is enough: thousands of them would take seconds to tell.
    messages: Annotated[
        list[Message],
        FailFast(),
        Field(min_length=1, json_schema_extra={"maxItems": MAX_MESSAGES}),
        BeforeValidator(refuse_too_many_messages),
    ]
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        ChosenTools,
        PlainValidator(parse_tool_choice, json_schema_input_type=ToolChoiceInput),
    ] = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    thinking: ThinkingBody | None = None

    @property
    def budget_field(self) -> str | None:
        """Name of the field with the most tokens of reasoning; None without one."""
        is_given = self.thinking is not None and self.thinking.budget_tokens is not None
        return super().budget_field or ("thinking.budget_tokens" if is_given else None)

    @property
    def reasoning_wish(self) -> ReasoningWish:
        """Wanted amount of reasoning."""
        said = self.thinking
        if said is None:
            return self.wish(effort=self.reasoning_effort)
        is_on = None if said.type == "auto" else said.type != "disabled"
        return self.wish(effort=self.reasoning_effort, is_on=is_on, budget_tokens=said.budget_tokens)


class ChatBody(GenerationBody, ConversationBody):
    """`POST /v1/chat/completions`."""

    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    reasoning_format: Literal["auto", "none", "deepseek"] | None = None
    logprobs: bool | None = None
    top_logprobs: NumTopLogprobs = None

    @property
    def token_limit(self) -> int | None:
        """Most tokens of the answer: the newer of the two fields goes first."""
        newer = self.max_completion_tokens
        return super().token_limit if newer is None else newer

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of likeliest tokens to report beside each token's logprob; None reports nothing.

        Raises:
            InvalidRequest: If `top_logprobs` asks for some and `logprobs` does not.
        """
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest(
                f"top_logprobs is {self.top_logprobs}, but logprobs is not true: send both or neither",
                param="top_logprobs",
            )
        return (self.top_logprobs or 0) if self.logprobs else None


def none_if_false(value: Any) -> Any:
    """`false` where a number belongs, as clients of both endpoints send it to ask for nothing."""
    return None if value is False else value


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(parse_prompts, json_schema_input_type=_PromptInput)]
    echo: bool | None = None
    logprobs: Annotated[NumTopLogprobs, BeforeValidator(none_if_false)] = None
    # 0 answers with the prompt alone, if `echo` asks for it.
    max_tokens: Annotated[int, Field(ge=0)] | None = None

    @property
    def has_echo(self) -> bool:
        """Whether the answer begins with the prompt."""
        return bool(self.echo)

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's tokens have logprobs, too."""
        return self.has_echo and self.logprobs is not None

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of likeliest tokens to report beside each token's logprob; None reports nothing."""
        return self.logprobs
