"""Requests whose answers are recorded. STORED stands for the id of the latest stored response."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

KEY = "sk-of-the-contracts"
CHAT_MODEL = "SmolLM2-135M-Instruct.Q4_1"
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_RESPONSES, _MESSAGES = "/v1/responses", "/v1/messages"
# The model is sure of the answers, so that they are the same on each kind of processor.
# SPANMESH_ATTENTION=ggml, which changes logits far more, changes none of them.
_COUNT = "Count from one to ten."
_REPEAT = "Repeat this list: apple, pear, plum."
_ASKED = [{"role": "user", "content": _COUNT}]
_WEATHER = {
    "name": "get_weather",
    "description": "Current weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
_TOOL = {"type": "function", "function": {**_WEATHER, "strict": True}}
_CALL = {"id": "call_12345678", "type": "function"}
_SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["colour", "count"],
    "additionalProperties": False,
}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA, "strict": True}}


@dataclass(frozen=True)
class Exchange:
    """A request."""

    name: str
    """Of its answer in the record."""
    path: str
    """On the server."""
    body: Any = None
    """JSON, or a text that is sent as it is; None for none."""
    method: str = "POST"
    """HTTP method."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Beside the key."""


def _chat(name: str, **fields: Any) -> Exchange:
    greedy = {"model": "default", "messages": _ASKED, "max_tokens": 12, "temperature": 0}
    return Exchange(f"chat: {name}", _CHAT, greedy | fields)


def _completion(name: str, **fields: Any) -> Exchange:
    greedy = {"model": "default", "prompt": "1, 2, 3,", "max_tokens": 8, "temperature": 0}
    return Exchange(f"completion: {name}", _COMPLETIONS, greedy | fields)


def _response(name: str, **fields: Any) -> Exchange:
    greedy = {"model": "default", "input": _COUNT, "max_output_tokens": 16, "temperature": 0}
    return Exchange(f"response: {name}", _RESPONSES, greedy | fields)


def _message(name: str, **fields: Any) -> Exchange:
    greedy = {"model": "default", "messages": _ASKED, "max_tokens": 12, "temperature": 0}
    return Exchange(f"message: {name}", _MESSAGES, greedy | fields)


def _get(name: str, path: str, **headers: str) -> Exchange:
    return Exchange(name, path, method="GET", headers=headers)


