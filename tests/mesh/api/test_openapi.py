"""The API's own document: whole, and true of what the API answers."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator

from mesh.api.api_keys import ApiKeys, KeyRecord, digest_of
from mesh.text.tokenizer import Tokenizer
from tests.support.api_harness import KEY, Api, ScriptedEngine, running_api

HELLO = [{"role": "user", "content": "Hello"}]
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(smollm2_path: Path) -> AsyncIterator[Api]:
    keys = ApiKeys([KeyRecord("alice", digest_of(KEY)), KeyRecord("poor", digest_of("sk-poor"), 1)])
    async with running_api(ScriptedEngine([(300,), (301, 302)]), Tokenizer(smollm2_path), keys=keys) as api:
        yield api


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def document(shared: Api) -> dict[str, Any]:
    found: dict[str, Any] = (await shared.http.get("/openapi.json", headers=HEADERS)).json()
    return found


pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]


async def test_it_is_for_those_with_a_key(shared: Api) -> None:
    assert (await shared.http.get("/openapi.json")).status_code == 401


async def test_every_schema_is_one_and_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    references = [found for found in walk(document) if isinstance(found, str) and found.startswith("#/")]
    assert len(references) > 20
    assert {found.removeprefix("#/components/schemas/") for found in references} <= set(schemas)


async def test_every_route_says_what_a_missing_key_and_a_busy_server_get(document: dict[str, Any]) -> None:
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len(operations) >= 9
    for operation in operations:
        assert {"400", "401", "429", "503"} <= set(operation["responses"])
        assert ("200" in operation["responses"]) is ("501" not in operation["responses"])
        assert "422" not in operation["responses"]
        for status, response in operation["responses"].items():
            if status != "200":
                schema = response["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorBody"}


@pytest.mark.parametrize(
    ("method", "path", "request_", "status"),
    [
        ("post", "/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 2}, 200),
        ("post", "/v1/chat/completions", {"messages": HELLO, "return_token_ids": True}, 200),
        ("post", "/v1/chat/completions", {"messages": []}, 400),
        ("post", "/v1/chat/completions", {"messages": HELLO, "model": "other"}, 404),
        ("post", "/v1/completions", {"prompt": ["a", "b"], "logprobs": 1, "max_tokens": 3}, 200),
        ("post", "/v1/embeddings", {"input": "x"}, 400),
        ("get", "/v1/models", None, 200),
        ("get", "/v1/models/{model_id}", None, 404),
        ("get", "/health", None, 200),
        ("get", "/mesh/status", None, 200),
        ("post", "/mesh/links", None, 503),
    ],
)
async def test_answers_are_as_it_says(
    shared: Api,
    document: dict[str, Any],
    method: str,
    path: str,
    request_: dict[str, Any] | None,
    status: int,
) -> None:
    response = await shared.http.request(
        method, path.replace("{", "").replace("}", ""), json=request_, headers=HEADERS
    )
    assert response.status_code == status, response.text
    if request_ is not None and status == 200:
        body = document["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]
        validator_of(document, body).validate(request_)
    check(document, response, method, path)


async def test_a_key_that_is_used_up_gets_what_it_says(shared: Api, document: dict[str, Any]) -> None:
    headers = {"authorization": "Bearer sk-poor"}
    for status in (200, 429):
        response = await shared.http.get("/v1/models", headers=headers)
        assert response.status_code == status
        check(document, response, "get", "/v1/models")
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 2.5},
        {"max_tokens": 0},
        {"stop": ["x"] * 17},
        {"logit_bias": {"5": 101}},
        {"frequency_penalty": 3},
        {"repeat_penalty": 0},
        {"top_logprobs": 21, "logprobs": True},
        {"n": 17},
        {"tools": [{}]},
        {"speculation": {"widht": 1}},
        {"prediction": {"type": "content"}},
        {"messages": [{"role": "boss", "content": ""}]},
        {"messages": []},
        {"seed": 2**64},
        {"stream_options": {"include_usages": True}},
        {"response_format": {"type": "json_object", "shema": {}}},
    ],
)
async def test_what_it_forbids_is_refused(
    shared: Api, document: dict[str, Any], fields: dict[str, Any]
) -> None:
    asked = {"messages": HELLO, **fields}
    response = await shared.http.post("/v1/chat/completions", json=asked, headers=HEADERS)
    assert response.status_code == 400
    assert not validator_of(document, {"$ref": "#/components/schemas/ChatBody"}).is_valid(asked)


def check(document: dict[str, Any], response: httpx.Response, method: str, path: str) -> None:
    content = document["paths"][path][method]["responses"][str(response.status_code)]["content"]
    validator_of(document, content[response.headers["content-type"]]["schema"]).validate(response.json())


def validator_of(document: dict[str, Any], schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": document["components"]})


def walk(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [found for inner in value.values() for found in walk(inner)]
    if isinstance(value, list):
        return [found for inner in value for found in walk(inner)]
    return [value]
