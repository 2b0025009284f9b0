"""`response_format`, `json_schema` and `grammar` through the API, with a fake model and a real vocabulary."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator

from mesh.text.tokenizer import Tokenizer
from tests.support.proposers import Parrot
from tests.support.ring_api import CHAT, RingApi, running_ring_api

HELLO = [{"role": "user", "content": "Hello"}]
COMPLETIONS = "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
        "size": {"type": "integer", "minimum": 3, "maximum": 12},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
SCHEMA_PARAM = "response_format.json_schema.schema"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ring(smollm2_path: Path) -> AsyncIterator[RingApi]:
    async with running_ring_api(Tokenizer(smollm2_path), make_proposer=Parrot) as running:
        yield running


pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]


async def ask(ring: RingApi, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
    response = await ring.api.http.post(path, json={**prompt, "seed": 1, "max_tokens": 400, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def refusal(ring: RingApi, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
    response = await ring.api.http.post(path, json={**prompt, "max_tokens": 5, **fields})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("top_k", [0, 40])
async def test_an_answer_keeps_to_its_schema(ring: RingApi, temperature: float, top_k: int) -> None:
    """Though the fake model says anything at all."""
    for mode in ("auto", "off"):
        answer = await ask(
            ring, response_format=FORMAT, temperature=temperature, top_k=top_k, speculation={"mode": mode}
        )
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "stop"
        Draft202012Validator(SCHEMA).validate(json.loads(choice["message"]["content"]))


async def test_llama_server_s_fields_and_completions(ring: RingApi) -> None:
    answer = await ask(ring, COMPLETIONS, json_schema=SCHEMA)
    Draft202012Validator(SCHEMA).validate(json.loads(answer["choices"][0]["text"]))
    answer = await ask(ring, grammar='root ::= ("ja" | "nein") "!"{2,3}')
    assert answer["choices"][0]["message"]["content"] in {"ja!!", "ja!!!", "nein!!", "nein!!!"}
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_any_object_begins_as_one_and_may_be_cut(ring: RingApi) -> None:
    # Any seed whose object is not over after three tokens.
    answer = await ask(ring, response_format={"type": "json_object"}, max_tokens=3, seed=2)
    assert answer["choices"][0]["message"]["content"].startswith("{")
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_stream_keeps_to_it_too(ring: RingApi) -> None:
    fields: dict[str, Any] = {"messages": HELLO, "seed": 3, "max_tokens": 400, "response_format": FORMAT}
    whole = (await ask(ring, **fields))["choices"][0]["message"]["content"]
    response = await ring.api.http.post(CHAT, json={**fields, "stream": True})
    events = [
        line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")
    ]
    deltas = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(deltas) == whole


async def test_logprobs_are_the_model_s_own(ring: RingApi) -> None:
    """What the grammar forces may be what the model held unlikely."""
    answer = await ask(ring, grammar='root ::= "zebra"', logprobs=True, top_logprobs=1, temperature=0)
    [choice] = answer["choices"]
    content = choice["logprobs"]["content"]
    assert content
    assert any(entry["logprob"] < entry["top_logprobs"][0]["logprob"] for entry in content)


@pytest.mark.parametrize(
    "nothing", [{"response_format": {"type": "text"}}, {"grammar": ""}, {"grammar": None}]
)
async def test_what_asks_for_nothing_changes_nothing(ring: RingApi, nothing: dict[str, Any]) -> None:
    assert (await ask(ring, max_tokens=8, **nothing))["choices"] == (await ask(ring, max_tokens=8))["choices"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": "json"}, "response_format", "dictionary"),
        ({"response_format": {}}, "response_format.type", "required"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, SCHEMA_PARAM, "missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}},
            SCHEMA_PARAM,
            'type "thing" is unknown',
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"properties": {"a": {"not": {}}}}},
                }
            },
            SCHEMA_PARAM,
            "at `properties/a`: the keyword not cannot be expressed by a grammar",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
            "response_format.json_schema.strict",
            "boolean",
        ),
        ({"json_schema": {"$ref": "#"}}, "json_schema", "left-recursive"),
        ({"json_schema": 5}, "json_schema", "must be a JSON Schema"),
        ({"grammar": "root ::= x"}, "grammar", "`x`, which is not defined"),
        ({"grammar": 'root ::= root "a"'}, "grammar", "left-recursive"),
        ({"grammar": 5}, "grammar", "string"),
        (
            {"grammar": 'root ::= "a"', "json_schema": {}},
            "grammar",
            "both give a format for the answer",
        ),
        ({"grammar": 'root ::= "a"', "response_format": {"type": "json_object"}}, "grammar", "send one"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_cannot_be_kept_to_is_refused(
    ring: RingApi, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    error = await refusal(ring, path, **fields)
    assert error["param"] is not None
    assert error["param"].startswith(param)
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


async def test_what_the_vocabulary_can_only_spell_is_spelt(ring: RingApi) -> None:
    """U+FFFFF is no character, but SmolLM2 has a token for each of its bytes."""
    answer = await ask(ring, grammar='root ::= "\\U000FFFFF"')
    assert answer["choices"][0]["message"]["content"] == "\U000fffff"
