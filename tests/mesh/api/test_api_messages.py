"""`/v1/messages` through Anthropic's own client: what it takes, the events it sends, and its errors."""

import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest

from mesh.api import pictures
from mesh.api.api_keys import ApiKeys, KeyRecord, digest_of
from mesh.api.messages.events import ContentBlocks
from mesh.api.messages.protocol import messages_of
from mesh.engine import GenerationStats
from mesh.text.message_parts import ToolCallArguments, ToolCallStart
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import InvalidRequest, StageFailed
from tests.mesh.api.test_api_tools import PARAMETERS, saying, shown
from tests.support import api_harness
from tests.support.api_harness import KEY, MODEL, NO_AUTHORITIES, Api, ScriptedEngine, running_api

pytestmark = pytest.mark.model

tokenizer, engine, api = api_harness.tokenizer, api_harness.engine, api_harness.api

MESSAGES = "/v1/messages"
HELLO: Any = [{"role": "user", "content": "Weather in Oslo?"}]
WEATHER: Any = {"name": "weather", "description": "Tells it.", "input_schema": PARAMETERS}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
SAID = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"


@asynccontextmanager
async def client_of(api: Api, key: str = KEY) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's client; like ours it reads no authorities, which plain HTTP does not need."""
    http = anthropic.DefaultAsyncHttpxClient(verify=NO_AUTHORITIES)
    async with anthropic.AsyncAnthropic(
        base_url=api.url, api_key=key, max_retries=0, timeout=60, http_client=http
    ) as client:
        yield client


async def test_a_text_in_one_piece(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "It is fine.")
    async with running_api(engine, tokenizer) as api, client_of(api) as client:
        message = await client.messages.create(
            model=MODEL, max_tokens=99, system="Be brief.", messages=HELLO, extra_body={"temperature": 0}
        )
        assert shown(engine, tokenizer).startswith(
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWeather in Oslo?<|im_end|>\n"
        )
    assert engine.requests[0].max_tokens == 99
    assert engine.requests[0].sampling.temperature == 0
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == "It is fine."  # type: ignore[union-attr]
    assert (message.role, message.model, message.type) == ("assistant", MODEL, "message")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == len(engine.steps)
    assert message.usage.input_tokens == len(engine.requests[0].prompt)


async def test_what_a_cache_held_is_told_apart(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine([(300,)], stats=GenerationStats(num_cached=5))
    async with running_api(engine, tokenizer) as api, client_of(api) as client:
        marked: Any = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
        message = await client.messages.create(
            model=MODEL, max_tokens=1, messages=[{"role": "user", "content": marked}]
        )
    usage = message.usage
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (5, 0)
    assert usage.input_tokens + 5 == len(engine.requests[0].prompt)
    assert message.stop_reason == "max_tokens"


async def test_the_client_puts_a_stream_together(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, SAID)
    asked: Any = {"model": MODEL, "max_tokens": 500, "messages": HELLO, "tools": [WEATHER]}
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    async with running_api(engine, tokenizer) as api, client_of(api) as client:
        async with client.messages.stream(**asked, thinking=thinking) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
        whole = await client.messages.create(**asked)
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [block.type for block in streamed.content] == ["thinking", "text", "tool_use"]
    assert [block.model_dump(exclude={"id"}) for block in streamed.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]
    call: Any = streamed.content[2]
    assert (call.name, call.input) == ("weather", {"city": "Oslo"})
    assert call.id.startswith("toolu_")
    assert streamed.content[1].text == "I look."  # type: ignore[union-attr]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("tool_use", len(engine.steps))
    assert streamed.usage.input_tokens == whole.usage.input_tokens


async def test_line_breaks_in_arguments_break_no_client(tokenizer: Tokenizer) -> None:
    """As small models write them who write files: the client's stream read no such string."""
    text = '<tool_call>{"name": "weather", "arguments": {"city": "a\n\tb", "at": "\\d"}}</tool_call>'
    asked: Any = {"model": MODEL, "max_tokens": 500, "messages": HELLO, "tools": [WEATHER]}
    async with running_api(saying(tokenizer, text), tokenizer) as api, client_of(api) as client:
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        whole = await client.messages.create(**asked)
        chat = await api.http.post(
            "/v1/chat/completions",
            json={
                "messages": HELLO,
                "tools": [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}],
            },
        )
    (called,) = chat.json()["choices"][0]["message"]["tool_calls"]
    for found in (
        streamed.content[0].input,  # type: ignore[union-attr]
        whole.content[0].input,
        json.loads(called["function"]["arguments"]),
    ):
        assert found == {"city": "a\n\tb", "at": "\\d"}


