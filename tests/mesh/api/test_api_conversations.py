"""Conversations of coding agents and frameworks, through clients, to templates that refuse their shapes."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from mesh.text.tokenizer import Tokenizer
from tests.mesh.api.test_api_messages import CALL, HELLO, MESSAGES, WEATHER, client_of
from tests.mesh.api.test_api_tools import AT_NOON, CLOCK, IN_TAGS, PARAMETERS, allows, saying, shown
from tests.mesh.api.test_api_tools import WEATHER as FUNCTION
from tests.support import api_harness
from tests.support.api_harness import KEY, MODEL, Api, ScriptedEngine, running_api
from tests.support.chat_templates import ONE_CALL, OWN, STRICT_SYSTEM, TWO_ROLES

pytestmark = pytest.mark.model

tokenizer, engine, api = api_harness.tokenizer, api_harness.engine, api_harness.api


@asynccontextmanager
async def with_template(
    tokenizer: Tokenizer, source: str, text: str = "Yes."
) -> AsyncIterator[tuple[Api, ScriptedEngine]]:
    """A server whose model has a template, and says a text."""
    before, engine = tokenizer.chat_template, saying(tokenizer, text)
    tokenizer.chat_template = source
    try:
        async with running_api(engine, tokenizer) as api:
            yield api, engine
    finally:
        tokenizer.chat_template = before


def text_block(text: str) -> Any:
    return {"type": "text", "text": text}


def in_order(text: str, *words: str) -> bool:
    places = [text.find(word) for word in words]
    return -1 not in places and places == sorted(places)


TEMPLATES = pytest.mark.parametrize(
    "template",
    [
        pytest.param(OWN[name], id=name)
        for name in ("STRICT_SYSTEM", "TWO_ROLES", "TWO_ROLES_WITH_CALLS", "ONE_CALL")
    ],
)
USE: Any = {"type": "tool_use", "id": "toolu_01AbCdEfGhIjKl", "name": "weather", "input": {"city": "Oslo"}}
USED: Any = {"type": "tool_result", "tool_use_id": USE["id"], "content": "Sunny."}


@TEMPLATES
async def test_claude_code_goes_on(tokenizer: Tokenizer, template: str) -> None:
    """System turns behind the question and behind each result, and text behind results."""
    turns: Any = [
        {"role": "user", "content": [text_block("Reminder."), text_block("Question.")]},
        {"role": "system", "content": "Agents: none."},
        {"role": "assistant", "content": [text_block("I look."), USE]},
        {"role": "user", "content": [USED]},
        {"role": "system", "content": "Tokens left: 9."},
    ]
    more: Any = [
        {"role": "assistant", "content": [{**USE, "id": "toolu_2"}, {**USE, "id": "toolu_3"}]},
        {
            "role": "user",
            "content": [
                {**USED, "tool_use_id": "toolu_2", "content": "Rain."},
                {**USED, "tool_use_id": "toolu_3", "content": "Snow."},
                text_block("Go on."),
            ],
        },
        {"role": "system", "content": "Tokens left: 8."},
    ]
    asked: Any = {"model": MODEL, "max_tokens": 9, "system": "Be brief.", "tools": [WEATHER]}
    async with with_template(tokenizer, template) as (api, engine), client_of(api) as client:
        await client.messages.create(**asked, messages=turns)
        first = shown(engine, tokenizer)
        assert in_order(first, "Question.", "Agents: none.", "I look.", "Oslo", "Sunny.", "Tokens left: 9.")
        await client.messages.create(**asked, messages=[*turns, *more])
        second = shown(engine, tokenizer)
        assert in_order(second, "Tokens left: 9.", "Rain.", "Snow.", "Go on.", "Tokens left: 8.")
        del asked["max_tokens"]
        counted = await client.messages.count_tokens(**asked, messages=turns)
    assert counted.input_tokens == len(engine.requests[0].prompt)
    # All but the answer's beginning is in the cache.
    assert second.startswith(first[: first.index("Tokens left: 9.") + 15])


@TEMPLATES
async def test_codex_goes_on(tokenizer: Tokenizer, template: str) -> None:
    """Several items of the user, the developer's between them, and parallel calls."""

    def item(role: str, text: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    def call(id: str) -> list[dict[str, Any]]:
        return [{"type": "function_call", "call_id": id, "name": "weather", "arguments": '{"city": "Oslo"}'}]

    def output(id: str, text: str) -> list[dict[str, Any]]:
        return [{"type": "function_call_output", "call_id": id, "output": text}]

    items: Any = [
        item("developer", "Sandbox: none."),
        item("user", "AGENTS.md."),
        item("user", "Environment."),
        item("developer", "Mode: plan."),
        item("user", "Question."),
        *(*call("call_1"), *call("call_2"), *output("call_1", "Sunny."), *output("call_2", "Rain.")),
        item("user", "Go on."),
    ]
    tool: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS}
    asked: Any = {"model": MODEL, "instructions": "Be brief.", "tools": [tool]}
    async with with_template(tokenizer, template) as (api, engine):
        first = await api.openai.responses.create(**asked, input=items[:5])
        text = shown(engine, tokenizer)
        assert in_order(text, "Sandbox: none.", "AGENTS.md.", "Environment.", "Mode: plan.", "Question.")
        await api.openai.responses.create(**asked, input=items)
        assert in_order(shown(engine, tokenizer), "Question.", "Sunny.", "Rain.", "Go on.")
        await api.openai.responses.create(**asked, input=items[6:], previous_response_id=first.id)
        assert in_order(shown(engine, tokenizer), "Mode: plan.", "Question.", "Yes.", "Rain.")


