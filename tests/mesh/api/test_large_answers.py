"""Answers that are written in a thread, since they report thousands of tokens: they say the same."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mesh.api.errors import is_large_json, json_bytes, json_size, json_steps, large_json_bytes
from mesh.text.tokenizer import Tokenizer
from tests.support import api_harness
from tests.support.api_harness import Api, ScriptedEngine, running_api

tokenizer = api_harness.tokenizer

COMPLETIONS = "/v1/completions"
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("\ud800")


def _around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner, max_size=5)
        | st.tuples(inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=5)
    )


def _many(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3).map(lambda values: values * 40)


# At most two levels of many values: each further one would make them forty times as many.
NESTED = st.recursive(SCALARS | _many(SCALARS), _around, max_leaves=20)
VALUES = NESTED | _around(_many(NESTED))


@given(value=VALUES)
@example(value={str(number): [number] for number in range(200)})
@example(value='"\n\u4e2d\ud800' * 50_000)
@example(value=["x" * 100_000] * 70)
def test_steps_write_the_same_json(value: Any) -> None:
    assert large_json_bytes(value) == json_bytes(value)
    assert json_size(value) == len(json_bytes(value))


@pytest.mark.parametrize("value", ["x" * 2**21, ["x" * 2**18] * 70, {str(n): "x" * 2**15 for n in range(70)}])
def test_no_step_is_long(value: Any) -> None:
    assert is_large_json(value)
    assert max(map(len, json_steps(value))) <= 2**18 + 2**16


@pytest.mark.parametrize("value", [[1] * 10_000, {"a": ["x" * 200_000, {"b": [None] * 100}]}])
def test_what_is_written_at_once_is_not_large(value: Any) -> None:
    assert not is_large_json(value)
    assert is_large_json([value, value, "x" * 200_000])


@pytest.mark.model
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["Hello world", "One two three"], "echo": True, "logprobs": 2, "max_tokens": 2},
        {"prompt": "Hello world", "return_token_ids": True, "echo": True},
    ],
)
async def test_long_answers_say_what_short_ones_do(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], *, is_streamed: bool
) -> None:
    engine = ScriptedEngine([(300,), (301,)], likeliest=((300, -0.25), (2, -1.5)))
    async with running_api(engine, tokenizer, random_bits=lambda _bits: 7, now_s=lambda: 1e9) as api:
        short = await _answer(api, {**fields, "stream": is_streamed})
        monkeypatch.setattr("mesh.api.openai_format.MOST_AT_ONCE", 0)
        monkeypatch.setattr("mesh.api.openai_format.MOST_AT_ONCE", 0)
        assert await _answer(api, {**fields, "stream": is_streamed}) == short


async def _answer(api: Api, fields: dict[str, Any]) -> list[Any]:
    answer = await api.http.post(COMPLETIONS, json=fields)
    assert answer.status_code == 200
    lines = answer.text.split("\n\n") if fields["stream"] else [answer.text]
    found = [json.loads(line.removeprefix("data: ")) for line in lines if line[-1:] == "}"]
    for each in found:
        each.pop("timings", None)
    # Choices of a stream come in any order.
    return sorted(found, key=lambda each: [choice["index"] for choice in each["choices"]])
