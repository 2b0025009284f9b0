"""What clients of other servers send: enforced or refused by name, in all APIs alike."""

import json
from typing import Any

import pytest

from mesh.text.tokenizer import Tokenizer
from tests.mesh.api.test_api_tools import allows, saying, shown
from tests.support import api_harness
from tests.support.api_harness import Api, ScriptedEngine, running_api
from tests.support.ring_api import running_ring_api

pytestmark = pytest.mark.model

tokenizer, api = api_harness.tokenizer, api_harness.api

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
HELLO: Any = [{"role": "user", "content": "Name a year."}]
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    COMPLETIONS: {"prompt": "Name a year."},
    RESPONSES: {"input": "Name a year."},
    MESSAGES: {"messages": HELLO, "max_tokens": 20},
}
PATHS = pytest.mark.parametrize("path", LEAST)
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: Any = {"name": "weather", "parameters": CITY}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
LINE = "x-anthropic-billing-header: cc_version=2.1; cch={};"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine([(300,), (301, 302)], context_length=2048)


async def ask(api: Api, path: str = CHAT, **fields: Any) -> Any:
    response = await api.http.post(path, json={**LEAST[path], **fields})
    assert response.status_code == 200, response.text
    return response.json()


def said(answer: dict[str, Any]) -> str:
    """Text of a chat or a response."""
    is_chat = "choices" in answer
    text: str = (
        answer["choices"][0]["message"]["content"] if is_chat else answer["output"][0]["content"][0]["text"]
    )
    return text


