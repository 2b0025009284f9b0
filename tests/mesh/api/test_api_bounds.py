"""Requests that are too much of something: a 4xx with the reason, before any work is spent on them."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.api.bodies import max_body_bytes
from mesh.text.tokenizer import Tokenizer
from tests.support import api_harness
from tests.support.api_harness import Api, ScriptedEngine

pytestmark = pytest.mark.model

tokenizer, engine, api = api_harness.tokenizer, api_harness.engine, api_harness.api

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
HUGE = "x" * 900_000


async def error_of(api: Api, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    response = await api.http.post(path, json=fields)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"n": 1000}, "n", "1 to 16"),
        ({"stop": [str(number) for number in range(1000)]}, "stop", "1000 strings: at most 16"),
        ({"stop": [HUGE]}, "stop", "at most 512 characters"),
        (
            {"logit_bias": {str(each): 1 for each in range(9000)}},
            "logit_bias",
            "9000 entries: at most 1024",
        ),
        ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs", "0 to 20"),
        ({"messages": [HELLO["messages"][0]] * 5000}, "messages", "5000 messages: at most 4096"),
        ({"messages": [5] * 4000}, "messages[0]", "should be"),
        ({"temperature": 10**400}, "temperature", ""),
        ({"model": HUGE}, "model", ""),
        # So much that it is not even parsed.
        ({"stop": [str(number) for number in range(100_000)]}, None, "more than 16640 values"),
        ({"logit_bias": {str(each): 1 for each in range(49_000)}}, None, "more than 16640 values"),
    ],
)
async def test_too_much_of_a_field_is_refused_by_its_name(
    api: Api, engine: ScriptedEngine, fields: dict[str, Any], param: str | None, says: str
) -> None:
    response = await api.http.post(CHAT, json={**HELLO, **fields})
    assert response.status_code in {400, 404}
    error = response.json()["error"]
    assert error["param"] == param
    assert says in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": HUGE}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 1000}] * 900}, "messages"),
        (CHAT, {**HELLO, "prediction": {"type": "content", "content": HUGE}}, "prediction.content"),
        (COMPLETIONS, {"prompt": HUGE}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * 10_000}, "prompt"),
        (COMPLETIONS, {"prompt": ["Hello", HUGE]}, "prompt"),
    ],
)
async def test_a_hopeless_text_is_refused_before_its_tokens_are_counted(
    api: Api,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, Any],
    param: str,
) -> None:
    encode = Tokenizer.encode

    def encode_short(self: Tokenizer, text: str, **options: bool) -> list[int]:
        assert len(text) < 100_000
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", encode_short)
    error = await error_of(api, path, fields)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "maximum context length is 64 tokens" in error["message"]
    assert engine.requests == []


@given(text=st.text(max_size=60), repeat=st.integers(1, 20), parses=st.booleans())
@settings(max_examples=60)
def test_no_token_stands_for_more_than_the_longest_piece(
    tokenizer: Tokenizer, *, text: str, repeat: int, parses: bool
) -> None:
    text = (text + " " * repeat + "<|im_end|>") * repeat
    tokens = tokenizer.encode(text, add_special=False, parse_special=parses)
    assert len(tokens) * tokenizer.longest_piece_bytes >= len(text.encode())


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 63}, {"max_tokens": 64}, {"max_completion_tokens": 10**30}]
)
async def test_a_limit_beyond_the_context_is_the_room_that_the_prompt_leaves(
    api: Api, engine: ScriptedEngine, fields: dict[str, int]
) -> None:
    assert (await api.http.post(CHAT, json={**HELLO, **fields})).status_code == 200
    (request,) = engine.requests
    assert request.max_tokens == 64 - len(request.prompt)


@pytest.mark.parametrize(
    ("context_length", "num_bytes"), [(64, 2**20 + 2**14), (4096, 2**21), (2**20, 2**24)]
)
def test_a_body_may_be_as_large_as_a_context_needs(context_length: int, num_bytes: int) -> None:
    assert max_body_bytes(context_length) == num_bytes
