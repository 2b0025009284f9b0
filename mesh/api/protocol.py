"""Request bodies of the OpenAI API.

Fields that are not named here are in `model_extra`, which `mesh.api.request_parsing` checks.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from mesh.api.message_bodies import (
    ConversationBody,
    HostedTool,
    TextPart,
    hosted_warnings,
    part_text,
)
from mesh.api.request_parsing import (
    AS_WHOLE,
    ExactBody,
    LastN,
    LogitBias,
    NumTopLogprobs,
    Penalty,
    RepetitionPenalty,
    Seed,
    Stops,
    StrictBody,
    TokenLimit,
    TokenLimitOr0,
    as_whole,
    choice_count,
    describe,
    limit_of,
    none_if_false,
)
from mesh.engine import SpeculationLimits, SpeculationMode
from spanmesh_proto.errors import InvalidRequest

MAX_PROMPTS: Final = 64
MAX_CHOICES: Final = 16
MAX_PROMPT_NAME: Final = 64
_PromptName = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_NAME)]
Prompt = str | tuple[int, ...]
_SeveralPrompts = Field(min_length=1, max_length=MAX_PROMPTS)

_Ids = Annotated[list[Annotated[int, Field(ge=0), AS_WHOLE]], Field(min_length=1)]

_PromptInput = str | _Ids | Annotated[list[str], _SeveralPrompts] | Annotated[list[_Ids], _SeveralPrompts]


class StreamOptions(ExactBody):
    """Contents of a stream beside text. `include_obfuscation` concerns what this server does not do."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SpeculationBody(ExactBody):
    """Limits of this request's speculation."""

    mode: SpeculationMode | None = None
    max_width: Annotated[int, Field(ge=0), AS_WHOLE] | None = None
    depth: Annotated[int, Field(ge=1), AS_WHOLE] | None = None

    def as_limits(self) -> SpeculationLimits:
        """As the engine takes it."""
        return SpeculationLimits(self.mode, self.max_width, self.depth)


class JsonSchemaBody(ExactBody):
    """A named schema; OpenAI's `strict` makes no difference, as answers always keep to it."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[Any, Field(alias="schema")] = None
    strict: bool | None = None


def parse_schema(value: Any) -> Any:
    """A JSON Schema, also as a JSON text; what is in it, others look at."""
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise PydanticCustomError("schema", "must be a JSON Schema: this text is no JSON") from None
    if value == "":
        return None
    if value is not None and not isinstance(value, dict | bool):
        raise PydanticCustomError("schema", "must be a JSON Schema: an object, true or false")
    return value


def _whole_text(value: Any) -> Any:
    if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        raise PydanticCustomError("text", "half a surrogate pair is no text")
    return value


Schema = Annotated[
    Any, PlainValidator(parse_schema, json_schema_input_type=dict[str, Any] | bool | str | None)
]


class ResponseFormatBody(ExactBody):
    """Form that the answer must have: OpenAI's, and those of llama-server, Fireworks and TGI beside it."""

    type: Literal["text", "json_object", "json_schema", "json", "regex", "grammar"]
    json_schema: JsonSchemaBody | None = None
    # Of `json_object`.
    schema_: Annotated[Schema, Field(alias="schema")] = None
    # Of `json`, and of `regex`.
    value: Any = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _require_its_own(self) -> ResponseFormatBody:
        wanted = {"json_object": "schema", "json": "value", "regex": "value"}.get(self.type, self.type)
        given = {
            "json_schema": self.json_schema,
            "schema": self.schema_,
            "value": self.value,
            "grammar": self.grammar,
        }
        for name, value in given.items():
            if value is not None and name != wanted and not (name == "schema" and self.type == "json_schema"):
                raise PydanticCustomError(
                    "response_format",
                    "of type {type} has no {name}: leave it out, or send another type",
                    {"type": self.type, "name": name},
                )
        return self