async def refused(api: Api, path: str = CHAT, **fields: Any) -> tuple[str | None, str]:
    """Field and message of a refusal."""
    response = await api.http.post(path, json={**LEAST[path], **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


async def stream(api: Api, path: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
    response = await api.http.post(path, json={**LEAST[path], **fields, "stream": True})
    assert response.status_code == 200, response.text
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


# Overflow.


@pytest.mark.parametrize("is_streamed", [False, True])
@PATHS
async def test_an_overflow_is_told_in_words_that_clients_know(
    api: Api, engine: ScriptedEngine, path: str, *, is_streamed: bool
) -> None:
    """LiteLLM's fallbacks and LangChain's summaries begin by the message alone."""
    engine.context_length = 64
    for words in ("x " * 80, "x " * 40_000):
        turns = [{"role": "user", "content": words}]
        long = {CHAT: {"messages": turns}, MESSAGES: {"messages": turns}}
        fields = long.get(path, {"prompt" if path == COMPLETIONS else "input": words})
        _, message = await refused(api, path, **fields, stream=is_streamed)
        assert message.startswith("prompt is too long: ")
        assert "tokens > 63 maximum" in message
        assert "This model's maximum context length is 64 tokens. However, " in message


async def test_a_text_to_be_counted_may_be_too_long_as_well(api: Api, engine: ScriptedEngine) -> None:
    engine.context_length = 64
    response = await api.http.post("/tokenize", json={"prompt": "x " * 40_000})
    assert response.json()["error"]["message"].startswith("prompt is too long: at least ")


# Forms of answers.


@pytest.mark.parametrize(
    ("fields", "fits", "does_not"),
    [
        ({"regex": "[0-9]{4}"}, "1999", "year 1999"),
        ({"guided_regex": "^(a|b)+$"}, "abba", "abc"),
        ({"structured_outputs": {"regex": "yes|no"}}, "no", "yes or no"),
        ({"response_format": {"type": "regex", "value": "a+"}}, "aa", "b"),
        ({"ebnf": 'root ::= "1999"'}, "1999", "2000"),
        ({"guided_grammar": 'root ::= "x"+'}, "xx", "y"),
        ({"structured_outputs": {"grammar": 'root ::= "x"'}}, "x", "xx"),
        ({"response_format": {"type": "grammar", "grammar": 'root ::= "x"'}}, "x", "xx"),
        # The same by an older and a newer name, as Guidance's client for vLLM sends it.
        (
            {"guided_grammar": 'start: "x"', "structured_outputs": {"grammar": 'start: "x"'}},
            "x",
            "xx",
        ),
        ({"guided_choice": ["red", "blue"]}, "blue", "green"),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, "red", "red blue"),
        ({"guided_json": COLOUR}, '{"colour": "red"}', '{"colour": "green"}'),
        ({"guided_json": json.dumps(COLOUR)}, '{"colour": "red"}', "{}"),
        ({"json_schema": json.dumps(COLOUR)}, '{"colour": "red"}', "{}"),
        ({"structured_outputs": {"json": COLOUR}}, '{"colour": "blue"}', "{}"),
        ({"structured_outputs": {"json_object": True}}, "{}", "[]"),
        ({"response_format": {"type": "json_object", "schema": COLOUR}}, '{"colour": "red"}', "{}"),
        ({"response_format": {"type": "json", "value": COLOUR}}, '{"colour": "red"}', "{}"),
    ],
)
@PATHS
async def test_a_form_holds_by_any_name(
    api: Api, engine: ScriptedEngine, path: str, fields: dict[str, Any], fits: str, does_not: str
) -> None:
    await ask(api, path, **fields)
    assert allows(engine, fits)
    assert not allows(engine, does_not)


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": ""},
        {"ebnf": None},
        {"guided_choice": []},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "whitespace_pattern": None}},
        {"guided_json": ""},
        {"response_format": {"type": "text", "schema": None}},
    ],
)
async def test_a_form_that_is_empty_is_none(api: Api, engine: ScriptedEngine, fields: dict[str, Any]) -> None:
    await ask(api, **fields)
    assert engine.requests[-1].grammar is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "(?=x)"}, "regex"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"regex": r"\bx"}}, "structured_outputs.regex"),
        ({"ebnf": "%llguidance {}\nstart: 'x'"}, "ebnf"),
        ({"guided_grammar": "start: 'x'"}, "guided_grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"response_format": {"type": "text", "schema": COLOUR}}, "response_format"),
        ({"response_format": {"type": "json_schema", "schema": COLOUR}}, "response_format.json_schema"),
        ({"response_format": {"type": "json"}}, "response_format.value"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "shema": COLOUR}}, "response_format.shema"),
        ({"structural_tag": "{}"}, "structural_tag"),
        ({"regex": "x", "ebnf": 'root ::= "x"'}, "ebnf"),
        ({"structured_outputs": {"regex": "x", "choice": ["x"]}}, "structured_outputs.choice"),
        ({"regex": "x", "tools": [{"type": "function", "function": FUNCTION}]}, "regex"),
    ],
)
async def test_a_form_that_cannot_hold_is_refused_by_name(
    api: Api, fields: dict[str, Any], param: str
) -> None:
    assert (await refused(api, **fields))[0] == param


async def test_the_ring_keeps_to_a_pattern_and_a_choice(tokenizer: Tokenizer) -> None:
    async with running_ring_api(tokenizer) as ring:
        for path in (CHAT, RESPONSES):
            year = said(await ask(ring.api, path, regex="[0-9]{4}"))
            assert len(year) == 4
            assert year.isdecimal()
            picked = said(await ask(ring.api, path, structured_outputs={"choice": ["red", "blue"]}))
            assert picked in {"red", "blue"}


@pytest.mark.parametrize("of_text", [{"type": "json_object", "schema": COLOUR}])
async def test_a_schema_beside_json_object_holds_in_responses(
    api: Api, engine: ScriptedEngine, of_text: dict[str, Any]
) -> None:
    await ask(api, RESPONSES, text={"format": of_text})
    assert allows(engine, '{"colour": "red"}')
    assert not allows(engine, "{}")


