"""How an answer ended, told by every API: whole or cut at any token, streamed or not."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import StageFailed
from tests.mesh.api.test_api_formats import ANSWERS, COLLECTED, HELLO, PARAMETERS, WEATHER
from tests.support.api_harness import Api, ScriptedEngine, running_api

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not COLLECTED, reason="no source of llama.cpp: see SPANMESH_LLAMA_CPP"),
]

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TOOLS: dict[str, Any] = {
    CHAT: WEATHER,
    RESPONSES: {"type": "function", **WEATHER["function"]},
    MESSAGES: {"name": "weather", "input_schema": PARAMETERS},
}
FORMATS = ("openai-gpt-oss-120b", "google-gemma-4-31B-it", "deepseek-ai-DeepSeek-V4")
# Tokens between two cuts.
STRIDE = 7


@pytest.fixture(params=FORMATS)
def tokenizer(request: pytest.FixtureRequest, smollm2_path: Path) -> Tokenizer:
    found = Tokenizer(smollm2_path)
    found.chat_template = COLLECTED[request.param].read_text()
    return found


@pytest.fixture
def tokens(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> list[int]:
    """Tokens of an answer with reasoning, a text and a call."""
    name = request.node.callspec.params["tokenizer"]
    return tokenizer.encode(ANSWERS[name], add_special=False, parse_special=False)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine([], context_length=4096)


@pytest.fixture
async def api(engine: ScriptedEngine, tokenizer: Tokenizer) -> AsyncIterator[Api]:
    async with running_api(engine, tokenizer) as api:
        yield api


async def asked(api: Api, path: str, *, stream: bool, max_tokens: int = 2000) -> httpx.Response:
    body = {"input": HELLO} if path == RESPONSES else {"messages": HELLO}
    limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": max_tokens}
    return await api.http.post(path, json={**body, **limit, "tools": [TOOLS[path]], "stream": stream})


def documents_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The body, or the data of the events of a stream."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return [response.json()]
    lines = response.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def ends_told(path: str, documents: list[dict[str, Any]]) -> set[str]:
    """Every way of ending that an answer names; `error` among them."""
    found: list[str | None] = []
    for each in documents:
        response = each.get("response", each)
        if each.get("error") or response.get("status") == "failed":
            found.append("error")
        elif path == CHAT:
            found += [choice["finish_reason"] for choice in each["choices"]]
        elif path == MESSAGES:
            found.append(each.get("stop_reason") or each.get("delta", {}).get("stop_reason"))
        elif response.get("status") in {"completed", "incomplete"} and "output" in response:
            found.append((response["incomplete_details"] or {}).get("reason") or response["status"])
    return set(filter(None, found))


def arguments_told(path: str, documents: list[dict[str, Any]]) -> str | None:
    """Arguments of the call, as far as they are told; None without a call."""
    found: list[str] = []
    for each in documents:
        if path == CHAT:
            for choice in each["choices"]:
                calls = (choice.get("message") or choice["delta"]).get("tool_calls") or ()
                found += [call["function"].get("arguments") or "" for call in calls]
        elif path == MESSAGES:
            whole = [block for block in each.get("content", ()) if block["type"] == "tool_use"]
            found += [json.dumps(block["input"]) for block in whole]
            found += [""] * (each.get("content_block", {}).get("type") == "tool_use")
            if "partial_json" in (delta := each.get("delta", {})):
                found.append(delta["partial_json"])
        elif "output" in (response := each.get("response", each)):
            # The latest document has all; an item that is cut is told as incomplete.
            found = [item["arguments"] for item in response["output"] if item["type"] == "function_call"]
    return "".join(found) if found else None


@pytest.mark.parametrize("path", TOOLS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_limit_is_told_wherever_it_cuts(
    api: Api, engine: ScriptedEngine, tokens: list[int], path: str, *, stream: bool
) -> None:
    right = {CHAT: "length", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}[path]
    for length in range(1, len(tokens), STRIDE):
        engine.steps = [(token,) for token in tokens[:length]]
        response = await asked(api, path, stream=stream, max_tokens=length)
        assert response.status_code == 200, response.text
        assert ends_told(path, documents_of(response)) == {right}, length


@pytest.mark.parametrize("path", TOOLS)
@pytest.mark.parametrize("stream", [False, True])
async def test_only_a_whole_call_is_told_as_one_wherever_the_model_ends(
    api: Api, engine: ScriptedEngine, tokenizer: Tokenizer, tokens: list[int], path: str, *, stream: bool
) -> None:
    says, calls = {
        CHAT: ("stop", "tool_calls"),
        RESPONSES: ("completed", "completed"),
        MESSAGES: ("end_turn", "tool_use"),
    }[path]
    end = (min(tokenizer.end_tokens),)
    for length in (*range(1, len(tokens), STRIDE), len(tokens)):
        engine.steps = [*((token,) for token in tokens[:length]), end]
        response = await asked(api, path, stream=stream)
        assert response.status_code == 200, response.text
        documents = documents_of(response)
        ends = ends_told(path, documents)
        if length == len(tokens):
            assert ends == {calls}
        assert ends in ({says}, {calls}), length
        if (arguments := arguments_told(path, documents)) is None:
            assert ends == {says}, length
        elif path == RESPONSES:
            items = documents[-1].get("response", documents[-1])["output"]
            assert (items[-1]["status"] == "completed") == arguments.endswith("}"), (length, arguments)
        else:
            # Models may leave out the tags behind values.
            assert (ends == {calls}) == arguments.endswith("}"), (length, arguments)


@pytest.mark.parametrize("path", TOOLS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_lost_stage_is_no_end_of_an_answer(
    api: Api, engine: ScriptedEngine, tokens: list[int], path: str, *, stream: bool
) -> None:
    for length in range(0, len(tokens), STRIDE):
        engine.steps = [*((token,) for token in tokens[:length]), StageFailed("stage 1 is gone")]
        response = await asked(api, path, stream=stream)
        assert response.status_code == 503 or (stream and response.status_code == 200), response.text
        assert ends_told(path, documents_of(response)) == {"error"}, length