async def test_the_events_of_a_stream_in_order(tokenizer: Tokenizer) -> None:
    async with running_api(saying(tokenizer, SAID), tokenizer) as api:
        fields = {"max_tokens": 500, "messages": HELLO, "tools": [WEATHER], "stream": True}
        response = await api.http.post(MESSAGES, json=fields)
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert events[-1]["type"] == name.removeprefix("event: ")
    kinds = [event["type"] for event in events]
    once = [kind for index, kind in enumerate(kinds) if index == 0 or kinds[index - 1] != kind]
    block_kinds = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert once == [
        "message_start",
        *block_kinds,
        *block_kinds,
        *block_kinds,
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["content"] == []
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1, 2]
    # A client waits for a signature behind the last thought.
    thoughts = [event["delta"]["type"] for event in events if event.get("index") == 0 and "delta" in event]
    assert (thoughts[0], thoughts[-1]) == ("thinking_delta", "signature_delta")


async def test_results_of_calls_reach_the_model(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Sunny.")
    turns: Any = [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "y"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}},
                {"type": "tool_use", "id": "toolu_2", "name": "weather", "input": {"city": "Bergen"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sun"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": [{"type": "text", "text": "no such city"}],
                    "is_error": True,
                },
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    async with running_api(engine, tokenizer) as api, client_of(api) as client:
        await client.messages.create(model=MODEL, max_tokens=9, messages=turns, tools=[WEATHER])
        text = shown(engine, tokenizer)
    order = ["I look.", '"city": "Oslo"', '"city": "Bergen"', "sun", "Error: no such city", "And?"]
    places = [text.index(each) for each in order]
    assert places == sorted(places)


def test_turns_of_one_role_are_one_turn() -> None:
    """Results of calls come first in it, and there is one message of instructions."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}
    found = messages_of(
        [
            {"role": "system", "content": "Now."},
            {"role": "user", "content": "One."},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": "Two."},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "sun"}],
            },
            {"role": "system", "content": "Later."},
            {"role": "assistant", "content": "Three."},
            {"role": "assistant", "content": [{"type": "text", "text": "Four."}]},
        ],
        "Be brief.",
    )
    assert [(message["role"], message["content"]) for message in found] == [
        ("system", "Be brief.\n\nNow."),
        ("user", "One."),
        ("assistant", ""),
        ("tool", "sun"),
        ("user", "Two."),
        ("system", "Later."),
        ("assistant", "Three.\nFour."),
    ]


async def test_a_picture_in_a_result_does_not_end_the_conversation() -> None:
    """What tools return is not the client's choice; a picture of the user is refused."""
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    parts: list[Any] = [{"type": "text", "text": "2 by 2"}, picture, {"type": "x y\n" * 99}]
    messages = messages_of(
        [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": parts}]}], None
    )
    of_text = await pictures.shown(
        messages, None, param="messages", client=None, random_bits=secrets.randbits
    )
    (result,) = of_text.messages
    assert result["content"] == "\n".join(
        ["2 by 2", *(f"[{each} left out: this model reads text only]" for each in ("image", "part"))]
    )


def _result_of(content: Any) -> list[dict[str, Any]]:
    block = {"type": "tool_result", "tool_use_id": "t", "content": content}
    return messages_of([{"role": "user", "content": [block]}], None)


@pytest.mark.parametrize("content", [[3], [{"text": "x"}], [{"type": 3}], {"rows": 2}, 5])
def test_a_result_that_is_json_is_shown_as_it_is(content: Any) -> None:
    (result,) = _result_of(content)
    assert json.loads(result["content"]) == content


def test_a_text_of_a_result_without_a_text_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\].content: part 0 has no text"):
        _result_of([{"type": "text"}])


def test_a_turn_of_many_blocks_is_read_in_one_pass() -> None:
    blocks = [{"type": "text", "text": "x" * 100}] * 100_000
    (message,) = messages_of([{"role": "assistant", "content": blocks}], None)
    assert len(message["content"]) == 101 * 100_000 - 1


async def test_a_key_may_come_in_either_header(tokenizer: Tokenizer) -> None:
    body = {"messages": HELLO, "max_tokens": 4}
    keys = ApiKeys([KeyRecord("alice", digest_of(KEY))])
    async with running_api(saying(tokenizer, "Yes."), tokenizer, keys=keys) as api:
        statuses = []
        for headers in (
            {"x-api-key": KEY, "authorization": ""},
            {"x-api-key": "wrong", "authorization": ""},
            # The bearer counts, if there is one.
            {"x-api-key": KEY, "authorization": "Bearer wrong"},
            {"x-api-key": "wrong", "authorization": f"Bearer {KEY}"},
        ):
            response = await api.http.post("/v1/messages", json=body, headers=headers)
            statuses.append(response.status_code)
    assert statuses == [200, 401, 401, 200]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ('{"a": "x\ny"}', {"a": "x\ny"}),
        ('{"a": NaN}', {}),
        ('{"a": ' + "[" * 100_000, {}),
        ("[1]", {}),
        ("", {}),
    ],
)
def test_arguments_are_an_object_whatever_was_written(arguments: str, found: dict[str, Any]) -> None:
    content = ContentBlocks(lambda: "toolu_1")
    content.add([ToolCallStart(0, "weather"), ToolCallArguments(0, arguments)])
    content.close()
    assert content.blocks[0]["input"] == found