async def test_anthropic_s_former_name_of_a_format_holds(api: Api, engine: ScriptedEngine) -> None:
    wanted = {"type": "json_schema", "schema": COLOUR}
    await ask(api, MESSAGES, output_format=wanted)
    assert not allows(engine, "{}")
    assert (await refused(api, MESSAGES, output_format=wanted, output_config={"format": wanted}))[0] == (
        "output_format"
    )


# Stop strings and streams.


@pytest.mark.parametrize("field", ["include_stop_str_in_output", "no_stop_trim"])
@PATHS
async def test_the_stop_string_may_be_a_part_of_the_answer(
    tokenizer: Tokenizer, path: str, field: str
) -> None:
    async with running_api(saying(tokenizer, "one two three"), tokenizer) as api:
        told = [json.dumps(await ask(api, path, stop=["tw"], **more)) for more in ({}, {field: True})]
        events = json.dumps(await stream(api, path, stop=["tw"], **{field: True}))
    assert "one" in told[0]
    assert "one tw" not in told[0]
    assert "one tw" in told[1]
    assert "three" not in told[1]
    assert "tw" in events


async def test_usage_comes_with_each_chunk_for_those_who_ask(tokenizer: Tokenizer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with running_api(saying(tokenizer, "one two three"), tokenizer) as api:
        for path in (CHAT, COMPLETIONS):
            chunks = await stream(api, path, stream_options=options)
            usage = [chunk["usage"] for chunk in chunks]
            counts = [each["completion_tokens"] for each in usage]
            assert counts == sorted(counts)
            assert len(set(counts)) > 2
            assert usage[-1] == usage[-2]
            assert all(
                each["total_tokens"] == each["prompt_tokens"] + each["completion_tokens"] for each in usage
            )
            plain = await stream(api, path, stream_options={"include_usage": True})
            assert [chunk["usage"] for chunk in plain[:-1]] == [None] * (len(plain) - 1)


@PATHS
async def test_options_of_a_stream_are_for_streams(api: Api, path: str) -> None:
    assert (await refused(api, path, stream_options={"include_usage": True}))[0] == "stream_options"
    assert (await refused(api, path, stream=True, stream_options={"chunks": 3}))[0] == "stream_options.chunks"
    await ask(api, path, stream_options={"include_usage": False, "include_obfuscation": True})


async def test_all_wrong_keys_of_biases_are_named(api: Api) -> None:
    _, message = await refused(api, logit_bias={"one": 1, "two": 1, "3": 1})
    assert "'one', 'two' are not token ids" in message


# Plain values.


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (CHAT, "n_predict"),
        (COMPLETIONS, "max_tokens"),
        (RESPONSES, "max_output_tokens"),
        (MESSAGES, "max_tokens"),
    ],
)
async def test_minus_one_sets_no_limit(api: Api, engine: ScriptedEngine, path: str, name: str) -> None:
    await ask(api, path, **{name: -1})
    request = engine.requests[-1]
    assert request.max_tokens == engine.context_length - len(request.prompt)


async def test_the_context_s_end_is_told_where_no_limit_was_set(tokenizer: Tokenizer) -> None:
    async with running_api(ScriptedEngine([(300,), (301,)]), tokenizer) as api:
        answer = await ask(api, MESSAGES, max_tokens=-1)
    assert answer["stop_reason"] == "model_context_window_exceeded"


