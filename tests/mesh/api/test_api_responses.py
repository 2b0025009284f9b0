"""`/v1/responses`: what it takes, the events it sends, and what it keeps."""

import json
import threading
from typing import Any

import httpx
import pytest

from mesh.api import errors
from mesh.api.api_keys import ApiKeys, KeyRecord, digest_of
from mesh.api.errors import json_bytes
from mesh.api.picture_parts import PicturedText, PicturePart
from mesh.api.response_store import ResponseStore, StoredResponse
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import StageFailed
from tests.mesh.api.test_api_tools import PARAMETERS, allows, saying, shown
from tests.support import api_harness
from tests.support.api_harness import KEY, MODEL, Api, ScriptedEngine, running_api

pytestmark = pytest.mark.model

tokenizer, engine, api = api_harness.tokenizer, api_harness.engine, api_harness.api

RESPONSES = "/v1/responses"
WEATHER: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS}
# As Codex sends those of its sub-agents and of MCP servers.
SPAWN: Any = {"type": "function", "name": "spawn", "parameters": PARAMETERS}
CREW: Any = {"type": "namespace", "name": "crew", "description": "Other agents.", "tools": [SPAWN]}
MANY: Any = [{**SPAWN, "name": f"f{index}"} for index in range(200)]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
SAID = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            name, data = lines
            event = json.loads(data.removeprefix("data: "))
            assert event["type"] == name.removeprefix("event: ")
            found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_a_text_in_one_piece(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "It is fine.")
    async with running_api(engine, tokenizer) as api:
        fields: dict[str, Any] = {
            "input": "How are you?",
            "instructions": "Be brief.",
            "metadata": {"a": "b"},
        }
        answer = await api.openai.responses.create(model=MODEL, max_output_tokens=99, **fields)
        assert shown(engine, tokenizer).startswith(
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
        )
        assert engine.requests[0].max_tokens == 99
    assert (answer.status, answer.output_text, answer.error) == ("completed", "It is fine.", None)
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(engine.steps)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert (answer.instructions, answer.metadata, answer.max_output_tokens) == ("Be brief.", {"a": "b"}, 99)
    assert (answer.temperature, answer.tool_choice, answer.tools) == (1.0, "auto", [])


async def test_the_events_of_a_stream_in_order(tokenizer: Tokenizer) -> None:
    async with running_api(saying(tokenizer, SAID), tokenizer) as api:
        fields = {"input": "Weather in Oslo?", "tools": [WEATHER], "stream": True}
        events = events_of(await api.http.post(RESPONSES, json=fields))
    kinds = [event["type"].removeprefix("response.") for event in events]
    once = [kind for index, kind in enumerate(kinds) if index == 0 or kinds[index - 1] != kind]
    assert once == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    response = events[-1]["response"]
    reasoning, message, call = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert [part["text"] for part in message["content"]] == ["I look."]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Oslo"})
    assert {item["status"] for item in response["output"]} == {"completed"}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"]
    for kind, text in (("reasoning_text", "Hm."), ("output_text", "I look.")):
        deltas = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
        assert "".join(deltas) == text
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == response["output"][event["output_index"]]["id"]


async def test_the_openai_client_puts_a_stream_together(tokenizer: Tokenizer) -> None:
    async with running_api(saying(tokenizer, SAID), tokenizer) as api:
        asked: Any = {"model": MODEL, "input": "Weather in Oslo?", "tools": [WEATHER]}
        async with api.openai.responses.stream(**asked) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_response()
        whole = await api.openai.responses.create(**asked)
    assert [item.type for item in streamed.output] == ["reasoning", "message", "function_call"]
    assert streamed.output_text == whole.output_text == "I look."
    assert streamed.output[2].arguments == whole.output[2].arguments  # type: ignore[union-attr]