class StructuredOutputsBody(ExactBody):
    """Form of the answer, as vLLM has it: one of these. White space of JSON is the grammar's in any case."""

    json_: Annotated[Schema, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None


def parse_prediction(value: Any) -> str:
    """An expected answer: a string, or a list of text parts that follow one another without a gap."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    return "".join(part_text(part, index) for index, part in enumerate(value))


class PredictionBody(ExactBody):
    """Whole answer that the client expects (OpenAI's predicted outputs)."""

    type: Literal["content"]
    content: Annotated[str, PlainValidator(parse_prediction, json_schema_input_type=str | list[TextPart])]


def _only_for_streams(options: StreamOptions | None, body: ValidationInfo) -> StreamOptions | None:
    is_used = options is not None and (options.include_usage or options.continuous_usage_stats)
    if is_used and not body.data.get("stream"):
        raise PydanticCustomError(
            "stream_options", "only for streams: send stream true as well, or leave it out"
        )
    return options


class GenerationBody(StrictBody):
    """Fields of all endpoints that generate."""

    model_config = ConfigDict(json_schema_extra=describe)
    generates: ClassVar = True

    model: str | None = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, AfterValidator(_only_for_streams)] = None
    max_tokens: TokenLimit | None = None
    # llama.cpp's name of it.
    n_predict: TokenLimitOr0 | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1), AS_WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Seed = None
    frequency_penalty: Penalty = None
    presence_penalty: Penalty = None
    repetition_penalty: RepetitionPenalty = None
    repeat_penalty: RepetitionPenalty = None
    repeat_last_n: LastN = None
    logit_bias: LogitBias = ()
    stop: Stops = ()
    # vLLM's and SGLang's names of one wish.
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    speculation: SpeculationBody | None = None
    prediction: PredictionBody | None = None
    response_format: ResponseFormatBody | None = None
    json_schema: Schema = None
    grammar: str | None = None
    # SGLang's names.
    regex: str | None = None
    ebnf: str | None = None
    # vLLM's, and its former ones.
    structured_outputs: StructuredOutputsBody | None = None
    guided_json: Schema = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None
    return_progress: bool | None = None
    # Whether the answer may be recorded for tuning. A yes may be a name, by which the prompt is known there.
    record: Annotated[bool | _PromptName | None, BeforeValidator(_whole_text)] = None
    # Of what OpenAI would keep: here `false` keeps the answer out of recordings.
    store: bool | None = None
    n: choice_count(MAX_CHOICES) = None  # type: ignore[valid-type]

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        """Whether each chunk of the stream has the usage so far."""
        options = self.stream_options
        return self.includes_usage and bool(options and options.continuous_usage_stats)

    @property
    def includes_stop(self) -> bool:
        """Whether the stop string that ends an answer is a part of it."""
        return bool(self.include_stop_str_in_output or self.no_stop_trim)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What of the request has no effect."""
        return ()

    @property
    def token_limit(self) -> int | None:
        """Most tokens of the answer, if the request names a number.

        Raises:
            InvalidRequest: If `max_tokens` and `n_predict` differ, or nothing would be answered.
        """
        ours = limit_of("max_tokens", self.max_tokens, permits_none=self.has_echo)
        theirs = limit_of("n_predict", self.n_predict, permits_none=self.has_echo)
        if None not in (ours, theirs) and ours != theirs:
            raise InvalidRequest(
                f"max_tokens is {self.max_tokens} and n_predict {self.n_predict}: they are the same setting,"
                " send one of them",
                param="n_predict",
            )
        return theirs if ours is None else ours

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
        return (tuple(map(as_whole, value)),)
    if isinstance(value, list) and 0 < len(value) <= most:
        if all(isinstance(prompt, str) for prompt in value):
            return tuple(value)
        if all(_are_ids(prompt) for prompt in value):
            return tuple(tuple(map(as_whole, prompt)) for prompt in value)
    raise PydanticCustomError(
        kind,
        "must be a string, a list of token ids, or a list of 1 to {most} of either",
        {"most": most},
    )


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int or type(as_whole(token)) is int for token in value)
    )


class ChatBody(GenerationBody, ConversationBody):
    """`POST /v1/chat/completions`."""

    neutral: ClassVar = {"verbosity": ("medium",)}

    max_completion_tokens: TokenLimit | None = None
    reasoning_format: Literal["auto", "none", "deepseek"] | None = None
    # vLLM's and OpenRouter's, as `reasoning.exclude`.
    include_reasoning: bool | None = None
    # SGLang's: `false` is `reasoning_format` `none`.
    separate_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: NumTopLogprobs = None

    @property
    def shows_reasoning(self) -> bool:
        """Whether the client is shown the reasoning."""
        is_excluded = self.reasoning is not None and self.reasoning.exclude
        return self.include_reasoning is not False and not is_excluded

    @property
    def splits_reasoning(self) -> bool:
        """Whether reasoning is split from content."""
        is_whole = self.reasoning_format == "none" or self.separate_reasoning is False
        return not (is_whole and self.shows_reasoning)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What of the request has no effect."""
        tools = enumerate(self.tools or ())
        return hosted_warnings((index, tool.type) for index, tool in tools if isinstance(tool, HostedTool))

    @property
    def token_limit(self) -> int | None:
        """Most tokens of the answer: the newer of the two fields goes first."""
        newer = limit_of("max_completion_tokens", self.max_completion_tokens, permits_none=False)
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


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(parse_prompts, json_schema_input_type=_PromptInput)]
    echo: bool | None = None
    add_special_tokens: bool | None = None
    # 0 answers with the prompt alone, if `echo` asks for it.
    max_tokens: TokenLimitOr0 | None = None
    logprobs: Annotated[NumTopLogprobs, BeforeValidator(none_if_false)] = None

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