async def test_a_seed_of_minus_one_is_a_random_one(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine([(300,)])
    async with running_api(engine, tokenizer, random_bits=lambda bits: 77 % 2**bits) as api:
        await ask(api, seed=-1)
    assert engine.requests[-1].sampling.seed == 77


# Tools.


async def test_functions_are_called_as_before_there_were_tools(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, CALL)
    async with running_api(engine, tokenizer) as api:
        answer = await ask(api, functions=[FUNCTION], function_call={"name": "weather"})
        chunks = await stream(api, functions=[FUNCTION], function_call={"name": "weather"})
        assert allows(engine, CALL)
        assert not allows(engine, "It is fine.")
        await ask(api, functions=[FUNCTION], function_call="none")
        assert "weather" not in shown(engine, tokenizer)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["content"] is None
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["function_call"]["name"] == "weather"
    assert json.loads(choice["message"]["function_call"]["arguments"]) == {"city": "Oslo"}
    told = [chunk["choices"][0] for chunk in chunks]
    calls = [choice["delta"]["function_call"] for choice in told if "function_call" in choice["delta"]]
    assert calls[0]["name"] == "weather"
    assert json.loads("".join(call["arguments"] for call in calls)) == {"city": "Oslo"}
    assert told[-1]["finish_reason"] == "function_call"


CUSTOM_CALL = '<tool_call>\n{"name": "run", "arguments": {"input": "ls \\"a\\"\\n\\u00e9"}}\n</tool_call>'
CUSTOM_TEXT = 'ls "a"\né'
REGEX = {"syntax": "regex", "definition": "[a-z]+"}


async def test_a_custom_tool_of_a_chat_gets_a_text(tokenizer: Tokenizer) -> None:
    tools = [{"type": "custom", "custom": {"name": "run", "description": "Runs a line."}}]
    engine = saying(tokenizer, CUSTOM_CALL)
    async with running_api(engine, tokenizer) as api:
        answer = await ask(api, tools=tools)
        chunks = await stream(api, tools=tools)
        await ask(api, tools=tools, tool_choice={"type": "custom", "custom": {"name": "run"}})
        assert allows(engine, CUSTOM_CALL)
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "run", "input": CUSTOM_TEXT})
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert (calls[0]["type"], calls[0]["custom"]["name"]) == ("custom", "run")
    assert "".join(call["custom"]["input"] for call in calls) == CUSTOM_TEXT
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_custom_tool_of_a_response_gets_a_text(tokenizer: Tokenizer) -> None:
    tools = [{"type": "custom", "name": "run", "format": {"type": "text"}}]
    engine = saying(tokenizer, CUSTOM_CALL)
    async with running_api(engine, tokenizer) as api:
        answer = await ask(api, RESPONSES, tools=tools)
        events = await stream(api, RESPONSES, tools=tools, tool_choice={"type": "custom", "name": "run"})
        result = {"type": "custom_tool_call_output", "call_id": answer["output"][0]["call_id"], "output": "a"}
        await ask(api, RESPONSES, input=[result], previous_response_id=answer["id"], tools=tools)
        assert '{"input": "ls ' in shown(engine, tokenizer)
        assert "<tool_response>\na\n</tool_response>" in shown(engine, tokenizer)
    (item,) = answer["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "run", CUSTOM_TEXT)
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == CUSTOM_TEXT
    (done,) = (event for event in events if event["type"] == "response.custom_tool_call_input.done")
    assert done["input"] == CUSTOM_TEXT
    assert events[-1]["response"]["output"][0]["input"] == CUSTOM_TEXT
    assert events[-1]["response"]["tool_choice"] == {"type": "custom", "name": "run"}


async def test_the_grammar_of_a_custom_tool_holds(api: Api, engine: ScriptedEngine) -> None:
    tool = {"type": "custom", "name": "run", "format": {"type": "grammar", **REGEX}}
    await ask(api, RESPONSES, tools=[tool], tool_choice="required")
    call = '<tool_call>\n{{"name": "run", "arguments": {{"input": "{}"}}}}\n</tool_call>'
    assert allows(engine, call.format("ls"))
    assert not allows(engine, call.format("LS"))
    lark = {"syntax": "lark", "definition": 'start: "say " WORD "\\n"\n%import common.WORD'}
    tool["format"] = {"type": "grammar", **lark}
    for choice in ("required", "auto"):
        answer = await ask(api, RESPONSES, tools=[tool], tool_choice=choice)
        assert "warnings" not in answer
        assert allows(engine, call.format("say it\\n"))
        assert not allows(engine, call.format("say 1\\n"))
    for form in ({"type": "grammar", "grammar": lark}, {"type": "grammar", **lark}):
        await ask(api, CHAT, tools=[{"type": "custom", "custom": {"name": "run", "format": form}}])
        assert allows(engine, "Well. " + call.format("say it\\n"))
        assert not allows(engine, call.format("it"))


async def test_a_grammar_in_lark_s_notation_holds(api: Api, engine: ScriptedEngine) -> None:
    # As Guidance's clients write it.
    grammar = '%llguidance {}\n\nstart: picked\npicked[capture]: PICKED\n\nPICKED: "red"\n     | "blue"\n\n\n'
    for given in (
        {"guided_grammar": grammar},
        {"structured_outputs": {"grammar": grammar}},
        {"ebnf": grammar},
        {"grammar": grammar},
    ):
        await ask(api, CHAT, **given)
        assert allows(engine, "red")
        assert not allows(engine, "green")


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ("start: /a(?=b)/", "line 1: pattern 'a(?=b)' has a look-around"),
        ('start: x\nx[stop="y"]: /a/', "line 2: the attribute stop of a rule is not supported: leave it out"),
    ],
)
async def test_what_lark_has_beyond_is_refused_by_name(api: Api, definition: str, message: str) -> None:
    param, told = await refused(api, CHAT, guided_grammar=definition)
    assert (param, told[: len(message) + 16]) == ("guided_grammar", f"guided_grammar: {message}")
    form = {"type": "grammar", "syntax": "lark", "definition": definition}
    tool = {"type": "custom", "name": "run", "format": form}
    param, told = await refused(api, RESPONSES, tools=[tool])
    assert param == "tools"
    assert told.startswith(f"the grammar of the custom tool run: {message}")


