"""Functions that chats may call: what the model is shown, how calls come back, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from mesh.text.answer_format import CallFormat
from mesh.text.tokenizer import Tokenizer
from stages.grammar.session_grammar import make_automaton
from tests.stages.grammar.test_grammar import matches
from tests.support import api_harness
from tests.support.api_harness import MODEL, Api, ScriptedEngine, running_api
from tests.support.call_formats import GLM, LLAMA, MINIMAX, MISTRAL, QWEN
from tests.support.chat_templates import ONE_CALL

pytestmark = pytest.mark.model

tokenizer, engine, api = api_harness.tokenizer, api_harness.engine, api_harness.api

CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "description": "Tells the time."}}
CALL = 'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SECOND = '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


def saying(tokenizer: Tokenizer, text: str, *, ends: bool = True) -> ScriptedEngine:
    """An engine that says a text, token by token, and then ends its answer."""
    tokens = tokenizer.encode(text, add_special=False, parse_special=False)
    end = [(min(tokenizer.end_tokens),)] if ends else []
    return ScriptedEngine([*((token,) for token in tokens), *end], context_length=2048)


async def test_a_call_is_no_content(tokenizer: Tokenizer) -> None:
    async with running_api(saying(tokenizer, CALL + SECOND), tokenizer) as api:
        answer = await api.openai.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            tools=[WEATHER, CLOCK],
        )
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
    calls: Any = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"city": "Oslo"}),
        ("clock", {}),
    ]
    assert len({call.id for call in calls}) == 2
    assert all(call.id.startswith("call_") for call in calls)


async def test_a_stream_tells_the_name_first_and_the_arguments_in_pieces(tokenizer: Tokenizer) -> None:
    async with running_api(saying(tokenizer, CALL + SECOND), tokenizer) as api:
        stream: Any = await api.openai.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            tools=[WEATHER, CLOCK],
            stream=True,
        )
        choices = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.delta.content or "" for choice in choices) == "Let me look."
    deltas = [call for choice in choices for call in choice.delta.tool_calls or ()]
    first, *rest = [delta.function for delta in deltas if delta.index == 0 and delta.function]
    assert (first.name, first.arguments) == ("weather", "")
    assert len(rest) > 3
    assert all(piece.name is None for piece in rest)
    assert json.loads("".join(piece.arguments or "" for piece in rest)) == {"city": "Oslo"}
    assert [(delta.index, delta.type) for delta in deltas if delta.id] == [(0, "function"), (1, "function")]
    assert choices[-1].finish_reason == "tool_calls"


async def test_one_call_at_a_time_ends_the_answer_with_it(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, CALL + SECOND)
    async with running_api(engine, tokenizer) as api:
        for stream in (False, True):
            fields = {"messages": HELLO, "tools": [WEATHER, CLOCK], "parallel_tool_calls": False}
            response = await api.http.post(CHAT, json={**fields, "stream": stream})
            assert "weather" in response.text
            assert "clock" not in response.text
            assert '"tool_calls"' in response.text
            assert engine.num_running == 0


async def test_a_call_that_the_limit_cuts_ends_with_length(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, CALL[: CALL.index("Oslo")], ends=False)
    async with running_api(engine, tokenizer) as api:
        response = await api.http.post(CHAT, json={"messages": HELLO, "tools": [WEATHER]})
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'


BEHIND = CALL.removeprefix("Let me look.\n")


@pytest.mark.parametrize("text", [BEHIND, SECOND.lstrip() + "\n" + BEHIND])
async def test_a_call_that_a_stop_string_cuts_is_none_that_was_made(tokenizer: Tokenizer, text: str) -> None:
    before: list[tuple[str, dict[str, Any]]] = [] if text is BEHIND else [("clock", {})]
    async with running_api(saying(tokenizer, text), tokenizer) as api:
        asked: Any = {"messages": HELLO, "tools": [WEATHER, CLOCK]}
        for stream in (False, True):
            response = await api.http.post(CHAT, json={**asked, "stop": ["Osl"], "stream": stream})
            assert '"finish_reason":"stop"' in response.text
            assert '"finish_reason":"tool_calls"' not in response.text
        whole = (await api.http.post(CHAT, json={**asked, "stop": "Osl"})).json()["choices"][0]["message"]
        assert whole["tool_calls"][-1]["function"]["arguments"] == '{"city": "'
        shown = {"name": "weather", "input_schema": PARAMETERS}
        theirs = {"messages": HELLO, "max_tokens": 99, "tools": [shown, {**shown, "name": "clock"}]}
        message = (await api.http.post("/v1/messages", json={**theirs, "stop_sequences": ["Osl"]})).json()
        assert [(block["name"], block["input"]) for block in message["content"]] == before
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "Osl")
        own = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]
        response = await api.http.post("/v1/responses", json={"input": "Hi", "tools": own, "stop": ["Osl"]})
        assert [item["status"] for item in response.json()["output"]] == [
            *("completed" for _ in before),
            "incomplete",
        ]
        # Behind the end of its arguments a call is whole.
        response = await api.http.post(CHAT, json={**asked, "stop": ["</tool_call>"]})
        calls = response.json()["choices"][0]["message"]["tool_calls"]
        assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
        assert (
            json.loads(calls[0]["function"]["arguments"]) == (before or [("weather", {"city": "Oslo"})])[0][1]
        )


@pytest.mark.parametrize("end", ["<tool_c", "<tool_call>", '<tool_call>\n{"name": "wea', '{"name"'])
async def test_the_beginning_of_a_call_is_no_text(tokenizer: Tokenizer, end: str) -> None:
    asked: Any = {"messages": HELLO, "tools": [WEATHER]}
    at = CALL.index(end) + len(end)
    async with running_api(saying(tokenizer, CALL[:at], ends=False), tokenizer) as api:
        cut = (await api.http.post(CHAT, json=asked)).json()["choices"][0]
    assert (cut["finish_reason"], cut["message"]["content"]) == ("length", "Let me look.")
    assert "tool_calls" not in cut["message"]
    async with running_api(saying(tokenizer, CALL), tokenizer) as api:
        stopped = (await api.http.post(CHAT, json={**asked, "stop": CALL[at : at + 3]})).json()["choices"][0]
    assert (stopped["finish_reason"], stopped["message"]["content"]) == ("stop", "Let me look.")


async def test_text_that_only_might_become_a_mark_stays(tokenizer: Tokenizer) -> None:
    async with running_api(saying(tokenizer, "1 <", ends=False), tokenizer) as api:
        choice = (await api.http.post(CHAT, json={"messages": HELLO, "tools": [WEATHER]})).json()["choices"][
            0
        ]
    assert choice["message"]["content"] == "1 <"


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}])
async def test_where_nothing_may_be_called_all_is_content(tokenizer: Tokenizer, fields: Any) -> None:
    engine = saying(tokenizer, CALL)
    async with running_api(engine, tokenizer) as api:
        plain = await api.http.post(CHAT, json={"messages": HELLO})
        answer = await api.http.post(CHAT, json={"messages": HELLO, **fields})
    assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert answer.json()["usage"] == plain.json()["usage"]
    assert engine.requests[0].prompt == engine.requests[1].prompt


def shown(engine: ScriptedEngine, tokenizer: Tokenizer) -> str:
    return "".join(tokenizer.name(token) for token in engine.requests[-1].prompt)


async def test_a_template_that_knows_no_tools_gets_a_note(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "It is fine.")
    turns: Any = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "function": {"name": "weather", "arguments": '{"city": "O"}'}},
                {"id": "call_2", "type": "function", "function": {"name": "clock", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
    ]  # fmt: skip
    async with running_api(engine, tokenizer) as api:
        response = await api.http.post(CHAT, json={"messages": turns, "tools": [WEATHER, CLOCK]})
        assert response.status_code == 200, response.text
        prompt = shown(engine, tokenizer)
        await api.http.post(CHAT, json={"messages": turns})
        without = shown(engine, tokenizer)
    system = prompt.partition("<|im_end|>")[0]
    assert system.startswith("<|im_start|>system\nBe brief.\n\n")
    assert json.dumps({"name": "weather", "parameters": PARAMETERS}) in system
    assert '"description": "Tells the time."' in system
    for text in (prompt, without):
        assert (
            "<|im_start|>assistant\n"
            '<tool_call>\n{"name": "weather", "arguments": {"city": "O"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n"
            "<tool_response>\nnoon\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        ) in text
    assert "weather" not in without.partition("<|im_end|>")[0]


async def test_a_named_function_is_the_only_one_shown(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, CALL)
    choice = {"type": "function", "function": {"name": "weather"}}
    async with running_api(engine, tokenizer) as api:
        await api.http.post(CHAT, json={"messages": HELLO, "tools": [WEATHER, CLOCK], "tool_choice": choice})
    assert "weather" in shown(engine, tokenizer)
    assert "clock" not in shown(engine, tokenizer)


TOOLS_IN_TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "{# … #}({{ call.function.name }} {{ ARGUMENTS }} {{ call.id }}){% endfor %}|{% endfor %}"
)


@pytest.mark.parametrize("arguments", ["call.function.arguments.city", "'' + call.function.arguments"])
async def test_a_template_that_knows_tools_gets_them(smollm2_path: Path, arguments: str) -> None:
    """Arguments go as values, and as text to templates that join texts."""
    tokenizer = Tokenizer(smollm2_path)
    tokenizer.chat_template = TOOLS_IN_TEMPLATE.replace("ARGUMENTS", arguments)
    engine = saying(tokenizer, "Well.")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    turns = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "rain"}]
    async with running_api(engine, tokenizer) as api:
        response = await api.http.post(CHAT, json={"messages": turns, "tools": [WEATHER, CLOCK]})
    assert response.status_code == 200, response.text
    said = "Oslo" if arguments.endswith("city") else '{"city": "Oslo"}'
    assert shown(engine, tokenizer) == (
        f"[weather][clock]user:What is the weather in Oslo?|assistant:(weather {said} c1)|tool:rain|"
    )


@pytest.mark.parametrize(
    ("template", "text", "call_format"),
    [
        ("<|python_tag|>", '{"name": "weather", "parameters": {"city": "Oslo"}}', LLAMA),
        (
            "[TOOL_CALLS]",
            '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]',
            MISTRAL,
        ),
        (
            "<function=",
            "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
            QWEN,
        ),
        (
            "<arg_key>",
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
            GLM,
        ),
        (
            "<minimax:tool_call>",
            '<minimax:tool_call><invoke name="weather"><parameter name="city">Oslo</parameter></invoke>',
            MINIMAX,
        ),
    ],
)
async def test_other_formats_are_read_where_the_template_teaches_them(
    smollm2_path: Path, template: str, text: str, call_format: CallFormat
) -> None:
    tokenizer = Tokenizer(smollm2_path)
    tokenizer.chat_template = f"{{% if tools %}}{template}{{% endif %}}{{{{ messages[0].content }}}}"
    async with running_api(saying(tokenizer, text), tokenizer) as api:
        response = await api.http.post(CHAT, json={"messages": HELLO, "tools": [WEATHER]})
    choice = response.json()["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert (len(call["id"]) == 9) is (call_format == MISTRAL)


# As Qwen3-Coder's: calls of earlier turns are written value by value.
TAGS_IN_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, value in call.function.arguments | items %}"
    "<parameter={{ name }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}|"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


async def test_calls_between_tags_there_and_back(smollm2_path: Path) -> None:
    tokenizer = Tokenizer(smollm2_path)
    tokenizer.chat_template = TAGS_IN_TEMPLATE
    at = "<parameter=city>\nNew\n York\n</parameter>"
    days = "<parameter=days>\n[1, 2]\n</parameter>"
    text = f"I look.\n<tool_call>\n<function=weather>\n{at}\n{days}\n</function>\n</tool_call>"
    named = {"city": {"type": "string"}, "days": {"type": "array"}}
    days_too: Any = {"type": "object", "properties": named, "required": ["city"]}
    weather: Any = {"type": "function", "function": {"name": "weather", "parameters": days_too}}
    engine = saying(tokenizer, text)
    async with running_api(engine, tokenizer) as api:
        asked: Any = {"model": MODEL, "messages": HELLO, "tools": [weather, CLOCK]}
        stream: Any = await api.openai.chat.completions.create(**asked, stream=True)
        choices = [chunk.choices[0] async for chunk in stream]
        whole = (await api.openai.chat.completions.create(**asked)).choices[0]
        calls: Any = whole.message.tool_calls
        (called,) = calls
        turns = [*HELLO, whole.message.model_dump(exclude_none=True), {"role": "tool", "content": "rain"}]
        response = await api.http.post(CHAT, json={"messages": turns, "tools": [weather]})
        assert response.status_code == 200, response.text
        prompt = shown(engine, tokenizer)
        await api.openai.chat.completions.create(**asked, tool_choice="required")
        assert allows(engine, text.removeprefix("I look.\n"))
        assert not allows(engine, CALL.removeprefix("Let me look.\n"))
    deltas = [call.function for choice in choices for call in choice.delta.tool_calls or () if call.function]
    arguments = "".join(delta.arguments or "" for delta in deltas)
    assert len(deltas) > 5
    assert (deltas[0].name, choices[-1].finish_reason) == ("weather", "tool_calls")
    assert "".join(choice.delta.content or "" for choice in choices) == whole.message.content == "I look."
    assert json.loads(arguments) == {"city": "New\n York", "days": [1, 2]}
    assert called.function.arguments == arguments
    called_again = f"<tool_call>\n<function=weather>\n{at}\n{days}\n</function>\n</tool_call>"
    assert f"assistant:I look.{called_again}|tool:rain|" in prompt


@pytest.mark.parametrize("arguments", ['{"city": "Os', "null", "[1]"])
async def test_a_call_that_was_cut_does_not_end_the_conversation(smollm2_path: Path, arguments: str) -> None:
    tokenizer = Tokenizer(smollm2_path)
    tokenizer.chat_template = TAGS_IN_TEMPLATE
    engine = saying(tokenizer, "Well.")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    turns = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}]
    async with running_api(engine, tokenizer) as api:
        response = await api.http.post(CHAT, json={"messages": turns, "tools": [WEATHER]})
    assert response.status_code == 200, response.text
    said = "None" if arguments == "null" else arguments
    assert f"<function=weather>\n<parameter=arguments>\n{said}\n</parameter>\n</function>" in shown(
        engine, tokenizer
    )


@pytest.mark.parametrize("ends", [True, False])
async def test_a_call_without_its_end_tags_is_complete_unless_the_limit_cut_it(
    smollm2_path: Path,
    ends: bool,  # noqa: FBT001
) -> None:
    tokenizer = Tokenizer(smollm2_path)
    tokenizer.chat_template = TAGS_IN_TEMPLATE
    engine = saying(tokenizer, "<tool_call>\n<function=weather>\n<parameter=city>\nOslo", ends=ends)
    async with running_api(engine, tokenizer) as api:
        response = await api.http.post(CHAT, json={"messages": HELLO, "tools": [WEATHER]})
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == ("tool_calls" if ends else "length")
    called = choice["message"]["tool_calls"][0]["function"]
    assert called["arguments"] == ('{"city": "Oslo"}' if ends else '{"city": "Oslo')


@pytest.mark.parametrize(
    ("text", "stop", "arguments"),
    [
        ("Oslo STOP and", "STOP", '{"city": "Oslo '),
        ("Oslo\n</parameter>\n</function>\n</tool_call>", "</tool_call>", '{"city": "Oslo"}'),
        ("Oslo\n</parameter>\n</function>\n</tool_call>", "</function>", '{"city": "Oslo"}'),
    ],
)
async def test_a_stop_string_within_a_value_leaves_its_call_incomplete(
    smollm2_path: Path, text: str, stop: str, arguments: str
) -> None:
    tokenizer = Tokenizer(smollm2_path)
    tokenizer.chat_template = TAGS_IN_TEMPLATE
    engine = saying(tokenizer, f"<tool_call>\n<function=weather>\n<parameter=city>\n{text}")
    async with running_api(engine, tokenizer) as api:
        fields = {"messages": HELLO, "tools": [WEATHER], "stop": stop}
        response = await api.http.post(CHAT, json=fields)
    [called] = response.json()["choices"][0]["message"]["tool_calls"]
    assert called["function"]["arguments"] == arguments


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": fields}]}


NAMED = {"type": "function", "function": {"name": "clock"}}
CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": ["weather"]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].function"),
        ({"tools": [{"type": "websearch"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [WEATHER, {"type": "function", "function": {}}]}, "tools[1].function.name"),
        (function(name="a b"), "tools[0].function.name"),
        (function(name=""), "tools[0].function.name"),
        (function(name="a", parameters=[]), "tools[0].function.parameters"),
        ({"tools": [WEATHER, CLOCK, WEATHER]}, "tools[2].function.name"),
        ({"tools": [WEATHER] * 257}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        ({"tools": [WEATHER], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{"name": "weather"}], "tools": [WEATHER]}, "functions"),
        ({"messages": [*HELLO, CALLED]}, "messages[1].tool_calls[0].function.arguments"),
        ({"messages": [{"role": "tool", "tool_call_id": 5, "content": "x"}]}, "messages[0].tool_call_id"),
    ],
)  # fmt: skip
async def test_what_makes_no_sense_is_refused(api: Api, fields: dict[str, Any], param: str) -> None:
    response = await api.http.post(CHAT, json={"messages": HELLO, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert param.partition("[")[0] in response.json()["error"]["message"]


async def test_completions_have_no_tools(api: Api) -> None:
    response = await api.http.post("/v1/completions", json={"prompt": "x", "tools": [WEATHER]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


def allows(engine: ScriptedEngine, text: str) -> bool:
    """Whether the engine's latest answer was to be held to a grammar, and the text matches it."""
    grammar = engine.requests[-1].grammar
    return grammar is not None and matches(make_automaton(grammar), text)


