"""Bodies with a hostile value anywhere: refused, or answered, and never an error of our own."""

import copy
import json
from collections.abc import AsyncIterator, Iterator
from random import Random
from typing import Any

import pytest
import pytest_asyncio

from mesh.text.tokenizer import Tokenizer
from tests.support.api_harness import Api, ScriptedEngine, running_api
from tests.support.tiny_models import TinyModel

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_BODIES = 150
JSON = {"content-type": "application/json"}
SCHEMA: Any = {
    "type": "object",
    "properties": {"at": {"type": "string"}, "n": {"minimum": 0}},
    "required": ["at"],
}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}<|im_start|>assistant\n"
)
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "t"}]},
            {"role": "user", "content": "c"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "look", "strict": True, "parameters": SCHEMA}},
            {"type": "custom", "custom": {"name": "cut"}},
        ],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "response_format": {"type": "text"},
        "stop": ["x"],
        "logit_bias": {"5": 1},
        "thinking": {"type": "disabled"},
        "stream_options": {"include_usage": True},
        "max_tokens": 3,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [{"type": "input_text", "text": "t"}],
            },
            {"type": "custom_tool_call", "call_id": "c2", "name": "cut", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "x"},
        ],
        "tools": [
            {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True},
            {"type": "custom", "name": "cut"},
            {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "in"}]},
        ],
        "tool_choice": {"type": "function", "name": "look"},
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "max_output_tokens": 3,
    },
    "/v1/messages": {
        "max_tokens": 3,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "x"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "r"}]}
                ],
            },
        ],
        "tools": [
            {"name": "look", "input_schema": SCHEMA, "strict": True},
            {"type": "bash_20250124", "name": "bash"},
        ],
        "tool_choice": {"type": "tool", "name": "look"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
    },
    "/v1/completions": {"prompt": "p", "max_tokens": 3, "logprobs": 1, "stop": "x", "logit_bias": {"4": 2}},
}


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": [value]}
    return value


VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        0,
        -1,
        2**31,
        10**30,
        1.5,
        1e308,
        float("inf"),
        float("nan"),
        "",
        "a",
        "1",
        "auto",
        "required",
    ),
    *(
        "\ud800",
        "<|im_end|>",
        "<|im_start|>system\n",
        "</tool_call>",
        "\x00",
        "a" * 20_000,
        " " * 5_000,
        "{",
        "^(a+)+$",
    ),
    *(
        [],
        {},
        [None],
        [[]],
        {"": None},
        {"\ud800": 1},
        {"type": None},
        {"type": "text"},
        {"type": []},
        {"type": {}},
    ),
    *(
        {"type": "function"},
        {"type": "tool_use"},
        {"type": "image"},
        {"$ref": "#"},
        ["a"] * 500,
        deep(12),
        deep(90),
    ),
    {"type": "object", "properties": {'<b>\n"': {"enum": ["\ud800", "</parameter>", float("nan")]}}},
)
NAMES = ("x", "\ud800", "type", "name", "$ref", "not", "pattern", "enum", "const", "allOf", "content", "role")


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container within a value, with each key or index that it has."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def spoilt(body: Any, random: Random) -> Any:
    body = copy.deepcopy(body)
    for _ in range(random.choice((1, 1, 2, 3))):
        within, key = random.choice(list(places(body)))
        value = copy.deepcopy(random.choice(VALUES))
        match random.choice(("replaced", "replaced", "replaced", "named", "repeated")):
            case "named" if isinstance(within, dict):
                within[random.choice(NAMES)] = value
            case "repeated" if isinstance(within, list):
                within += [copy.deepcopy(within[key])] * 2
            case _:
                within[key] = value
    return body


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    controls = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
    tokenizer = Tokenizer(TinyModel("llama", n_layers=1, n_ctx_train=4096).write(path, controls=controls))
    tokenizer.chat_template = TEMPLATE
    async with running_api(ScriptedEngine([(70,), (71,)], context_length=4096), tokenizer) as running:
        yield running


@pytest.mark.parametrize("path", BODIES)
async def test_a_hostile_value_anywhere_is_refused_or_has_a_meaning(api: Api, path: str) -> None:
    seed = Random().randrange(2**32)
    random = Random(seed)
    statuses = set()
    for number in range(NUM_BODIES):
        body = {**spoilt(BODIES[path], random), **({"stream": True} if number % 3 == 0 else {})}
        response = await api.http.post(path, content=json.dumps(body).encode(), headers=JSON)
        statuses.add(response.status_code)
        assert response.status_code in {200, 400, 404}, (seed, number, response.text, json.dumps(body)[:2000])
        assert "internal error" not in response.text, (seed, number, json.dumps(body)[:2000])
    assert {200, 400} <= statuses


@pytest.mark.parametrize("value", [[None], {}, {"type": "text"}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_type_that_is_no_text_is_refused(api: Api, path: str, value: Any) -> None:
    body = copy.deepcopy(BODIES[path])
    said = next(
        each for each in body["input" if "input" in body else "messages"] if each.get("role") == "user"
    )
    said["content"][0]["type"] = value
    response = await api.http.post(path, json=body)
    assert response.status_code == 400
    assert "text" in response.json()["error"]["message"]


async def test_a_field_of_half_a_surrogate_pair_is_refused_by_name(api: Api) -> None:
    body = {**BODIES["/v1/messages"], "tool_choice": {"type": "auto", "\ud800": 1}}
    response = await api.http.post("/v1/messages", content=json.dumps(body).encode(), headers=JSON)
    assert response.status_code == 400
    assert "\\ud800" in response.json()["error"]["message"]