async def test_a_custom_tool_without_its_grammar_is_refused(api: Api) -> None:
    tool = {"type": "custom", "name": "run", "format": {"type": "grammar", "syntax": "regex"}}
    assert (await refused(api, RESPONSES, tools=[tool]))[0] == "tools[0].format"
    custom = {"name": "run", "format": {"type": "grammar"}}
    param, _ = await refused(api, tools=[{"type": "custom", "custom": custom}])
    assert param == "tools[0].custom.format"


@pytest.mark.parametrize("kind", ["web_search", "web_search_preview_2025_03_11", "mcp", "image_generation"])
async def test_a_tool_that_openai_runs_is_passed_over_with_a_warning(api: Api, kind: str) -> None:
    """Codex as installed sends one."""
    tools = [{"type": "function", **FUNCTION}, {"type": kind, "filters": {}}]
    answer = await ask(api, RESPONSES, tools=tools)
    (warning,) = answer["warnings"]
    assert warning.startswith(f"tools[1]: {kind} is left out")
    assert [tool["type"] for tool in answer["tools"]] == ["function"]
    _, message = await refused(api, RESPONSES, tools=tools, tool_choice={"type": kind})
    assert message.startswith("tool_choice")


@pytest.mark.parametrize("kind", ["web_search_20250305", "web_fetch_20250910", "code_execution_20250825"])
async def test_such_tools_are_passed_over_at_every_door(api: Api, engine: ScriptedEngine, kind: str) -> None:
    own = {"name": "weather", "input_schema": CITY}
    given: dict[str, list[dict[str, Any]]] = {
        MESSAGES: [own, {"type": kind, "name": "web", "max_uses": 3}],
        CHAT: [{"type": "function", "function": FUNCTION}, {"type": kind}],
    }
    for path, tools in given.items():
        answer = await ask(api, path, tools=tools)
        assert answer["warnings"] == [f"tools[1]: {kind} is left out, as this server runs no tools"]
        with_both = engine.requests[-1].prompt
        await ask(api, path, tools=tools[:1])
        assert engine.requests[-1].prompt == with_both
        answer = await ask(api, path, tools=tools[1:])
        assert len(answer["warnings"]) == 1
    choice = {"type": "tool", "name": "web"}
    _, message = await refused(api, MESSAGES, tools=given[MESSAGES], tool_choice=choice)
    assert message.startswith("tool_choice names 'web', but tools has weather")