async def test_the_line_of_a_client_about_itself_is_left_out(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Yes.")
    system: Any = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1234;"},
        {"type": "text", "text": "Be brief."},
        {"type": "text", "text": "Be kind."},
    ]
    async with running_api(engine, tokenizer) as api, client_of(api) as client:
        await client.messages.create(model=MODEL, max_tokens=9, messages=HELLO, system=system)
        assert shown(engine, tokenizer).startswith("<|im_start|>system\nBe brief.\n\nBe kind.<|im_end|>")


async def test_instructions_may_come_between_turns(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Yes.")
    turns: Any = [*HELLO, {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Well?"}]
    async with running_api(engine, tokenizer) as api, client_of(api) as client:
        await client.messages.create(model=MODEL, max_tokens=9, messages=turns)
        text = shown(engine, tokenizer)
    places = [text.index(each) for each in ("Oslo?", "<|im_start|>system\nBe brief.", "Well?")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    # Claude Code 2.1.328 sends the last one, which the SDK does not know.
    ("display", "reasoning"),
    [("omitted", ""), ("summarized", "Hm."), ("updates", "Hm.")],
)
async def test_reasoning_is_left_out_where_it_is_not_wanted(
    tokenizer: Tokenizer, display: str, reasoning: str
) -> None:
    thinking: Any = {"type": "adaptive", "display": display}
    async with running_api(saying(tokenizer, SAID), tokenizer) as api, client_of(api) as client:
        message = await client.messages.create(
            model=MODEL, max_tokens=99, messages=HELLO, tools=[WEATHER], thinking=thinking
        )
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[0].thinking == reasoning  # type: ignore[union-attr]


async def test_a_limit_beyond_the_context_ends_where_the_context_does(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "one two three", ends=False)
    async with running_api(engine, tokenizer) as api, client_of(api) as client:
        message = await client.messages.create(model=MODEL, max_tokens=32_000, messages=HELLO)
    assert engine.requests[0].max_tokens == engine.context_length - len(engine.requests[0].prompt)
    assert message.stop_reason == "model_context_window_exceeded"


async def test_a_stop_sequence_is_named(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "one two three")
    asked: Any = {"model": MODEL, "max_tokens": 99, "messages": HELLO, "stop_sequences": ["four", " three"]}
    async with running_api(engine, tokenizer) as api, client_of(api) as client:
        message = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
    for found in (message, streamed):
        assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", " three")
        assert found.content[0].text == "one two"  # type: ignore[union-attr]


async def test_an_answer_goes_on_with_what_the_assistant_began(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, " fine.")
    turns: Any = [*HELLO, {"role": "assistant", "content": "It is"}]
    async with running_api(engine, tokenizer) as api, client_of(api) as client:
        await client.messages.create(model=MODEL, max_tokens=9, messages=turns)
        assert shown(engine, tokenizer).endswith("<|im_start|>assistant\nIt is")


@pytest.mark.parametrize(
    ("choice", "is_forced", "names"),
    [
        ({"type": "auto"}, False, ["clock", "weather"]),
        ({"type": "any"}, True, ["clock", "weather"]),
        ({"type": "tool", "name": "weather"}, True, ["weather"]),
        ({"type": "none"}, False, []),
    ],
)
async def test_choices_of_tools(tokenizer: Tokenizer, choice: Any, is_forced: bool, names: list[str]) -> None:  # noqa: FBT001
    engine = saying(tokenizer, CALL)
    clock: Any = {"name": "clock", "input_schema": {"type": "object"}}
    async with running_api(engine, tokenizer) as api, client_of(api) as client:
        await client.messages.create(
            model=MODEL, max_tokens=99, messages=HELLO, tools=[WEATHER, clock], tool_choice=choice
        )
        text = shown(engine, tokenizer)
    assert [name for name in ("clock", "weather") if f'"name": "{name}"' in text] == names
    assert (engine.requests[0].grammar is not None) is is_forced


async def test_tokens_are_counted_as_they_are_sent(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Yes.")
    asked: Any = {"model": MODEL, "messages": HELLO, "system": "Be brief.", "tools": [WEATHER]}
    async with running_api(engine, tokenizer) as api, client_of(api) as client:
        count = await client.messages.count_tokens(**asked)
        message = await client.messages.create(**asked, max_tokens=9)
    assert count.input_tokens == message.usage.input_tokens


async def test_the_answer_may_be_held_to_a_schema(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, '{"city": "Oslo"}')
    async with running_api(engine, tokenizer) as api:
        fields = {"max_tokens": 99, "messages": HELLO}
        config = {"format": {"type": "json_schema", "schema": PARAMETERS}}
        response = await api.http.post(MESSAGES, json={**fields, "output_config": config})
    assert response.status_code == 200, response.text
    assert engine.requests[0].grammar is not None


async def test_models_are_listed(api: Api) -> None:
    async with client_of(api) as client:
        models = [model async for model in client.models.list()]
    assert [(model.id, model.type) for model in models] == [(MODEL, "model")]
    assert models[0].created_at.year == 2023


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": HELLO}, "max_tokens"),
        ({"max_tokens": 9, "messages": []}, "one or more messages"),
        ({"max_tokens": 9, "messages": [{"role": "user", "content": []}]}, "must not be empty"),
        ({"max_tokens": 9, "messages": [{"role": "tool", "content": "x"}]}, "user, assistant or system"),
        (
            {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            r"messages\[0\].content: part 0 has a source of type that is no string",
        ),
        (
            {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "document"}]}]},
            r"messages\[0\].content\[0\].type: this server reads texts and pictures only",
        ),
        (
            {"max_tokens": 9, "messages": HELLO, "tools": [{"type": "computer_20250124", "name": "s"}]},
            "describe the tool by its input_schema",
        ),
        ({"max_tokens": 9, "messages": HELLO, "tools": [{"name": "x"}]}, r"tools\[0\].input_schema"),
        (
            {"max_tokens": 9, "messages": HELLO, "tools": [WEATHER], "tool_choice": {"type": "tool"}},
            "of type tool must have the name",
        ),
        # Of a value that may have several types, the fault of the one that was meant.
        (
            {"max_tokens": 9, "messages": HELLO, "system": [{"type": "text"}]},
            r"system\[0\].text: field required",
        ),
        (
            {"max_tokens": 9, "messages": HELLO, "system": 3},
            "system: input should be a valid string or a valid list",
        ),
    ],
)
async def test_what_is_wrong_is_told_in_its_shape(api: Api, fields: Any, message: str) -> None:
    async with client_of(api) as client:
        with pytest.raises(anthropic.BadRequestError, match=message) as caught:
            await client.post(MESSAGES, body=fields, cast_to=object)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["request_id"] == caught.value.request_id
    assert body["request_id"].startswith("req-")


