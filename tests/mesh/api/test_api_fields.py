"""Every known field of every API, with every kind of value: accepted with its meaning, or refused by name.

What means the same makes the same request of the engine.
"""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from mesh.api.foreign_fields import INSTEAD, NEUTRAL, OF_PROMPTS
from mesh.api.request_parsing import neutral_values, parse_body
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import InvalidRequest
from tests.contracts.field_table import BODIES
from tests.support.api_harness import Api, ScriptedEngine, running_api
from tests.support.embedders import ScriptedLink, embedding_backend, running_engine

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

HELLO: Any = [{"role": "user", "content": "Hello"}]
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "embeddings": "/v1/embeddings",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
LEAST: dict[str, dict[str, Any]] = {
    "chat": {"messages": HELLO, "seed": 5},
    "completions": {"prompt": "Hello", "seed": 5},
    "responses": {"input": "Hello", "seed": 5},
    "messages": {"messages": HELLO, "max_tokens": 5, "seed": 5},
    "embeddings": {"input": "Hello"},
    "tokenize": {"prompt": "Hello"},
    "detokenize": {"tokens": [1]},
}
TOOL = {"type": "function", "function": {"name": "look"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
# An object for each field that may be one and that shapes the answer.
OBJECTS: dict[str, dict[str, Any]] = {
    "stream_options": {"include_usage": False},
    "speculation": {"mode": "off"},
    "prediction": {"type": "content", "content": "x"},
    "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    "structured_outputs": {"json": SCHEMA},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    "reasoning": {"effort": "low"},
    "thinking": {"type": "disabled"},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "output_format": {"type": "json_schema", "schema": SCHEMA},
}
# In these, too, what is not known is refused.
INNER = {
    "response_format": "json_schema",
    "text": "format",
    "output_config": "format",
}
CHOICES: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {"type": "function", "function": {"name": "look", "colour": 1}},
        {"type": "function", "function": {"name": "look"}, "colour": 1},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL], "colour": 1}},
    ],
    "responses": [
        {"type": "function", "name": "look", "colour": 1},
        {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "look"}],
            "colour": 1,
        },
    ],
    "messages": [{"type": "auto", "colour": 1}, {"type": "tool", "name": "look", "colour": 1}],
}
KINDS = pytest.mark.parametrize("kind", PATHS)
HUGE = 10**30


@dataclass
class Served:
    api: Api
    engine: ScriptedEngine

    async def ask(self, kind: str, fields: dict[str, Any]) -> tuple[dict[str, Any] | None, Any]:
        """The error, or what the request meant: what the engine was asked, or else the answer."""
        self.engine.requests.clear()
        body = {name: value for name, value in {**LEAST[kind], **fields}.items() if value is not ...}
        response = await self.api.http.post(PATHS[kind], json=body)
        if response.status_code != 200:
            assert response.status_code in {400, 404}, (fields, response.text)
            error: dict[str, Any] = response.json()["error"]
            return error, None
        if not self.engine.requests:
            return None, response.json()
        return None, list(self.engine.requests)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(smollm2_path: Path) -> AsyncIterator[Served]:
    engine, tokenizer = ScriptedEngine([(300,), (301, 302)], context_length=4096), Tokenizer(smollm2_path)
    async with (
        running_api(engine, tokenizer, random_bits=lambda _bits: 7) as api,
        running_engine() as embedder,
    ):
        assert api.backends is not None
        api.backends.embeddings.add(embedding_backend(embedder, tokenizer))
        embedder.resume(ScriptedLink())
        yield Served(api, engine)


def names_of(kind: str) -> list[str]:
    return list(BODIES[kind].model_fields)


def is_about(error: dict[str, Any], name: str) -> bool:
    """Whether a refusal names the field."""
    return (error["param"] or "").partition(".")[0].partition("[")[0] == name


@KINDS
async def test_null_and_the_empty_text_mean_what_leaving_out_means(served: Served, kind: str) -> None:
    _, absent = await served.ask(kind, {})
    for name in set(names_of(kind)) - set(LEAST[kind]):
        for nothing in (None, ""):
            error, meaning = await served.ask(kind, {name: nothing})
            if error is not None:
                assert nothing == "" or name == "messages", (name, error)
                assert is_about(error, name) or name in {"model", "messages"}, (name, error)
            else:
                assert meaning == absent, (name, nothing)