async def test_a_tool_of_an_unknown_type_is_named(api: Api) -> None:
    for path in (CHAT, RESPONSES):
        param, message = await refused(api, path, tools=[{"type": "websearch"}])
        assert param == "tools[0].type"
        assert "'websearch'" in message


@pytest.mark.parametrize(
    ("kind", "name", "arguments"),
    [
        ("bash_20250124", "bash", '{"command": "ls"}'),
        ("text_editor_20250728", "str_replace_based_edit_tool", '{"command": "view", "path": "/a"}'),
        ("memory_20250818", "memory", '{"command": "view", "path": "/memories"}'),
    ],
)
async def test_tools_that_anthropic_s_clients_run_are_known_by_type(
    api: Api, engine: ScriptedEngine, kind: str, name: str, arguments: str
) -> None:
    await ask(api, MESSAGES, tools=[{"type": kind, "name": name}], tool_choice={"type": "any"})
    assert allows(engine, f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>')
    _, message = await refused(api, MESSAGES, tools=[{"type": "computer_20250124", "name": "computer"}])
    assert "'computer_20250124'" in message
    assert message.endswith("describe the tool by its input_schema")


# Responses.


async def test_a_response_has_what_open_responses_requires(api: Api) -> None:
    tools = [{"type": "function", **FUNCTION}, {"type": "function", "name": "clock", "strict": True}]
    given = {"presence_penalty": 0.5, "prompt_cache_key": "k", "safety_identifier": "s", "max_tool_calls": 3}
    plain, answer = await ask(api, RESPONSES), await ask(api, RESPONSES, tools=tools, **given)
    events = await stream(api, RESPONSES)
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "max_tool_calls": None,
        "service_tier": "default",
        "safety_identifier": None,
        "prompt_cache_key": None,
    }
    for response in (plain, *(event["response"] for event in events if "response" in event)):
        assert {name: response[name] for name in neutral} == neutral
    assert {name: answer[name] for name in given} == given
    assert [tool["strict"] for tool in answer["tools"]] == [False, True]


@pytest.mark.parametrize(
    "fields", [{"background": True}, {"conversation": "conv_1"}, {"prompt": {"id": "p"}}]
)
async def test_what_responses_lack_is_said_in_plain_words(api: Api, fields: dict[str, Any]) -> None:
    (name,) = fields
    assert await refused(api, RESPONSES, **fields) == (name, f"{name} is not supported: leave it out")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/responses/compact", "truncation"),
        ("/v1/conversations", "previous_response_id"),
        ("/v1/conversations/conv_1/items", "previous_response_id"),
        ("/conversations", "previous_response_id"),
    ],
)
async def test_paths_that_are_missing_say_what_to_do(api: Api, path: str, words: str) -> None:
    response = await api.http.post(path, json={"model": "default", "input": "x"})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "not_found")
    assert "is not supported" in error["message"]
    assert words in error["message"]


async def test_what_has_no_effect_is_told(api: Api) -> None:
    answer = await ask(api, RESPONSES, text={"verbosity": "low"})
    assert answer["warnings"] == ["text.verbosity has no effect: no model here is told how much to write"]
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}, {"type": "clear_tool_uses_20250919"}]
    answer = await ask(api, MESSAGES, context_management={"edits": edits})
    assert answer["warnings"] == ["context_management: clear_tool_uses_20250919 has no effect"]
    assert "warnings" not in await ask(api, MESSAGES, context_management={"edits": edits[:1]})


# Conversations from elsewhere.


