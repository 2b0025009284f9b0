"""The field `prediction`, and whose history a request belongs to."""

import json
from typing import Any

import openai
import pytest

from mesh.api.api_keys import ApiKeys, digest_of
from mesh.text.tokenizer import Tokenizer
from tests.support import api_harness
from tests.support.api_harness import KEY, MODEL, Api, ScriptedEngine, running_api

pytestmark = pytest.mark.model

tokenizer, engine, api = api_harness.tokenizer, api_harness.engine, api_harness.api

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "def size(self):\n    return len(self.items)  # <|im_end|>\n"


@pytest.mark.parametrize(
    "content", [TEXT, [{"type": "text", "text": TEXT[:9]}, {"type": "text", "text": TEXT[9:]}]]
)
async def test_the_engine_gets_the_prediction_as_an_answer_would_be(
    api: Api, engine: ScriptedEngine, tokenizer: Tokenizer, content: Any
) -> None:
    """No token goes around it, and what looks like a special token is text."""
    expected = tuple(tokenizer.encode(TEXT, add_special=False, parse_special=False))
    for path, body in ((CHAT, HELLO), (COMPLETIONS, {"prompt": ["Hello", "there"]})):
        response = await api.http.post(
            path, json={**body, "prediction": {"type": "content", "content": content}}
        )
        assert response.status_code == 200, response.text
        assert {request.prediction for request in engine.requests} == {expected}


@pytest.mark.parametrize("prediction", [None, {"type": "content", "content": ""}])
async def test_nothing_may_be_expected(api: Api, engine: ScriptedEngine, prediction: Any) -> None:
    response = await api.http.post(CHAT, json={**HELLO, "prediction": prediction})
    assert response.status_code == 200, response.text
    assert engine.requests.pop().prediction == ()


@pytest.mark.parametrize(
    ("prediction", "param", "says"),
    [
        ("text", "prediction", "dictionary"),
        ([], "prediction", "dictionary"),
        ({}, "prediction.type", "required"),
        ({"type": "content"}, "prediction.content", "required"),
        ({"type": "text", "content": "x"}, "prediction.type", "'content'"),
        ({"type": "content", "content": None}, "prediction.content", "a string or a list of text parts"),
        ({"type": "content", "content": 5}, "prediction.content", "a string or a list of text parts"),
        ({"type": "content", "content": ["x"]}, "prediction.content", "part 0 must be an object"),
        (
            {"type": "content", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]},
            "prediction.content",
            "part 1 is not of type text",
        ),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content", "part 0 has no text"),
        (
            {"type": "content", "content": "half: \ud800"},
            "prediction.content",
            "half a surrogate pair at character 6",
        ),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_is_no_prediction_is_refused(
    api: Api, engine: ScriptedEngine, path: str, prediction: Any, param: str | None, says: str
) -> None:
    body = HELLO if path == CHAT else {"prompt": "Hello"}
    # Half a surrogate pair can be written in JSON, though not in UTF-8.
    data = json.dumps({**body, "prediction": prediction})
    response = await api.http.post(path, content=data, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert says in error["message"]
    assert engine.requests == []


async def test_a_prediction_that_no_answer_can_be_is_refused(
    api: Api, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    content = "word " * engine.context_length
    num_tokens = len(tokenizer.encode(content, add_special=False, parse_special=False))
    response = await api.http.post(
        CHAT, json={**HELLO, "prediction": {"type": "content", "content": content}}
    )
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "prediction.content"
    assert f"{num_tokens} tokens" in error["message"]
    assert f"holds {engine.context_length}" in error["message"]


async def test_openai_s_client_sends_predictions(
    api: Api, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    answer = await api.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        prediction={"type": "content", "content": TEXT},
    )
    details = answer.usage.completion_tokens_details if answer.usage else None
    assert details is not None
    assert details.accepted_prediction_tokens == details.rejected_prediction_tokens == 0
    assert engine.requests[0].prediction


async def test_a_history_and_a_turn_belong_to_a_key(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    keys = ApiKeys.from_plain({"alice": KEY, "bob": "sk-of-bob"})
    identities = [digest_of(key).hex() for key in (KEY, "sk-of-bob")]
    async with running_api(engine, tokenizer, keys=keys) as api:
        await api.openai.completions.create(model=MODEL, prompt="Hello")
        async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="sk-of-bob", max_retries=0) as bob:
            await bob.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hello"}])
    assert [request.history_key for request in engine.requests] == identities
    assert [request.client for request in engine.requests] == identities


async def test_an_open_api_keeps_no_history(api: Api, engine: ScriptedEngine) -> None:
    await api.http.post(CHAT, json=HELLO)
    assert engine.requests[0].history_key is None
