"""The body of `POST /v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from mesh.api.ranges import between
from mesh.api.responses.items import ItemsInput
from mesh.api.schemas import MAX_MESSAGES, Effort, GenerationBody, NumTopLogprobs
from mesh.api.strict_body import StrictBody
from mesh.api.tool_schemas import MAX_TOOLS, FunctionBody

MAX_METADATA: Final = 16
WANTS_LOGPROBS: Final = "message.output_text.logprobs"


def parse_input(value: Any) -> str | list[Any]:
    """A text or a list of items; the items are looked at later."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("input", "must be a string or a list of one or more items")
    if len(value) > MAX_MESSAGES:
        raise PydanticCustomError(
            "input", "holds {count} items: at most {most} work", {"count": len(value), "most": MAX_MESSAGES}
        )
    return value


def parse_choice(value: Any) -> str | tuple[str] | None:
    """`none`, `auto`, `required`, or the name of the one function to call, as a tuple of one."""
    if value is None or (isinstance(value, str) and value in {"none", "auto", "required"}):
        return value
    if isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("name"), str):
        return (value["name"],)
    raise PydanticCustomError(
        "tool_choice", 'must be "none", "auto", "required" or {"type": "function", "name": …}'
    )


class _Tool(StrictBody):
    type: Literal["function"]


class ResponsesTool(FunctionBody, _Tool):
    """A function that the model may call: the only kind of tool, since nothing is run here."""


class NamedResponsesTool(StrictBody):
    """The one function that the model is to call."""

    type: Literal["function"]
    name: str


class ReasoningBody(StrictBody):
    """How much the model is to think, for templates that ask."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(StrictBody):
    """What form the text must have; OpenAI's `strict` makes no difference, as answers always keep to it."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[Any, Field(alias="schema")] = None
    strict: bool | None = None


class TextBody(StrictBody):
    """How the text is to be."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesBody(GenerationBody):
    """`POST /v1/responses`."""

    input: Annotated[str | list[Any], PlainValidator(parse_input, json_schema_input_type=ItemsInput)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        str | tuple[str] | None,
        PlainValidator(
            parse_choice,
            json_schema_input_type=Literal["none", "auto", "required"] | NamedResponsesTool | None,
        ),
    ] = None
    parallel_tool_calls: bool | None = None
    text: TextBody | None = None
    reasoning: ReasoningBody | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    top_logprobs: NumTopLogprobs = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # One answer, made while its client waits, from what the request brings.
    n: Annotated[int | None, between(1, 1), Field(json_schema_extra={"minimum": 1, "maximum": 1})] = None
    background: Literal[False] | None = None
    conversation: None = None
    prompt: None = None

    @property
    def token_limit(self) -> int | None:
        """Most tokens of the answer."""
        return self.max_tokens if self.max_output_tokens is None else self.max_output_tokens

    @property
    def token_limit_param(self) -> str:
        """The field that names it."""
        return "max_tokens" if self.max_output_tokens is None else "max_output_tokens"

    @property
    def num_top_logprobs(self) -> int | None:
        """How many likeliest tokens to report beside each token's logprob; None reports nothing."""
        wanted = self.top_logprobs is not None or WANTS_LOGPROBS in (self.include or ())
        return self.top_logprobs or 0 if wanted else None