def history(
    arguments: Any = "{}", user: Any = "read x", result: Any = "ok", role: str = "tool", name: str = "read"
) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    last = {"role": role, "content": result, **({"tool_call_id": "c1"} if role == "tool" else {"name": name})}
    return [
        {"role": "user", "content": user},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        last,
    ]


@pytest.mark.parametrize(
    ("shape", "same"),
    [
        ({"arguments": {"p": "x"}}, {"arguments": '{"p": "x"}'}),
        ({"arguments": None}, {}),
        ({"arguments": ""}, {}),
        ({"user": None}, {"user": ""}),
        ({"user": [{"type": "input_text", "text": "read x"}]}, {}),
        ({"result": None}, {"result": ""}),
        ({"result": []}, {"result": ""}),
        ({"result": {"rows": 3}}, {"result": '{"rows": 3}'}),
        ({"result": [1, 2]}, {"result": "[1, 2]"}),
        ({"result": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
         {"result": "[image_url left out: this model reads text only]"}),
        ({"role": "function"}, {}),
    ],
)  # fmt: skip
async def test_shapes_that_mean_the_same_are_the_same(
    tokenizer: Tokenizer, shape: dict[str, Any], same: dict[str, Any]
) -> None:
    engine = saying(tokenizer, "Yes.")
    prompts = []
    async with running_api(engine, tokenizer) as api:
        for fields in (shape, same):
            messages = history(**fields)
            if fields.get("role") == "function":
                del messages[-1]["name"]
            await ask(api, messages=messages)
            prompts.append(shown(engine, tokenizer))
    assert prompts[0] == prompts[1]


async def test_a_conversation_with_functions_goes_on(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Yes.")
    old = [
        {"role": "user", "content": "read x"},
        {"role": "assistant", "content": None, "function_call": {"name": "read", "arguments": '{"p": 1}'}},
        {"role": "function", "name": "read", "content": "ok"},
    ]
    async with running_api(engine, tokenizer) as api:
        await ask(api, messages=old)
    prompt = shown(engine, tokenizer)
    assert '{"name": "read", "arguments": {"p": 1}}' in prompt
    assert "<tool_response>\nok\n</tool_response>" in prompt


@pytest.mark.parametrize("name", ["files/read", "files:read"])
async def test_names_with_a_slash_or_a_colon_are_names(tokenizer: Tokenizer, name: str) -> None:
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
    async with running_api(saying(tokenizer, call), tokenizer) as api:
        answer = await ask(api, tools=[{"type": "function", "function": {"name": name}}])
        await ask(api, RESPONSES, tools=[{"type": "function", "name": name}])
        await ask(api, MESSAGES, tools=[{"name": name, "input_schema": {"type": "object"}}])
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == name


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize(
    "said",
    [
        {"content": "y", "reasoning_content": "a thought"},
        {"content": "y", "reasoning": "a thought"},
        {"content": "y", "thinking": "a thought"},
        {"content": [{"type": "thinking", "thinking": "a thought"}, {"type": "text", "text": "y"}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "a thought"}]},
                     {"type": "text", "text": "y"}]},
    ],
)  # fmt: skip
async def test_reasoning_of_elsewhere_reaches_the_template(smollm2_path: Any, said: dict[str, Any]) -> None:
    tokenizer = Tokenizer(smollm2_path)
    tokenizer.chat_template = THINKING
    engine = saying(tokenizer, "Yes.")
    async with running_api(engine, tokenizer) as api:
        await ask(api, messages=[*HELLO, {"role": "assistant", **said}, *HELLO])
    assert "<|im_start|>assistant\n<think>a thought</think>y<|im_end|>" in shown(engine, tokenizer)