async def test_logprobs_come_with_the_text(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine([(300,), (301, 302)], likeliest=((300, -0.1), (400, -2.0)))
    async with running_api(engine, tokenizer) as api:
        asked: Any = {"model": MODEL, "input": "x", "include": ["message.output_text.logprobs"]}
        answer = await api.openai.responses.create(top_logprobs=2, **asked)
        events = events_of(await api.http.post(RESPONSES, json={**asked, "stream": True}))
    message: Any = answer.output[0]
    assert [len(entry.top_logprobs) for entry in message.content[0].logprobs] == [2, 2, 2]
    told = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert [entry["logprob"] for entry in told] == [-0.3, -0.301, -0.302]


async def test_the_limit_makes_it_incomplete(tokenizer: Tokenizer) -> None:
    async with running_api(saying(tokenizer, "one two", ends=False), tokenizer) as api:
        whole = (await api.http.post(RESPONSES, json={"input": "x"})).json()
        events = events_of(await api.http.post(RESPONSES, json={"input": "x", "stream": True}))
    for response in (whole, events[-1]["response"]):
        assert (response["status"], response["incomplete_details"]) == (
            "incomplete",
            {"reason": "max_output_tokens"},
        )
        assert response["output"][0]["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"


async def test_an_answer_without_a_word_is_an_empty_message(tokenizer: Tokenizer) -> None:
    async with running_api(saying(tokenizer, ""), tokenizer) as api:
        response = (await api.http.post(RESPONSES, json={"input": "x"})).json()
    assert [part["text"] for part in response["output"][0]["content"]] == [""]


@pytest.mark.parametrize("pause_s", [0.0, 0.3])
async def test_a_failure_is_a_status_or_an_event(tokenizer: Tokenizer, pause_s: float) -> None:
    """A status for as long as nothing was sent; a ping comes first after a while."""
    error = StageFailed("stage 1 went away")
    async with running_api(ScriptedEngine([pause_s, error]), tokenizer) as api:
        response = await api.http.post(RESPONSES, json={"input": "x", "stream": True})
    if not pause_s:
        assert response.status_code == 503
        return
    events = events_of(response)
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.failed",
    ]
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "stage_failed")


async def test_earlier_turns_come_as_items(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Rain.")
    items: list[Any] = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "…"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
    ]
    async with running_api(engine, tokenizer) as api:
        response = await api.http.post(RESPONSES, json={"input": items, "instructions": "Be brief."})
        assert response.status_code == 200, response.text
    assert shown(engine, tokenizer) == (
        "<|im_start|>system\nBe brief.\n\nBe kind.<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n"
        "<|im_start|>assistant\nI look.\n"
        '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n"
        "<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_picture_in_a_result_does_not_end_the_conversation(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "I see.")
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    items: list[Any] = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c1", "name": "view", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "2 by 2"}, picture],
        },
    ]
    async with running_api(engine, tokenizer) as api:
        response = await api.http.post(RESPONSES, json={"input": items})
        assert response.status_code == 200, response.text
        items[0]["content"] = [picture]
        refused = await api.http.post(RESPONSES, json={"input": items})
        assert refused.status_code == 400
    note = "[input_image left out: this model reads text only]"
    assert f"<tool_response>\n2 by 2\n{note}\n</tool_response>" in shown(engine, tokenizer)