@KINDS
async def test_a_whole_number_may_have_a_point(served: Served, kind: str) -> None:
    for name in names_of(kind):
        for number in (1, 5, -1, HUGE):
            error, meaning = await served.ask(kind, {name: number})
            pointed, same = await served.ask(kind, {name: float(number)})
            assert (error is None) == (pointed is None), (name, number, error, pointed)
            if error is None and number != HUGE:
                assert meaning == same, (name, number)
            elif pointed is not None:
                assert is_about(pointed, name) or "same setting" in pointed["message"], (name, pointed)


@KINDS
async def test_a_number_in_quotes_is_no_number(served: Served, kind: str) -> None:
    """A field that takes numbers refuses texts; one that takes texts does not fail over a number in one."""
    for name in names_of(kind):
        number, _ = await served.ask(kind, {name: 1})
        quoted, _ = await served.ask(kind, {name: "1"})
        if number is None and quoted is None:
            assert name in {"json_schema", "guided_json", "tokens"} or kind == "tokenize", name
        if quoted is not None and name != "model":
            assert is_about(quoted, name) or "either prompt or messages" in quoted["message"], (name, quoted)


@KINDS
async def test_an_object_with_an_unknown_field_is_refused_by_name(served: Served, kind: str) -> None:
    for name in OBJECTS.keys() & set(names_of(kind)):
        known, _ = await served.ask(kind, {name: OBJECTS[name]})
        assert known is None, (name, known)
        error, _ = await served.ask(kind, {name: {**OBJECTS[name], "colour": 1}})
        assert error is not None, name
        assert (error["param"], "not supported" in error["message"]) == (f"{name}.colour", True)
        ignored, _ = await served.ask(kind, {name: {**OBJECTS[name], "colour": None}})
        assert ignored is None, (name, ignored)
        if name in INNER:
            inner = INNER[name]
            error, _ = await served.ask(
                kind, {name: {**OBJECTS[name], inner: {**OBJECTS[name][inner], "colour": 1}}}
            )
            assert error is not None
            assert error["param"] == f"{name}.{inner}.colour"


@pytest.mark.parametrize("kind", CHOICES)
async def test_a_choice_with_an_unknown_field_is_refused_by_name(served: Served, kind: str) -> None:
    tools: dict[str, Any] = {
        "chat": TOOL,
        "responses": {"type": "function", "name": "look"},
        "messages": {"name": "look", "input_schema": {"type": "object"}},
    }
    for choice in CHOICES[kind]:
        error, _ = await served.ask(kind, {"tools": [tools[kind]], "tool_choice": choice})
        assert error is not None, choice
        assert error["param"] == "tool_choice"
        assert "colour" in error["message"]


@KINDS
async def test_what_is_not_supported_is_refused_unless_it_asks_for_nothing(kind: str) -> None:
    body = BODIES[kind]
    for name, values in neutral_values(body).items():
        if name in body.model_fields:
            continue
        for value in (None, "", [], *values):
            parse_body(json.dumps({**LEAST[kind], name: value}).encode(), body, 999)
        for value in ("blue", 7.5, {"colour": 1}, ["x"], HUGE):
            with pytest.raises(InvalidRequest, match=rf"^{name} is not supported: ") as refused:
                parse_body(json.dumps({**LEAST[kind], name: value}).encode(), body, 999)
            assert refused.value.param == name


async def test_what_to_do_instead_is_said_of_known_fields_only() -> None:
    assert set(INSTEAD) | OF_PROMPTS <= set(NEUTRAL)


async def test_a_body_may_be_counted_as_it_is_sent(served: Served) -> None:
    """Fields that change the answer alone mean nothing to those who count."""
    more = {"stop_sequences": ["x"], "output_format": {"type": "json_schema", "schema": SCHEMA}, "top_k": 3}
    body = {**LEAST["messages"], **more}
    response = await served.api.http.post("/v1/messages/count_tokens", json=body)
    assert response.status_code == 200, response.text
    body = {"messages": HELLO, "max_completion_tokens": 5, "stop": ["x"], "regex": "x"}
    assert (await served.api.http.post("/tokenize", json=body)).status_code == 200