async def test_items_of_tools_that_others_ran_do_not_end_a_conversation(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Yes.")
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        {"type": "function_call", "call_id": "c", "name": "r", "arguments": {"a": 1}},
        {"type": "function_call_output", "call_id": "c", "output": None},
        {"type": "mcp_call", "id": "m", "name": "look", "arguments": "{}", "output": "seen"},
        {"type": "local_shell_call", "call_id": "l", "status": "completed",
         "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "l", "output": "a.txt"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"role": "user", "content": "go on"},
    ]  # fmt: skip
    async with running_api(engine, tokenizer) as api:
        await ask(api, RESPONSES, input=items)
    prompt = shown(engine, tokenizer)
    for words in ('{"name": "r", "arguments": {"a": 1}}', "seen", '"command": ["ls"]', "a.txt", "I cannot."):
        assert words in prompt


async def test_blocks_of_tools_that_anthropic_ran_do_not_end_a_conversation(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Yes.")
    answer = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "Found."},
        {"type": "tool_use", "id": "t", "name": "r", "input": '{"a": 1}'},
    ]
    result = {"type": "tool_result", "tool_use_id": "t", "content": {"rows": 3}}
    turns = [*HELLO, {"role": "assistant", "content": answer}, {"role": "user", "content": [result]}]
    async with running_api(engine, tokenizer) as api:
        await ask(api, MESSAGES, messages=turns)
    prompt = shown(engine, tokenizer)
    for words in ("[web_search_tool_result left out", "Found.", '"arguments": {"a": 1}', '{"rows": 3}'):
        assert words in prompt


@pytest.mark.parametrize("field", ["prefix", "partial"])
async def test_a_message_to_be_continued_is_continued(tokenizer: Tokenizer, field: str) -> None:
    engine = saying(tokenizer, " 1999.")
    last = {"role": "assistant", "content": "Sure, it is", field: True}
    async with running_api(engine, tokenizer) as api:
        await ask(api, messages=[*HELLO, last])
        assert shown(engine, tokenizer).endswith("<|im_start|>assistant\nSure, it is")
        assert (await refused(api, messages=[last, *HELLO]))[0] == "messages[0]"
        assert (await refused(api, messages=[{**HELLO[0], field: True}]))[0] == "messages[0]"


# Lines that change.


def _with_line(path: str, shape: str, line: str) -> dict[str, Any]:
    first = {"whole": f"{line}\nBe brief.\nBe kind.", "within": f"Be brief.\n{line}\nBe kind."}.get(shape)
    parts = [{"type": "text", "text": text} for text in ("Be brief.", line, "Be kind.")]
    system = parts if first is None else first
    if path == MESSAGES:
        return {"system": system, "messages": HELLO}
    if path == RESPONSES and first is not None:
        return {"instructions": first, "input": "Name a year."}
    turns = [{"role": "system", "content": system}, *HELLO]
    return {"input": turns} if path == RESPONSES else {"messages": turns}


@pytest.mark.parametrize("shape", ["whole", "within", "parts"])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_line_that_changes_is_left_out_at_every_door(
    tokenizer: Tokenizer, path: str, shape: str
) -> None:
    engine = saying(tokenizer, "Yes.")
    prompts = []
    async with running_api(engine, tokenizer) as api:
        for code in ("1a2b3", "9f8e7"):
            await ask(api, path, **_with_line(path, shape, LINE.format(code)))
            prompts.append(shown(engine, tokenizer))
    assert prompts[0] == prompts[1]
    assert "x-anthropic" not in prompts[0]
    assert "Be brief." in prompts[0]
    assert "Be kind." in prompts[0]


async def test_what_a_user_says_of_that_line_stays(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Yes.")
    async with running_api(engine, tokenizer) as api:
        await ask(api, messages=[{"role": "user", "content": LINE.format("1")}])
        assert "x-anthropic-billing-header" in shown(engine, tokenizer)
        await ask(api, messages=[{"role": "system", "content": LINE.format("1")}, *HELLO])
        assert "x-anthropic" not in shown(engine, tokenizer)
