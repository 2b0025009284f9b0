"""Anthropic's client, unmodified and blocking, against a real mesh: messages, streams, tools, counts."""

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.support import mesh_in_process
from tests.support.api_harness import KEY

pytestmark = pytest.mark.model

mesh_url = mesh_in_process.mesh_url

FORECAST: Any = {
    "name": "forecast",
    "description": "The weather of the next days.",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
ASKED: Any = {
    "model": "default",
    "max_tokens": 24,
    "messages": [{"role": "user", "content": "Name three fruits."}],
    "extra_body": {"temperature": 0},
}


@pytest.fixture
def client(mesh_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=mesh_url, api_key=KEY, max_retries=0, timeout=120) as client:
        yield client


def test_a_message_says_what_a_chat_says(client: anthropic.Anthropic, mesh_url: str) -> None:
    message = client.messages.create(**ASKED)
    with openai.OpenAI(base_url=f"{mesh_url}/v1", api_key=KEY, max_retries=0, timeout=120) as other:
        chat = other.chat.completions.create(
            model="default", temperature=0, max_tokens=24, messages=ASKED["messages"]
        )
    assert message.content[0].text == chat.choices[0].message.content
    with client.messages.stream(**ASKED) as stream:
        pieces = list(stream.text_stream)
        streamed = stream.get_final_message()
    assert len(pieces) > 3
    assert "".join(pieces) == streamed.content[0].text == message.content[0].text  # type: ignore[union-attr]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (
        message.stop_reason,
        message.usage.output_tokens,
    )
    # The second time the prompt comes from the cache.
    assert streamed.usage.cache_read_input_tokens
    total = streamed.usage.input_tokens + streamed.usage.cache_read_input_tokens
    counted = client.messages.count_tokens(model="default", messages=ASKED["messages"])
    assert counted.input_tokens == total


def test_a_tool_is_called_and_its_result_used(client: anthropic.Anthropic) -> None:
    asked: Any = {**ASKED, "max_tokens": 64, "tools": [FORECAST]}
    forced: Any = {"type": "tool", "name": "forecast"}
    first = client.messages.create(**asked, tool_choice=forced)
    assert first.stop_reason == "tool_use"
    [call] = [block for block in first.content if block.type == "tool_use"]
    assert set(call.input) == {"city", "days"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sun, 20 degrees."}
    turns = [
        *ASKED["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(**{**asked, "messages": turns})
    assert second.stop_reason in {"end_turn", "max_tokens", "tool_use"}
    assert second.usage.cache_read_input_tokens


def test_a_prompt_that_was_read_ahead_is_in_the_cache(client: anthropic.Anthropic) -> None:
    asked: Any = {**ASKED, "messages": [{"role": "user", "content": "Which birds cannot fly? Name three."}]}
    ahead = client.messages.create(**{**asked, "max_tokens": 0})
    assert (ahead.content, ahead.stop_reason, ahead.usage.output_tokens) == ([], "max_tokens", 0)
    answer = client.messages.create(**asked)
    # All but the last token, which is computed again for what follows it.
    assert answer.usage.input_tokens <= 1
    assert answer.content


def test_a_wrong_key_is_an_authentication_error(mesh_url: str) -> None:
    with (
        anthropic.Anthropic(base_url=mesh_url, api_key="sk-unknown", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError, match="unknown to this server"),
    ):
        client.messages.create(**ASKED)