def _all() -> Iterator[Exchange]:
    yield _chat("plain")
    yield _chat("default model, no limit but the stop", stop=["3"], max_tokens=None)
    yield _chat("two choices", n=2, temperature=0.1, seed=7, messages=[{"role": "user", "content": _REPEAT}])
    yield _chat("logprobs", max_tokens=3, logprobs=True, top_logprobs=1)
    yield _chat("token ids", max_tokens=3, return_token_ids=True)
    yield _chat("bias", max_tokens=2, logit_bias={"28": 100})
    yield _chat("prediction", prediction={"type": "content", "content": "1. 1\n2. 2\n3. 3"})
    yield _chat(
        "continued",
        continue_final_message=True,
        messages=[*_ASKED, {"role": "assistant", "content": "1. 1\n2."}],
    )
    yield _chat("parts of texts", messages=[{"role": "user", "content": [{"type": "text", "text": _REPEAT}]}])
    yield _chat(
        "system message", messages=[{"role": "system", "content": "You are a helpful assistant."}, *_ASKED]
    )
    yield _chat("schema", response_format=_FORMAT, max_tokens=40)
    yield _chat("any object", response_format={"type": "json_object"}, max_tokens=6)
    yield _chat("grammar", grammar='root ::= "yes" | "no"')
    yield _chat("call", tools=[_TOOL], tool_choice="required", max_tokens=60)
    yield _chat(
        "call of a function by name",
        tools=[_TOOL],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=60,
    )
    yield _chat(
        "result of a call",
        tools=[_TOOL],
        messages=[
            {"role": "user", "content": "How is the weather in Oslo?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {**_CALL, "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "call_12345678", "content": "Rain, 9 degrees."},
        ],
    )
    yield _chat("stream", stream=True)
    yield _chat("stream with usage", stream=True, stream_options={"include_usage": True})
    yield _chat("stream of a call", stream=True, tools=[_TOOL], tool_choice="required", max_tokens=60)
    yield Exchange(
        "chat: tokens of a prompt", f"{_CHAT}/input_tokens", {"model": "default", "messages": _ASKED}
    )
    yield _completion("plain")
    yield _completion("two prompts", prompt=["1, 2, 3,", "Monday, Tuesday,"], max_tokens=4)
    yield _completion("token ids", prompt=[504, 3437, 314], max_tokens=4)
    yield _completion("echo with logprobs", echo=True, logprobs=1, max_tokens=2)
    yield _completion("stream", stream=True)
    yield _response("plain")
    yield Exchange("response: stored", f"{_RESPONSES}/STORED", method="GET")
    yield Exchange("response: its input", f"{_RESPONSES}/STORED/input_items", method="GET")
    yield _response("next turn", previous_response_id="STORED", input=_REPEAT)
    yield Exchange("response: deleted", f"{_RESPONSES}/STORED", method="DELETE")
    yield Exchange("response: not there any more", f"{_RESPONSES}/STORED", method="GET")
    yield _response("stream", stream=True, store=False)
    yield _response(
        "schema",
        text={"format": {"type": "json_schema", "name": "answer", "schema": _SCHEMA, "strict": True}},
        max_output_tokens=40,
        store=False,
    )
    yield _response(
        "call",
        tools=[{"type": "function", **_WEATHER, "strict": True}],
        tool_choice="required",
        max_output_tokens=60,
        store=False,
    )
    yield Exchange(
        "response: tokens of a prompt", f"{_RESPONSES}/input_tokens", {"model": "default", "input": "Hello"}
    )
    yield _message("plain")
    yield _message(
        "system and stop", system="You are a helpful assistant.", stop_sequences=["3"], max_tokens=40
    )
    yield _message("stream", stream=True)
    yield _message(
        "call",
        tools=[{"name": "get_weather", "input_schema": _WEATHER["parameters"]}],
        tool_choice={"type": "any"},
        max_tokens=60,
    )
    yield Exchange(
        "message: tokens of a prompt", f"{_MESSAGES}/count_tokens", {"model": "default", "messages": _ASKED}
    )
    yield Exchange(
        "tokenize", "/tokenize", {"model": "default", "prompt": "Hello, world", "return_token_strs": True}
    )
    yield Exchange("detokenize", "/detokenize", {"model": "default", "tokens": [19556, 28, 905]})
    yield _get("models", "/v1/models")
    yield _get("one model", "/v1/models/default")
    yield _get("version", "/version")
    yield _get("health", "/health")
    yield Exchange("embedding", "/v1/embeddings", {"model": "tiny-embedder", "input": [[5, 6, 7], [8, 9]]})
    yield Exchange(
        "embedding in base64",
        "/v1/embeddings",
        {"model": "tiny-embedder", "input": [5, 6, 7], "encoding_format": "base64"},
    )
    yield from _refused()


def _refused() -> Iterator[Exchange]:
    yield Exchange(
        "refused: wrong key", _CHAT, {"model": "default"}, headers={"Authorization": "Bearer wrong"}
    )
    yield Exchange("refused: no JSON", _CHAT, "{")
    yield Exchange("refused: not an object", _CHAT, [])
    yield Exchange("refused: no JSON by its header", _CHAT, {}, headers={"Content-Type": "text/plain"})
    yield Exchange("refused: no such endpoint", "/v1/nothing", {})
    yield _get("refused: method", _CHAT)
    yield _get("refused: no such model", "/v1/models/nothing")
    yield _chat("refused: model", model="nothing")
    yield _chat("refused: an embedding model", model="tiny-embedder")
    yield _chat("refused: no messages", messages=[])
    yield _chat("refused: role", messages=[{"role": "nobody", "content": "Hello"}])
    yield _chat(
        "refused: picture",
        messages=[
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}],
            }
        ],
    )
    yield _chat("refused: temperature", temperature=3)
    yield _chat("refused: max_tokens", max_tokens=-2)
    yield _chat("refused: a field that would change the answer", audio={"voice": "alto"})
    yield _chat(
        "refused: schema",
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}},
    )
    yield _chat("refused: grammar", grammar="root ::= (")
    yield _chat(
        "refused: tool", tools=[_TOOL], tool_choice={"type": "function", "function": {"name": "other"}}
    )
    yield _chat("refused: too long", messages=[{"role": "user", "content": "word " * 600}])
    yield _completion("refused: token id", prompt=[10_000_000])
    yield _response("refused: no such response", previous_response_id="resp_nothing")
    yield _message("refused: no limit", max_tokens=None)
    yield _message("refused: model", model="nothing")
    yield Exchange(
        "refused: embedding by a chat model", "/v1/embeddings", {"model": CHAT_MODEL, "input": "Hello"}
    )
    yield Exchange("refused: unload of nothing", "/mesh/unload?model=nothing")
    yield Exchange("refused: load of nothing", "/mesh/load", {"model": "nothing"})
    yield Exchange("refused: drain of nothing", "/mesh/drain?host=nothing")


EXCHANGES = tuple(_all())
