"""What bad requests get: always 400 in OpenAI's shape, naming the field; never a silent guess."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from mesh.api.bodies import max_body_bytes
from mesh.text.tokenizer import Tokenizer
from tests.support import api_harness
from tests.support.api_harness import Api, ScriptedEngine, running_api

pytestmark = pytest.mark.model

tokenizer, engine, api = api_harness.tokenizer, api_harness.engine, api_harness.api

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


async def _refused(api: Api, fields: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    response = await api.http.post(path, json=fields)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": ["Hello"]}, "messages[0]"),
        ({"messages": [{"content": "Hello"}]}, "messages[0].role"),
        ({"messages": [{"role": "boss", "content": "Hello"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": -1}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": -2}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"seed": "7"}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 513}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"model": 5}, "model"),
        ({"ignore_eos": "no"}, "ignore_eos"),
    ],
)
async def test_wrong_types_and_values_name_their_field(api: Api, fields: dict[str, Any], param: str) -> None:
    error = await _refused(api, {"messages": HELLO, **fields})
    assert error["param"] == param
    assert error["code"] == "invalid_request_error"
    assert error["message"].startswith(param)


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 2},
        {"min_tokens": 1},
        {"bad_words": ["x"]},
        {"stop_regex": "x"},
        {"dry_multiplier": 0.8},
        {"watermark": True},
        {"skip_special_tokens": False},
    ],
)
async def test_what_is_not_supported_is_refused(api: Api, fields: dict[str, Any]) -> None:
    [name] = fields
    error = await _refused(api, {"messages": HELLO, **fields})
    assert error["param"] == name
    assert "not supported" in error["message"]


async def test_the_same_fields_may_ask_for_nothing(api: Api) -> None:
    harmless = {
        "n": 1, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False,
        "top_logprobs": None, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "stop": None,
    }  # fmt: skip
    assert (await api.http.post(CHAT, json={"messages": HELLO, **harmless})).status_code == 200


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "JSON object"),
        (b"null", "JSON object"),
        (b'"text"', "JSON object"),
        (b"\xff{}", "UTF-8"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "too long"),
        (b"[" * 10_000, "too deep"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "temperature"),
        (b'{"messages": [{"role": "user", "content": "half \\ud800"}]}', "surrogate"),
    ],
)
async def test_what_is_not_json_is_refused(api: Api, content: bytes, words: str) -> None:
    response = await api.http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_that_a_web_page_could_send_unasked_is_refused(api: Api, content_type: str) -> None:
    headers = {"content-type": content_type} if content_type else {}
    response = await api.http.post(CHAT, content=b'{"messages": []}', headers=headers)
    assert response.status_code == 400
    assert "Content-Type" in response.json()["error"]["message"]


async def test_a_body_that_is_too_large_is_refused(api: Api, engine: ScriptedEngine) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(max_body_bytes(engine.context_length) // 2**20 + 1):
            yield b" " * 2**20

    response = await api.http.post(CHAT, content=chunks(), headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"


async def test_unknown_fields_are_accepted_and_logged_once_without_their_values(api: Api) -> None:
    with capture_logs() as events:
        for _ in range(2):
            fields = {"messages": HELLO, "frobnicate": "secret words", "user": "me"}
            assert (await api.http.post(CHAT, json=fields)).status_code == 200
    noted = [event["field"] for event in events if event["event"] == "unknown_field_ignored"]
    assert sorted(noted) == ["frobnicate", "user"]
    assert "secret words" not in str(events)


async def test_prompts_and_answers_are_not_logged(api: Api, tokenizer: Tokenizer) -> None:
    with capture_logs() as events:
        answer = await api.http.post(CHAT, json={"messages": [{"role": "user", "content": "xyzzy"}]})
        await _refused(api, {"messages": [{"role": "user", "content": "xyzzy"}], "stop": ["plugh", 5]})
    assert {event["event"] for event in events} == {"request", "answered"}
    assert "xyzzy" not in str(events)
    assert "plugh" not in str(events)
    assert answer.json()["choices"][0]["message"]["content"] not in str(events)


async def test_unknown_routes_and_methods_get_the_same_shape(api: Api) -> None:
    for method, path, status, code in (
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("POST", "/openapi.json", 405, "method_not_allowed"),
        ("POST", "/v1/embedding", 404, "not_found"),
        ("GET", "/v1/embeddings", 405, "method_not_allowed"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models/smollm2", 405, "method_not_allowed"),
    ):
        response = await api.http.request(method, path)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (status, code)
        assert path in error["message"]


async def test_a_model_name_that_is_no_valid_text_is_not_found(api: Api) -> None:
    headers = {"content-type": "application/json"}
    content = b'{"messages": [{"role": "user", "content": "x"}], "model": "\\ud800"}'
    response = await api.http.post(CHAT, content=content, headers=headers)
    assert response.status_code == 404
    assert "`\ud800`" in response.json()["error"]["message"]


async def test_no_cross_origin_reading(api: Api) -> None:
    response = await api.http.get("/v1/models", headers={"origin": "https://elsewhere.example"})
    assert not any(name.startswith("access-control") for name in response.headers)


async def test_a_template_that_refuses_says_why(engine: ScriptedEngine, smollm2_path: Path) -> None:
    tokenizer = Tokenizer(smollm2_path)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    async with running_api(engine, tokenizer) as api:
        error = await _refused(api, {"messages": HELLO})
    assert "roles must alternate" in error["message"]


async def test_sampling_reaches_the_engine(api: Api, engine: ScriptedEngine) -> None:
    fields = {"messages": HELLO, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": -2}
    await api.http.post(CHAT, json=fields)
    await api.http.post(CHAT, json={"messages": HELLO, "top_k": -1})
    asked, by_default = (request.sampling for request in engine.requests)
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p) == (0.5, 0.9, 40, 0.1)
    assert asked.seed == 2**64 - 2
    assert (by_default.temperature, by_default.top_p, by_default.top_k, by_default.min_p) == (1, 1, 0, 0)


async def test_searching_the_web_is_refused_by_name(api: Api) -> None:
    error = await _refused(api, {"messages": HELLO, "web_search_options": {}})
    assert error["param"] == "web_search_options"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/chat/completions", {"messages": HELLO}),
        ("/completions", {"prompt": "Hello"}),
        ("/responses", {"input": "Hello"}),
        ("/models", None),
    ],
)
async def test_endpoints_answer_without_their_prefix(
    api: Api, path: str, fields: dict[str, Any] | None
) -> None:
    method = "GET" if fields is None else "POST"
    short, whole = [await api.http.request(method, each, json=fields) for each in (path, f"/v1{path}")]
    assert short.status_code == whole.status_code == 200
    assert short.json().keys() == whole.json().keys()


@pytest.mark.parametrize("is_ready", [True, False])
async def test_health_is_told_to_those_that_only_look(tokenizer: Tokenizer, *, is_ready: bool) -> None:
    async with running_api(ScriptedEngine([]), tokenizer, ready=lambda: is_ready) as api:
        response = await api.http.head("/health")
        whole = await api.http.get("/health")
    assert (response.status_code, response.content) == (200 if is_ready else 503, b"")
    assert response.headers["content-length"] == whole.headers["content-length"]
    assert ("retry-after" in response.headers) is not is_ready
