"""The API's document walked with real requests: what it allows is accepted, what it forbids is refused."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mesh.text.tokenizer import Tokenizer
from tests.mesh.api.test_openapi import validator_of
from tests.qualification.fuzz.mutations import SchemaValues
from tests.support.api_harness import Api, ScriptedEngine, running_api
from tests.support.embedders import ScriptedLink, embedding_backend, running_engine

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "look"}}
LEAST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions/input_tokens": {"messages": HELLO},
    "/v1/responses": {"input": "Hello"},
    "/v1/responses/input_tokens": {"input": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 8},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/embeddings": {"input": "Hello"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1]},
}
# What some fields mean nothing without.
COMPANIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("/v1/chat/completions", "top_logprobs"): {"logprobs": True},
    **{
        (f"/v1/{path}", "stream_options"): {"stream": True}
        for path in ("chat/completions", "chat/completions/input_tokens", "completions", "messages")
    },
    **{
        (f"/v1/{path}", "stream_options"): {"stream": True}
        for path in ("responses", "responses/input_tokens")
    },
    ("/v1/chat/completions", "function_call"): {"functions": [{"name": "look"}]},
    ("/v1/chat/completions/input_tokens", "function_call"): {"functions": [{"name": "look"}]},
    ("/tokenize", "function_call"): {"functions": [{"name": "look"}]},
    ("/v1/chat/completions", "tool_choice"): {"tools": [TOOL]},
    ("/v1/chat/completions/input_tokens", "top_logprobs"): {"logprobs": True},
    ("/v1/chat/completions/input_tokens", "tool_choice"): {"tools": [TOOL]},
    ("/v1/responses", "tool_choice"): {"tools": [{"type": "function", "name": "look"}]},
    ("/v1/responses/input_tokens", "tool_choice"): {"tools": [{"type": "function", "name": "look"}]},
    ("/v1/messages", "tool_choice"): {"tools": [{"name": "look", "input_schema": {}}]},
    ("/v1/messages/count_tokens", "tool_choice"): {"tools": [{"name": "look", "input_schema": {}}]},
    ("/tokenize", "messages"): {"prompt": None},
}
# What no schema can say: that values fit this model, this server, or each other.
BEYOND_SCHEMAS = (
    "prompt is too long",
    "is not served here",
    "ids go from",
    "does not have",
    "surrogate",
    "is not stored here",
    "this model reads text only",
    "fetches nothing",
    "is not in base64",
    "name one of them",
    "two functions are named",
    "is not a text of the assistant",
    "either prompt or messages",
    "more than",
    "holds no token",
    "must be a string or a list of text parts",
    "in messages of the user and in results of tools",
    "makes vectors of",
    "is a chat model",
    "they are the same setting",
    "so there would be no answer",
    "they say nothing",
    "chat template has no setting for it",
    "is to be continued",
    "knows no such tools",
    "by its type or by its fields alone",
    "no answers are recorded here",
)
# What these hold is in a language of its own.
LANGUAGES = frozenset(
    {
        *("grammar", "json_schema", "response_format", "text", "regex", "ebnf", "structured_outputs"),
        *("guided_json", "guided_regex", "guided_grammar", "output_format", "output_config"),
    }
)
WRONG: tuple[Any, ...] = (True, -5, 10**6, 1.5, "x", "", [], {}, [[]], [None], {"a": 1}, [1.5], ["x"] * 300)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(smollm2_path: Path) -> AsyncIterator[Api]:
    engine, tokenizer = ScriptedEngine([(300,), (301, 302)], context_length=8192), Tokenizer(smollm2_path)
    async with running_api(engine, tokenizer) as api, running_engine() as embedder:
        assert api.backends is not None
        api.backends.embeddings.add(embedding_backend(embedder, tokenizer))
        embedder.resume(ScriptedLink())
        yield api


class Walk:
    """What is walked; not a dataclass, whose text would hold the whole document."""

    def __init__(self, api: Api, document: dict[str, Any]) -> None:
        self.api = api
        self.document = document

    def properties(self, path: str) -> dict[str, Any]:
        content = self.document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        name = content["schema"]["$ref"].rpartition("/")[2]
        found: dict[str, Any] = self.document["components"]["schemas"][name]["properties"]
        return found

    async def send(self, path: str, name: str, value: Any) -> httpx.Response:
        body = {**LEAST[path], **COMPANIONS.get((path, name), {}), name: value}
        headers = {"content-type": "application/json"}
        # As ASCII: half surrogates must get through.
        return await self.api.http.post(path, content=json.dumps(body), headers=headers)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def walk(shared: Api) -> Walk:
    return Walk(shared, (await shared.http.get("/openapi.json")).json())


async def test_every_path_with_a_body_is_walked(walk: Walk) -> None:
    """But for those of operators, who need hosts."""
    operations = {
        path
        for path, methods in walk.document["paths"].items()
        for operation in methods.values()
        if "requestBody" in operation and not path.startswith("/mesh/")
    }
    assert operations == set(LEAST)


@pytest.mark.parametrize("path", LEAST)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_what_it_allows_is_accepted(walk: Walk, path: str, seed: int) -> None:
    values = SchemaValues(walk.document, Random(seed))
    for name, schema in walk.properties(path).items():
        value = values.value(schema)
        response = await walk.send(path, name, value)
        if response.status_code != 200:
            error = response.json()["error"]
            assert response.status_code in {400, 404}, (name, value, error)
            is_known = any(words in error["message"] for words in BEYOND_SCHEMAS)
            assert is_known or name in LANGUAGES, (name, value, error)


@pytest.mark.parametrize("path", LEAST)
async def test_what_it_forbids_is_refused_by_name(walk: Walk, path: str) -> None:
    num_refused = 0
    for name, schema in walk.properties(path).items():
        for value in WRONG:
            if validator_of(walk.document, schema).is_valid(value):
                continue
            response = await walk.send(path, name, value)
            assert response.status_code == 400, (name, value, response.text)
            param = response.json()["error"]["param"] or ""
            assert param.partition(".")[0].partition("[")[0] == name, (name, value, response.text)
            num_refused += 1
    assert num_refused > 3 * len(walk.properties(path))