@TEMPLATES
async def test_opencode_and_langchain_go_on(tokenizer: Tokenizer, template: str) -> None:
    """Two system messages at the beginning, and tool calls of an assistant that another model was."""
    async with with_template(tokenizer, template) as (api, engine):
        turns: Any = [
            {"role": "system", "content": "Be brief."},
            {"role": "system", "content": "Plugins: none."},
            {"role": "user", "content": "Question."},
            {"role": "developer", "content": "Mode: plan."},
        ]
        await api.openai.chat.completions.create(model=MODEL, messages=turns, tools=[FUNCTION])
        assert in_order(shown(engine, tokenizer), "Be brief.", "Plugins: none.", "Question.", "Mode: plan.")
        model = ChatOpenAI(
            base_url=f"{api.url}/v1", api_key=SecretStr(KEY), model=MODEL, max_retries=0
        ).bind_tools([FUNCTION])
        calls: Any = [
            {"id": f"call_{city}", "name": "weather", "args": {"city": city}, "type": "tool_call"}
            for city in ("Oslo", "Rome")
        ]
        await model.ainvoke(
            [
                SystemMessage("Be brief."),
                SystemMessage("Plugins: none."),
                HumanMessage("Question."),
                AIMessage("", tool_calls=calls),
                ToolMessage("Sunny.", tool_call_id="call_Oslo"),
                ToolMessage("Rain.", tool_call_id="call_Rome"),
                HumanMessage("And?"),
            ]
        )
        text = shown(engine, tokenizer)
    assert in_order(text, "Be brief.", "Plugins: none.", "Question.", "Oslo", "Sunny.", "And?")
    assert in_order(text, "Rome", "Rain.", "And?")


async def test_calls_are_made_one_at_a_time_where_the_template_takes_no_more(tokenizer: Tokenizer) -> None:
    calls = '{"name": "weather", "parameters": {"city": "Oslo"}}'
    asked: Any = {"model": MODEL, "messages": HELLO, "tools": [FUNCTION, CLOCK], "parallel_tool_calls": True}
    async with with_template(tokenizer, ONE_CALL, f"{calls}; {calls}") as (api, engine):
        answer = await api.openai.chat.completions.create(**asked)
        await api.openai.chat.completions.create(**asked, tool_choice="required")
        assert allows(engine, calls)
        assert not allows(engine, f"{calls}; {calls}")
    made: Any = answer.choices[0].message.tool_calls
    [call] = made
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    assert answer.choices[0].finish_reason == "tool_calls"
    # Calls that are written out as text are as many as the model makes.
    async with with_template(tokenizer, TWO_ROLES, f"{IN_TAGS}\n{AT_NOON}") as (api, engine):
        answer = await api.openai.chat.completions.create(**asked)
    assert len(answer.choices[0].message.tool_calls or ()) == 2