IN_TAGS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
AT_NOON = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


async def test_who_must_call_is_held_to_calls(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, IN_TAGS)
    asked: dict[str, Any] = {"messages": HELLO, "tools": [WEATHER, CLOCK]}
    named = {"type": "function", "function": {"name": "weather"}}
    async with running_api(engine, tokenizer) as api:
        await api.http.post(CHAT, json=asked)
        assert engine.requests[-1].grammar is None
        await api.http.post(CHAT, json={**asked, "tool_choice": "required"})
        assert allows(engine, f"{IN_TAGS}\n{AT_NOON}")
        assert not allows(engine, "Fine.")
        await api.http.post(CHAT, json={**asked, "tool_choice": "required", "parallel_tool_calls": False})
        assert allows(engine, AT_NOON)
        assert not allows(engine, f"{IN_TAGS}\n{AT_NOON}")
        await api.http.post(CHAT, json={**asked, "tool_choice": named})
        assert allows(engine, IN_TAGS)
        assert not allows(engine, AT_NOON)


async def test_a_form_leaves_room_for_calls_unless_it_is_a_grammar(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "{}")
    asked: dict[str, Any] = {
        "messages": HELLO,
        "tools": [WEATHER],
        "response_format": {"type": "json_object"},
    }
    async with running_api(engine, tokenizer) as api:
        await api.http.post(CHAT, json=asked)
        assert allows(engine, IN_TAGS)
        assert allows(engine, '{"a": 1}')
        await api.http.post(CHAT, json={**asked, "tool_choice": "required"})
        assert allows(engine, IN_TAGS)
        assert not allows(engine, '{"a": 1}')
        await api.http.post(CHAT, json={**asked, "tool_choice": "none"})
        assert not allows(engine, IN_TAGS)
        response = await api.http.post(
            CHAT, json={"messages": HELLO, "tools": [WEATHER], "grammar": 'root ::= "x"'}
        )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "grammar")