async def test_calls_of_functions_in_a_namespace_have_both_names(tokenizer: Tokenizer) -> None:
    text = '<tool_call>{"name": "crew__spawn", "arguments": {"city": "Oslo"}}</tool_call>'
    engine = saying(tokenizer, text)
    async with running_api(engine, tokenizer) as api:
        fields: dict[str, Any] = {"tools": [WEATHER, CREW], "stream": True}
        events = events_of(await api.http.post(RESPONSES, json={"input": "Who goes?", **fields}))
        prompt = shown(engine, tokenizer)
        response = events[-1]["response"]
        (call,) = response["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "gone"}
        await api.http.post(RESPONSES, json={"input": [call, result], **fields})
        by_items = shown(engine, tokenizer)
        gone_on = {"input": [result], "previous_response_id": response["id"], **fields}
        await api.http.post(RESPONSES, json=gone_on)
        by_id = shown(engine, tokenizer)
    assert '{"name": "crew__spawn", "parameters": ' in prompt
    assert (call["namespace"], call["name"]) == ("crew", "spawn")
    assert json.loads(call["arguments"]) == {"city": "Oslo"}
    added = next(event["item"] for event in events if event["type"] == "response.output_item.added")
    assert (added["namespace"], added["name"]) == ("crew", "spawn")
    crew = {**CREW, "tools": [{"strict": False, **tool} for tool in CREW["tools"]]}
    assert response["tools"] == [{"strict": False, **WEATHER}, crew]
    for again in (by_items, by_id):
        assert '<tool_call>\n{"name": "crew__spawn", "arguments": {"city": "Oslo"}}\n</tool_call>' in again


async def test_an_answer_that_is_kept_can_be_gone_on_from(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, SAID)
    async with running_api(engine, tokenizer) as api:
        first = await api.openai.responses.create(
            model=MODEL,
            input="Weather in Oslo?",
            instructions="Be brief.",
            tools=[WEATHER],
        )
        call: Any = first.output[2]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        await api.openai.responses.create(model=MODEL, input=[result], previous_response_id=first.id)
        prompt = shown(engine, tokenizer)
        kept = await api.openai.responses.retrieve(first.id)
        await api.openai.responses.delete(first.id)
        gone = await api.http.get(f"{RESPONSES}/{first.id}")
        gone_on = await api.http.post(RESPONSES, json={"input": "x", "previous_response_id": first.id})
        unkept = await api.openai.responses.create(model=MODEL, input="x", store=False)
        not_there = await api.http.get(f"{RESPONSES}/{unkept.id}")
    assert "Be brief." not in prompt
    assert "Weather in Oslo?" in prompt
    assert '"name": "weather"' in prompt
    assert prompt.endswith("<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert kept.model_dump() == first.model_dump()
    assert (gone.status_code, not_there.status_code) == (404, 404)
    assert gone.json()["error"]["code"] == "not_found"
    assert (gone_on.status_code, gone_on.json()["error"]["param"]) == (400, "previous_response_id")


async def test_nobody_reads_what_another_key_keeps(tokenizer: Tokenizer) -> None:
    keys = ApiKeys([KeyRecord("alice", digest_of(KEY)), KeyRecord("bob", digest_of("sk-bob"))])
    async with running_api(saying(tokenizer, "Secret."), tokenizer, keys=keys) as api:
        mine = await api.openai.responses.create(model=MODEL, input="x")
        headers = {"authorization": "Bearer sk-bob"}
        for method, path, fields in (
            ("GET", f"{RESPONSES}/{mine.id}", None),
            ("DELETE", f"{RESPONSES}/{mine.id}", None),
            ("POST", RESPONSES, {"input": "x", "previous_response_id": mine.id}),
        ):
            response = await api.http.request(method, path, json=fields, headers=headers)
            assert response.status_code in {400, 404}
        assert (await api.openai.responses.retrieve(mine.id)).output_text == "Secret."


async def test_items_may_be_referred_to_by_their_ids(tokenizer: Tokenizer) -> None:
    """As the AI SDK of Vercel refers to all of an earlier answer."""
    engine = saying(tokenizer, SAID)
    question: Any = {"role": "user", "content": "Weather in Oslo?"}
    async with running_api(engine, tokenizer) as api:
        asked: dict[str, Any] = {"tools": [WEATHER]}
        first = (await api.http.post(RESPONSES, json={"input": [question], **asked})).json()
        (call,) = [item for item in first["output"] if item["type"] == "function_call"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
        await api.http.post(RESPONSES, json={"input": [question, *first["output"], result], **asked})
        by_items = shown(engine, tokenizer)
        references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        referring = {"input": [question, *references, result], **asked}
        counted = await api.http.post(f"{RESPONSES}/input_tokens", json=referring)
        second = (await api.http.post(RESPONSES, json=referring)).json()
        by_references = shown(engine, tokenizer)
        listed = (await api.http.get(f"{RESPONSES}/{second['id']}/input_items?order=asc")).json()["data"]
        # What was referred to is part of the second answer's input: it stays there without the first one.
        await api.http.delete(f"{RESPONSES}/{first['id']}")
        ids_alone = [{"id": item["id"]} for item in listed]
        third = await api.http.post(RESPONSES, json={"input": ids_alone, **asked})
        assert third.status_code == 200, third.text
        by_ids = shown(engine, tokenizer)
    assert len(references) == 3
    assert by_ids == by_references == by_items
    assert "I look." in by_items
    assert counted.json()["input_tokens"] == second["usage"]["input_tokens"] == len(engine.requests[2].prompt)
    assert listed[1:4] == first["output"]


async def test_items_that_are_not_kept_cannot_be_referred_to(tokenizer: Tokenizer) -> None:
    keys = ApiKeys([KeyRecord("alice", digest_of(KEY)), KeyRecord("bob", digest_of("sk-bob"))])
    async with running_api(saying(tokenizer, "Secret."), tokenizer, keys=keys) as api:
        mine = {"authorization": f"Bearer {KEY}"}
        kept = (await api.http.post(RESPONSES, json={"input": "x"}, headers=mine)).json()
        unkept = (await api.http.post(RESPONSES, json={"input": "x", "store": False}, headers=mine)).json()
        for response, key in ((kept, "sk-bob"), (unkept, KEY)):
            reference = {"type": "item_reference", "id": response["output"][0]["id"]}
            refused = await api.http.post(
                RESPONSES, json={"input": [reference]}, headers={"authorization": f"Bearer {key}"}
            )
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0].id")
            assert reference["id"] in refused.json()["error"]["message"]


async def test_a_picture_of_several_answers_is_held_and_counted_once() -> None:
    picture = PicturePart(text="A" * 1000)
    shown = {"role": "user", "content": PicturedText(parts=("What?", picture))}
    item = {"id": "msg_1", "content": [{"type": "input_image", "image_url": picture.text}]}
    store = ResponseStore(max_bytes=400, max_picture_bytes=2500)
    for name in "abc":
        await store.put("alice", name, StoredResponse([shown], {}, [item]))
    assert all(store.get("alice", name) for name in "abc")
    for name, text in (("d", "B" * 1000), ("e", "C" * 1000)):
        # As long, and another one.
        other = {"role": "user", "content": PicturedText(parts=(PicturePart(text=text),))}
        await store.put("alice", name, StoredResponse([other], {}))
    # It went with the last answer that had it.
    assert [name for name in "abcde" if store.get("alice", name)] == ["d", "e"]
    await store.put(
        "alice",
        "huge",
        StoredResponse([shown, {"content": PicturedText(parts=(PicturePart(text="D" * 2000),))}], {}),
    )
    assert store.get("alice", "huge") is None


async def test_the_store_has_bounds() -> None:
    store = ResponseStore(max_responses=3, max_bytes=200)
    small = StoredResponse([], {"a": 1})
    for name in "abcd":
        await store.put("alice", name, small)
    await store.put("bob", "e", small)
    assert [name for name in "abcde" if store.get("alice", name)] == ["b", "c", "d"]
    assert store.get("bob", "e") is small
    await store.put("alice", "large", StoredResponse([{"content": "x" * 150}], {}))
    assert store.get("alice", "large") is not None
    assert store.get("alice", "b") is None
    await store.put("alice", "huge", StoredResponse([{"content": "x" * 300}], {}))
    assert not any(store.get("alice", name) for name in ("large", "huge", "d"))
    assert (store.remove("alice", "x"), store.remove("nobody", "x"), store.remove("bob", "e")) == (
        False,
        False,
        True,
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": [{"role": "user", "content": "x"}, {"id": "msg_1"}]}, "input[1].id"),
        ({"input": [{"id": "msg_1", "status": "completed"}]}, "input[0].id"),
        ({"input": [{"id": "msg_1", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": ["msg_1"]}]}, "input[0].id"),
        ({"input": [{"id": "msg_1"}, {"role": "user", "content": "x"}, {"id": "msg_1"}]}, "input[2].id"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": "x"}, {"role": "boss", "content": "x"}]}, "input[1].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "websearch"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format"),
        ({"text": {"colour": "red"}}, "text.colour"),
        ({"reasoning": {"length": 3}}, "reasoning.length"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [WEATHER, {"type": "namespace", "name": "crew"}]}, "tools[1].tools"),
        ({"tools": [{"type": "namespace", "name": "a b", "tools": [WEATHER]}]}, "tools[0].name"),
        ({"tools": [{**CREW, "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [CREW, CREW]}, "tools"),
        ({"tools": [CREW, {**WEATHER, "name": "crew__spawn"}]}, "tools"),
        ({"tools": [{**CREW, "name": f"n{index}", "tools": MANY} for index in range(2)]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"store": "yes"}, "store"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"truncation": "middle"}, "truncation"),
        ({"input": "word " * 99}, "input"),
    ],
)
async def test_what_makes_no_sense_is_refused(api: Api, fields: dict[str, Any], param: str) -> None:
    response = await api.http.post(RESPONSES, json={"input": "x", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_thinking_is_asked_for_where_the_template_asks(tokenizer: Tokenizer) -> None:
    template = tokenizer.chat_template
    tokenizer.chat_template = "{{ reasoning_effort }}|{{ enable_thinking }}|{{ messages[0].content }}"
    engine = saying(tokenizer, "x")
    try:
        async with running_api(engine, tokenizer) as api:
            await api.http.post(RESPONSES, json={"input": "hi", "reasoning": {"effort": "none"}})
            assert shown(engine, tokenizer) == "none|False|hi"
            chat = {"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "low"}
            await api.http.post("/v1/chat/completions", json=chat)
            assert shown(engine, tokenizer) == "low|True|hi"
    finally:
        tokenizer.chat_template = template


async def test_what_the_template_refuses_is_blamed_on_the_input(tokenizer: Tokenizer) -> None:
    template = tokenizer.chat_template
    tokenizer.chat_template = "{{ raise_exception('no hello') }}"
    try:
        async with running_api(saying(tokenizer, "x"), tokenizer) as api:
            refused = await api.http.post(RESPONSES, json={"input": "hi"})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "input"
            assert "no hello" in refused.json()["error"]["message"]
    finally:
        tokenizer.chat_template = template


async def test_the_text_may_have_to_have_a_form(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, '{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    async with running_api(engine, tokenizer) as api:
        response = await api.http.post(RESPONSES, json={"input": "x", "text": {"format": wanted}})
        assert response.status_code == 200, response.text
        assert allows(engine, '{"a": 1}')
        assert not allows(engine, "{}")
        assert response.json()["text"]["format"] == wanted
        await api.http.post(RESPONSES, json={"input": "x", "text": {"format": {"type": "json_object"}}})
        assert allows(engine, "{}")
        await api.http.post(RESPONSES, json={"input": "x", "text": {"format": {"type": "text"}}})
        assert engine.requests[-1].grammar is None
        asked = {"input": "x", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}}
        await api.http.post(RESPONSES, json=asked)
        assert allows(engine, CALL.replace(">{", ">\n{").replace("}<", "}\n<"))


@pytest.mark.parametrize(
    ("format_", "param"),
    [
        ({"type": "json_schema", "name": "x"}, "text.format.schema"),
        ({"type": "json_schema", "name": "x", "schema": {"not": {}}}, "text.format.schema"),
        ({"type": "json_schema", "name": "x", "schema": 5}, "text.format.schema"),
    ],
)
async def test_a_form_that_cannot_be_kept_is_refused(api: Api, format_: Any, param: str) -> None:
    response = await api.http.post(RESPONSES, json={"input": "x", "text": {"format": format_}})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert "response_format" not in error["message"]


async def test_old_turns_are_dropped_where_that_is_asked_for(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Yes.")
    turns: Any = [{"role": "developer", "content": "Be brief."}]
    for number in range(40):
        turns += [
            {"role": "user", "content": f"Question {number}, " + "word " * 50},
            {"role": "assistant", "content": f"Answer {number}."},
        ]
    turns.append({"role": "user", "content": "The last one?"})
    async with running_api(engine, tokenizer) as api:
        refused = await api.http.post(RESPONSES, json={"input": turns})
        answer = await api.openai.responses.create(
            model=MODEL, input=turns, truncation="auto", max_output_tokens=100
        )
        text = shown(engine, tokenizer)
        hopeless = "word " * 3000
        too_long = await api.http.post(RESPONSES, json={"input": hopeless, "truncation": "auto"})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert (answer.truncation, answer.output_text) == ("auto", "Yes.")
    assert "Be brief." in text
    assert text.index("Question 39,") < text.index("The last one?")
    assert "Question 0," not in text
    prompt = engine.requests[-1].prompt
    # As much is kept as fits beside the answer.
    assert engine.context_length - 200 < len(prompt) + 100 <= engine.context_length
    assert too_long.json()["error"]["code"] == "context_length_exceeded"


async def test_old_turns_of_kept_answers_are_dropped(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Yes.")
    async with running_api(engine, tokenizer) as api:
        asked: Any = {"model": MODEL, "truncation": "auto", "max_output_tokens": 100}
        last: Any = {}
        for number in range(6):
            question = f"Question {number}, " + "word " * 500
            answer = await api.openai.responses.create(input=question, **asked, **last)
            assert answer.output_text == "Yes."
            counted = await api.http.post(
                f"{RESPONSES}/input_tokens", json={"input": question, **asked, **last}
            )
            assert answer.usage is not None
            assert counted.json()["input_tokens"] == answer.usage.input_tokens
            last = {"previous_response_id": answer.id}
        text = shown(engine, tokenizer)
        untold = await api.http.post(RESPONSES, json={"input": "More?", **last})
    assert [f"Question {number}," in text for number in range(6)] == [False] * 3 + [True] * 3
    assert untold.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("before", [[], [{"role": "user", "content": "Hello."}]])
async def test_old_calls_of_the_last_turn_are_dropped_with_their_results(
    tokenizer: Tokenizer, before: list[Any]
) -> None:
    """A coding agent's turn: one question, and many calls."""
    engine = saying(tokenizer, "Yes.")
    turns: Any = [*before, {"role": "user", "content": "The question?"}]
    for number in range(8):
        call = {"type": "function_call", "name": "weather", "arguments": "{}"}
        result = {"type": "function_call_output", "output": f"result {number}, " + "word " * 200}
        for each in (f"c{number}", f"d{number}"):
            turns.append({**call, "call_id": each})
        for each in (f"c{number}", f"d{number}"):
            turns.append({**result, "call_id": each})
    async with running_api(engine, tokenizer) as api:
        answer = await api.openai.responses.create(
            model=MODEL, input=turns, truncation="auto", max_output_tokens=100
        )
        text = shown(engine, tokenizer)
        huge = {"type": "function_call_output", "call_id": "e", "output": "word " * 3000}
        hopeless = await api.http.post(RESPONSES, json={"input": [*turns, huge], "truncation": "auto"})
        calls_alone = turns[len(before) + 1 :]
        unasked = await api.http.post(
            RESPONSES, json={"input": calls_alone, "truncation": "auto", "max_output_tokens": 100}
        )
    assert answer.output_text == "Yes."
    assert "Hello." not in text
    assert text.count("The question?") == 1
    assert [text.count(f"result {number},") for number in range(8)] == [0] * 5 + [2] * 3
    assert text.count('{"name": "weather"') == 6
    assert hopeless.json()["error"]["code"] == "context_length_exceeded"
    assert unasked.status_code == 200, unasked.text


async def test_the_items_of_the_input_are_kept_with_the_answer(tokenizer: Tokenizer) -> None:
    async with running_api(saying(tokenizer, "Yes."), tokenizer) as api:
        items: Any = [{"role": "user", "content": f"Question {number}"} for number in range(5)]
        answer = await api.openai.responses.create(model=MODEL, input=items)
        pages = api.openai.responses.input_items
        latest = [item async for item in pages.list(answer.id, limit=2)]
        oldest = await pages.list(answer.id, limit=2, order="asc")
        following = await pages.list(answer.id, order="asc", after=oldest.data[-1].id or "")
        alone = await api.openai.responses.create(model=MODEL, input="Well?")
        text: Any = (await pages.list(alone.id)).data[0]
        path = f"{RESPONSES}/{answer.id}/input_items"
        wrong = [
            await api.http.get(path, params=query)
            for query in ({"limit": "0"}, {"limit": "9" * 5000}, {"after": "msg_x"})
        ]
        missing = await api.http.get(f"{RESPONSES}/resp_x/input_items")
    listed: list[list[Any]] = [list(latest), list(oldest.data)]
    said = [[item.content[0].text for item in items] for items in listed]
    assert said == [[f"Question {number}" for number in numbers] for numbers in ((4, 3, 2, 1, 0), (0, 1))]
    assert oldest.has_more
    assert len(following.data) == 3
    assert text.content[0].text == "Well?"
    assert [each.json()["error"]["param"] for each in wrong] == ["limit", "limit", "after"]
    assert missing.status_code == 404


async def test_tokens_of_a_prompt_are_counted_without_an_answer(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Yes.")
    async with running_api(engine, tokenizer) as api:
        asked: Any = {"model": MODEL, "input": "Well?", "instructions": "Be brief.", "tools": [WEATHER]}
        counted = await api.openai.responses.input_tokens.count(**asked)
        answer = await api.openai.responses.create(**asked)
        chat = {"messages": [{"role": "user", "content": "Well?"}]}
        found = await api.http.post("/v1/chat/completions/input_tokens", json=chat)
        whole = await api.http.post("/v1/chat/completions", json=chat)
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens
    assert found.json()["input_tokens"] == whole.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(("number", "is_streamed"), [("1e999", False), ("-1e999", True)])
async def test_numbers_that_json_lacks_come_back_as_null(
    tokenizer: Tokenizer, number: str, *, is_streamed: bool
) -> None:
    parameters = f'{{"type": "object", "properties": {{"x": {{"type": "number", "maximum": {number}}}}}}}'
    tool = f'{{"type": "function", "name": "f", "strict": false, "parameters": {parameters}}}'
    body = f'{{"input": "x", "stream": {str(is_streamed).lower()}, "tools": [{tool}], "tool_choice": "none"}}'
    async with running_api(saying(tokenizer, "Fine."), tokenizer) as api:
        response = await api.http.post(RESPONSES, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 200, response.text
        answer = events_of(response)[-1]["response"] if is_streamed else response.json()
        stored = await api.http.get(f"{RESPONSES}/{answer['id']}")
    assert answer["tools"][0]["parameters"]["properties"] == {"x": {"type": "number", "maximum": None}}
    assert stored.json()["tools"] == answer["tools"]
    assert "Infinity" not in response.text + stored.text


def test_every_answer_is_json() -> None:
    sent = '{"a": [NaN, {"b": -Infinity}, 1e999, 1.5], "c": "NaN \\ud83d"}'
    written = json_bytes({**json.loads(sent), "d": (float("nan"), True, None)})
    assert written == rb'{"a":[null,{"b":null},null,1.5],"c":"NaN \ud83d","d":[null,true,null]}'


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_a_response_repeats_is_written_beside_the_event_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, *, is_streamed: bool
) -> None:
    longest = 0
    loop_thread, written = threading.get_ident(), errors._json_text

    def watched(value: Any) -> str:
        nonlocal longest
        text = written(value)
        if threading.get_ident() == loop_thread:
            longest = max(longest, len(text))
        return text

    monkeypatch.setattr(errors, "_json_text", watched)
    body: dict[str, Any] = {
        "input": [
            {"role": "user", "content": "Hi."},
            {"type": "reasoning", "content": [], "x": "y" * 300_000},
        ],
        "metadata": {"note": "n" * 500_000},
        "stream": is_streamed,
    }
    async with running_api(saying(tokenizer, "It is fine."), tokenizer) as api:
        answer = await api.http.post(RESPONSES, json=body)
        response = events_of(answer)[-1]["response"] if is_streamed else answer.json()
        assert (response["status"], response["metadata"]) == ("completed", body["metadata"])
        where = f"{RESPONSES}/{response['id']}"
        assert (await api.http.get(where)).json() == response
        items = (await api.http.get(f"{where}/input_items")).json()["data"]
        assert items[0]["x"] == body["input"][1]["x"]
    assert longest < 100_000