async def test_the_templates_own_words_are_in_the_error(tokenizer: Tokenizer) -> None:
    source = "{% if messages | length > 1 %}{{ raise_exception('one is enough') }}{% endif %}"
    more: Any = [{"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Yes."}]
    turns = [*HELLO, *more, *HELLO]
    async with with_template(tokenizer, source) as (api, _engine), client_of(api) as client:
        with pytest.raises(anthropic.BadRequestError, match="one is enough"):
            await client.messages.create(model=MODEL, max_tokens=9, messages=turns)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_read_ahead_without_an_answer(tokenizer: Tokenizer, *, stream: bool) -> None:
    engine = saying(tokenizer, "Yes.")
    asked: Any = {"model": MODEL, "max_tokens": 0, "messages": HELLO, "tools": [WEATHER]}
    async with running_api(engine, tokenizer) as api, client_of(api) as client:
        if stream:
            async with client.messages.stream(**asked) as events:
                message: Any = await events.get_final_message()
        else:
            message = await client.messages.create(**asked)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
    # One token, as the engine makes one at least.
    assert engine.requests[0].max_tokens == 1
    assert message.usage.input_tokens == len(engine.requests[0].prompt)


async def test_two_limits_that_differ_are_refused(api: Api) -> None:
    response = await api.http.post(MESSAGES, json={"messages": HELLO, "max_tokens": 0, "n_predict": 5})
    assert response.status_code == 400
    response = await api.http.post(MESSAGES, json={"messages": HELLO, "max_tokens": 0, "n_predict": 0})
    assert response.status_code == 200, response.text


async def test_system_turns_without_a_text_are_left_out(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Yes.")
    tool: Any = {"type": "tool_reference", "name": "weather"}
    removal: Any = {"type": "tool_removal", "tool": tool}
    turns: Any = [
        *HELLO,
        {"role": "system", "content": []},
        {"role": "system", "output_config": {"effort": "low"}},
        {"role": "system", "content": [removal, {"type": "tool_addition", "tool": tool}]},
        {"role": "system", "content": [removal, text_block("Be kind.")]},
        {"role": "system", "content": ""},
    ]
    async with running_api(engine, tokenizer) as api, client_of(api) as client:
        await client.beta.messages.create(model=MODEL, max_tokens=9, messages=turns)
        text = shown(engine, tokenizer)
        told = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>assistant\n"
        assert text.endswith(f"Oslo?<|im_end|>\n{told}")
        with pytest.raises(anthropic.BadRequestError, match="they say nothing") as caught:
            await client.beta.messages.create(model=MODEL, max_tokens=9, messages=turns[1:3])
    assert caught.value.body["error"]["param"] == "messages"  # type: ignore[index]


async def test_instructions_of_one_turn_are_cleared_by_the_next(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Yes.")
    turns: Any = [
        *HELLO,
        {"role": "system", "content": "Once.", "clear_at": "next_user_message"},
        {"role": "system", "content": "Always.", "clear_at": "never"},
        {"role": "assistant", "content": [text_block("I look."), USE]},
        {"role": "user", "content": [USED]},
        {"role": "system", "content": "Again.", "clear_at": "next_user_message"},
    ]
    async with running_api(engine, tokenizer) as api, client_of(api) as client:
        asked: Any = {"model": MODEL, "max_tokens": 9}
        await client.beta.messages.create(**asked, messages=turns[:4])
        assert in_order(shown(engine, tokenizer), "Once.", "Always.", "I look.")
        await client.beta.messages.create(**asked, messages=turns)
        text = shown(engine, tokenizer)
        assert in_order(text, "Always.", "I look.", "Sunny.", "Again.")
        assert "Once." not in text
        turns[1]["clear_at"] = "tomorrow"
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[1\].clear_at: must be next_user"):
            await client.beta.messages.create(**asked, messages=turns)


async def test_what_is_skipped_goes_with_a_strict_template(tokenizer: Tokenizer) -> None:
    turns: Any = [*HELLO, {"role": "system", "content": []}, {"role": "assistant", "content": CALL}, *HELLO]
    async with with_template(tokenizer, STRICT_SYSTEM) as (api, engine), client_of(api) as client:
        await client.messages.create(model=MODEL, max_tokens=9, messages=turns)
        assert "System message" not in shown(engine, tokenizer)