async def test_parameters_that_no_grammar_can_say_are_refused_where_they_must_be_kept(
    api: Api, engine: ScriptedEngine
) -> None:
    engine.context_length = 2048
    odd = function(name="odd", parameters={"not": {}}, strict=True)
    asked: dict[str, Any] = {"messages": HELLO, **odd}
    assert (await api.http.post(CHAT, json=asked)).status_code == 200
    response = await api.http.post(CHAT, json={**asked, "tool_choice": "required"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert "the function odd" in response.json()["error"]["message"]


BOTH: Any = {"type": "string", "pattern": "^[a-z]+$", "format": "hostname"}
LOOSE: Any = {
    "type": "object",
    "properties": {"host": BOTH, "port": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["host", "port"],
}


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_that_are_not_strict_are_held_to_what_can_be_enforced(
    api: Api,
    engine: ScriptedEngine,
    stream: bool,  # noqa: FBT001
) -> None:
    engine.context_length = 2048
    asked: Any = {"messages": HELLO, **function(name="connect", parameters=LOOSE)}
    response = await api.http.post(CHAT, json={**asked, "tool_choice": "required", "stream": stream})
    assert response.status_code == 200, response.text
    said = "the parameters of the function connect, properties/host: pattern and format cannot be enforced"
    assert said in response.text
    grammar = engine.requests[0].grammar
    assert grammar is not None

    def call(host: str, port: int) -> str:
        arguments = json.dumps({"host": host, "port": port}, separators=(", ", ": "))
        return f'<tool_call>\n{{"name": "connect", "arguments": {arguments}}}\n</tool_call>'

    automaton = make_automaton(grammar)
    assert matches(automaton, call("oslo", 7))
    # What is left of the schema holds: the pattern, and the other property.
    assert not matches(automaton, call("Oslo.", 7))
    assert not matches(automaton, call("oslo", 10))


@pytest.mark.parametrize("stream", [False, True])
async def test_every_endpoint_tells_what_is_not_enforced(
    api: Api,
    engine: ScriptedEngine,
    stream: bool,  # noqa: FBT001
) -> None:
    engine.context_length = 2048
    own: Any = {"name": "connect", "parameters": LOOSE}
    anthropics: Any = {"name": "connect", "input_schema": LOOSE}
    bodies: dict[str, Any] = {
        "/v1/responses": {
            "input": "Hello",
            "tools": [{"type": "function", **own}],
            "tool_choice": "required",
        },
        "/v1/messages": {
            "messages": HELLO,
            "max_tokens": 9,
            "tools": [anthropics],
            "tool_choice": {"type": "any"},
        },
    }
    for path, body in bodies.items():
        response = await api.http.post(path, json={**body, "stream": stream})
        assert response.status_code == 200, response.text
        assert '"warnings":["the parameters of the function connect, properties/host' in response.text
        free = await api.http.post(path, json={**body, "tool_choice": None, "stream": stream})
        assert free.status_code == 200, free.text
        assert '"warnings"' not in free.text


async def test_a_schema_that_is_invalid_is_refused_even_if_it_is_not_strict(
    api: Api, engine: ScriptedEngine
) -> None:
    engine.context_length = 2048
    asked: Any = {"messages": HELLO, **function(name="odd", parameters={"type": "text"})}
    response = await api.http.post(CHAT, json={**asked, "tool_choice": "required"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert 'type "text" is unknown' in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"type": "object"},
        {"type": "object", "properties": {}},
        {"type": "object", "properties": {}, "additionalProperties": False},
        {"type": ["object"], "properties": {}, "required": [], "title": "clock_arguments"},
    ],
)
async def test_a_function_without_parameters_is_called_once_and_without_any(
    api: Api, engine: ScriptedEngine, parameters: Any
) -> None:
    engine.context_length = 2048
    asked: Any = {"messages": HELLO, **function(name="clock", parameters=parameters)}
    await api.http.post(CHAT, json={**asked, "tool_choice": "required"})
    grammar = engine.requests[0].grammar
    assert grammar is not None
    automaton = make_automaton(grammar)
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    assert matches(automaton, call)
    assert not matches(automaton, call.replace("{}", '{"a": 1}'))
    assert not matches(automaton, call.replace("{}", "{ }"))
    # Small models never stop calling by themselves.
    assert not matches(automaton, f"{call}\n{call}")


async def test_a_choice_among_some_of_the_tools(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, CALL)
    named: Any = {"type": "function", "function": {"name": "weather"}}
    async with running_api(engine, tokenizer) as api:
        for mode in ("auto", "required"):
            choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
            await api.openai.chat.completions.create(
                model=MODEL, messages=HELLO, tools=[WEATHER, CLOCK], tool_choice=choice
            )
            text = shown(engine, tokenizer)
            assert '"name": "weather"' in text
            assert '"name": "clock"' not in text
            assert (engine.requests[-1].grammar is not None) is (mode == "required")
        flat: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS}
        other: Any = {**flat, "name": "clock"}
        some: Any = {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "weather"}],
        }
        answer: Any = await api.openai.responses.create(
            model=MODEL, input="Weather?", tools=[flat, other], tool_choice=some
        )
        assert answer.tool_choice.model_dump()["type"] == "allowed_tools"
        assert '"name": "clock"' not in shown(engine, tokenizer)
        strange: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{**named}]}}
        response = await api.http.post(
            CHAT, json={"messages": HELLO, "tools": [CLOCK], "tool_choice": strange}
        )
    assert response.status_code == 400
    assert "'weather'" in response.json()["error"]["message"]


async def test_strict_without_effect_is_told(smollm2_path: Path) -> None:
    """Calls that are the whole answer begin as a text may."""
    tokenizer = Tokenizer(smollm2_path)
    tokenizer.chat_template = ONE_CALL
    asked = {"messages": HELLO, **function(name="look", strict=True)}
    async with running_api(saying(tokenizer, "Hm."), tokenizer) as api:
        free = (await api.http.post(CHAT, json=asked)).json()
        forced = (await api.http.post(CHAT, json={**asked, "tool_choice": "required"})).json()
        lenient = (await api.http.post(CHAT, json={"messages": HELLO, **function(name="look")})).json()
    (warning,) = free["warnings"]
    assert warning.startswith("strict has no effect")
    assert "warnings" not in forced
    assert "warnings" not in lenient