async def test_errors_of_other_kinds(tokenizer: Tokenizer) -> None:
    keys = ApiKeys([KeyRecord("alice", digest_of(KEY)), KeyRecord("poor", digest_of("sk-poor"), 1)])
    engine = saying(tokenizer, "Yes.")
    asked: Any = {"model": MODEL, "max_tokens": 9, "messages": HELLO}
    async with running_api(engine, tokenizer, keys=keys) as api:
        async with client_of(api, "sk-unknown") as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.messages.create(**asked)
        async with client_of(api) as client:
            with pytest.raises(anthropic.NotFoundError) as missing:
                await client.messages.create(**{**asked, "model": "other"})
        async with client_of(api, "sk-poor") as client:
            await client.messages.create(**asked)
            with pytest.raises(anthropic.RateLimitError) as limited:
                await client.messages.create(**asked)
    kinds = [error.value.body["error"]["type"] for error in (refused, missing, limited)]  # type: ignore[index]
    assert kinds == ["authentication_error", "not_found_error", "rate_limit_error"]
    assert int(limited.value.response.headers["retry-after"]) >= 1


async def test_a_stream_that_fails_says_so(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine([(300,), 0.1, StageFailed("stage 1 is lost")])
    asked: Any = {"model": MODEL, "max_tokens": 9, "messages": HELLO, "stream": True}
    async with running_api(engine, tokenizer) as api, client_of(api) as client:
        with pytest.raises(anthropic.APIStatusError, match="stage 1 is lost"):
            async for _ in await client.messages.create(**asked):
                pass
        whole = {**asked, "stream": False}
        with pytest.raises(anthropic.InternalServerError, match="stage 1 is lost"):
            await client.messages.create(**whole)
