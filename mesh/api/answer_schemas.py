"""What answers look like, for the API's own document. Answers are not made from these: see `envelope`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class ErrorObject(_Answer):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(_Answer):
    """Every error."""

    error: ErrorObject


class Usage(_Answer):
    """What an answer cost, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class Function(_Answer):
    """What is called, and how."""

    name: str
    arguments: str


class ToolCall(_Answer):
    """A call that the model made."""

    id: str
    type: Literal["function"]
    function: Function


class AssistantMessage(_Answer):
    """What the model said in a chat."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []


class ChatChoice(_Answer):
    """One answer of a chat."""

    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


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


class ModelCard(_Answer):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    meta: dict[str, int]


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


class Deleted(_Answer):
    """Something is gone."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class Tokenized(_Answer):
    """`POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(_Answer):
    """`POST /detokenize`."""

    prompt: str


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
