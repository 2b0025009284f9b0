"""OpenAPI document and response models."""

from __future__ import annotations

from typing import Any, Final, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

_REF: Final = "#/components/schemas/{model}"
# Statuses of every route.
_ANYWHERE: Final = {
    400: "The request is malformed.",
    401: "An API key is needed, or another one.",
    421: "The Host header names another machine, and the server has no API keys.",
    429: "The API key has reached a limit, or the request queue is full.",
    503: "The model is loading or unloaded, or too many connections are open.",
}
_ELSEWHERE: Final = {
    403: "The model is not loaded, and the API key may not load models.",
    404: "The model is not served here.",
    413: "The body is too large.",
    501: "Not supported.",
}
_RETRY: Final = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}
_WITH_RETRY: Final = frozenset({429, 503})
_SCHEME: Final = "key"
_HEADER_SCHEME: Final = "key_header"
# Bodies of all routes.
_bodies: set[type[BaseModel]] = set()


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class ErrorObject(_Answer):
    """An error."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(_Answer):
    """Every error."""

    error: ErrorObject


class Usage(_Answer):
    """Cost of an answer, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class Function(_Answer):
    """A called function, with its arguments."""

    name: str
    arguments: str


class CustomInput(_Answer):
    """A called custom tool, with its text."""

    name: str
    input: str


class ToolCall(_Answer):
    """A call that the model made, of a function or of a custom tool."""

    id: str
    type: Literal["function", "custom"]
    function: Function | None = None
    custom: CustomInput | None = None


class AssistantMessage(_Answer):
    """Answer of the model in a chat."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []
    function_call: Function | None = None


class ChatChoice(_Answer):
    """One answer of a chat."""

    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"]


class TextChoice(_Answer):
    """One continued text."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class _Whole(_Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class ChatCompletion(_Whole):
    """`POST /v1/chat/completions` without `stream`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextCompletion(_Whole):
    """`POST /v1/completions` without `stream`."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class EmbeddingItem(_Answer):
    """The vector of one text: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(_Answer):
    """`POST /v1/embeddings`."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: dict[str, int]


class AnswerFormat(_Answer):
    """How a model writes calls and reasoning, by its chat template."""

    is_found: bool
    call: str
    reasoning: list[str]


class ModelModalities(_Answer):
    """What a model reads and writes."""

    input_modalities: list[Literal["text", "image"]]
    output_modalities: list[Literal["text"]]


class ModelCard(_Answer):
    """A model that is served, or that a request would have loaded."""

    id: str
    object: Literal["model"]
    kind: Literal["chat", "embeddings"]
    created: int
    owned_by: str
    max_model_len: int
    meta: dict[str, int]
    loaded: bool
    capabilities: list[Literal["completion", "multimodal"]] | None = None
    architecture: ModelModalities | None = None
    answer_format: AnswerFormat | None = None


class ModelList(_Answer):
    """`GET /v1/models`."""

    object: Literal["list"]
    data: list[ModelCard]


class ResponseAnswer(_Answer):
    """`POST /v1/responses` without `stream`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    error: None
    incomplete_details: dict[str, str] | None
    usage: dict[str, Any]


class MessageAnswer(_Answer):
    """`POST /v1/messages` without `stream`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: dict[str, int]


class TokenCount(_Answer):
    """`POST /v1/messages/count_tokens`, and `input_tokens` of other endpoints."""

    input_tokens: int


class Deleted(_Answer):
    """Something is gone."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(_Answer):
    """`GET /v1/responses/{response_id}/input_items`."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool


class Tokenized(_Answer):
    """`POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(_Answer):
    """`POST /detokenize`."""

    prompt: str


class TokenizerFacts(_Answer):
    """`GET /tokenizer_info`."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    add_bos_token: bool
    chat_template: str | None
    model_max_length: int


class Versions(_Answer):
    """`GET /version`."""

    version: str
    protocol_version: int
    llama_cpp_python: str


class Health(_Answer):
    """`GET /health`."""

    status: Literal["ok"]


class Anything(_Answer):
    """An object whose fields are for `mesh status` and `mesh bench net`."""


class DocumentedApp(FastAPI):
    """FastAPI whose document includes bodies that routes read themselves."""

    def openapi(self) -> dict[str, Any]:
        """The document, cached."""
        if self.openapi_schema is None:
            document = super().openapi()
            components = document["components"]
            named = sorted(_bodies, key=lambda body: body.__name__)
            _, bodies = models_json_schema([(body, "validation") for body in named], ref_template=_REF)
            components["schemas"] |= bodies["$defs"]
            components["securitySchemes"] = {
                _SCHEME: {"type": "http", "scheme": "bearer"},
                _HEADER_SCHEME: {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            }
            document["security"] = [{_SCHEME: []}, {_HEADER_SCHEME: []}]
            for path in document["paths"].values():
                for operation in path.values():
                    # Path parameters are text, so this error of FastAPI's cannot occur.
                    operation["responses"].pop("422", None)
                    if "501" in operation["responses"]:
                        # Nor does this route have a good answer, which FastAPI adds by default.
                        operation["responses"].pop("200", None)
            for name in ("HTTPValidationError", "ValidationError"):
                components["schemas"].pop(name, None)
            self.openapi_schema = document
        return self.openapi_schema


def answers(
    ok: type[BaseModel], *also: int, streamed_as: str | None = None
) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route: the good answer and all errors.

    Args:
        ok: Body of a 200.
        also: Error statuses of this route only.
        streamed_as: Content type of the stream that a 200 may be as well; None for none.
    """
    good: dict[str, Any] = {"model": ok}
    if streamed_as is not None:
        good["content"] = {streamed_as: {"schema": {"type": "string"}}}
    return {200: good, **refuses(*also)}


def refuses(*also: int) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route, only errors.

    Args:
        also: Error statuses of this route only.
    """
    texts = _ANYWHERE | {status: _ELSEWHERE[status] for status in also}
    return {
        status: {"model": ErrorBody, "description": texts[status]}
        | ({"headers": _RETRY} if status in _WITH_RETRY else {})
        for status in sorted(texts)
    }


def answers_with(schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route whose answer is JSON other than an object."""
    return {**answers(ErrorBody), 200: {"content": {"application/json": {"schema": schema}}}}


def answers_text(description: str, media_type: str = "text/plain") -> dict[int | str, dict[str, Any]]:
    """`responses` of a route whose answer is text."""
    content = {media_type: {"schema": {"type": "string"}}}
    return {**answers(ErrorBody), 200: {"description": description, "content": content}}


def takes(body: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads its body itself."""
    _bodies.add(body)
    schema = {"$ref": _REF.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
