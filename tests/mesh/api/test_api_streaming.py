"""Streams that stall, fail, are hung up on or shut down."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from structlog.testing import capture_logs

from mesh.engine import GenerationStats
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import Overloaded, StageFailed
from tests.support.api_harness import MODEL, Api, ScriptedEngine, running_api

pytestmark = pytest.mark.model

CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "Hello"}]
FOREVER: list[Any] = [(300,), 3600.0]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer(smollm2_path)


async def _lines(api: Api) -> list[str]:
    response = await api.http.post(CHAT, json={"messages": HELLO, "stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    return [line for line in response.text.split("\n") if line]


async def test_the_bytes_of_a_stream(tokenizer: Tokenizer) -> None:
    async with running_api(ScriptedEngine([(300,), (301, 302)]), tokenizer) as api:
        *events, done = await _lines(api)
    assert done == "data: [DONE]"
    assert all(event.startswith("data: {") for event in events)
    first, *middle, last = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert first["delta"] == {"role": "assistant", "content": ""}
    text = b"".join(map(tokenizer.piece, (300, 301, 302))).decode()
    assert "".join(choice["delta"]["content"] for choice in middle) == text
    assert (last["delta"], last["finish_reason"]) == ({}, "length")


async def test_comments_keep_a_silent_stream_alive_from_the_start(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine([0.5, (300,), 0.5, (301,)])
    async with (
        running_api(engine, tokenizer, ping_interval_s=0.1) as api,
        api.http.stream("POST", CHAT, json={"messages": HELLO, "stream": True}) as response,
    ):
        lines = [line async for line in response.aiter_lines()]
    first_data = next(index for index, line in enumerate(lines) if line.startswith("data"))
    assert lines[:first_data].count(": ping") >= 3
    assert lines[first_data:].count(": ping") >= 2
    assert lines[-2:] == ["data: [DONE]", ""]


async def test_the_openai_client_reads_past_comments(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine([0.3, (300,), 0.3, (301,)])
    async with running_api(engine, tokenizer, ping_interval_s=0.05) as api:
        stream = await api.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "length"]


async def test_a_failure_in_mid_stream_is_an_event_and_no_done(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine([(300,), StageFailed("stage 1 went away", retry_after_s=3)])
    async with running_api(engine, tokenizer) as api:
        lines = await _lines(api)
        with pytest.raises(openai.APIError, match="stage 1 went away"):
            async for _ in await api.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True):
                pass
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == ("stage_failed", "server_error")
    assert "data: [DONE]" not in lines


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_before_the_first_token_is_a_status(tokenizer: Tokenizer, *, stream: bool) -> None:
    engine = ScriptedEngine([Overloaded("all 4 slots are taken", retry_after_s=7)])
    async with running_api(engine, tokenizer) as api:
        with pytest.raises(openai.RateLimitError) as caught:
            await api.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=stream)
    assert caught.value.code == "overloaded"
    assert caught.value.response.headers["retry-after"] == "7"


@pytest.mark.parametrize("stream", [True, False])
async def test_what_nobody_expected_tells_neither_client_nor_log_its_text(
    tokenizer: Tokenizer, *, stream: bool
) -> None:
    engine = ScriptedEngine([RuntimeError("the password is swordfish")])
    async with running_api(engine, tokenizer) as api:
        with capture_logs() as events:
            response = await api.http.post(CHAT, json={"messages": HELLO, "stream": stream})
        health = await api.http.get("/health")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "swordfish" not in response.text + str(events)
    [event] = [event for event in events if event["event"] == "request_failed_unexpectedly"]
    assert event["error"] == "RuntimeError"
    assert "api_harness.py" in event["at"][0]
    assert health.status_code == 200


@pytest.mark.parametrize("steps", [FOREVER, [3600.0]])
async def test_hanging_up_on_a_stream_ends_the_session(tokenizer: Tokenizer, steps: list[Any]) -> None:
    engine = ScriptedEngine(steps)
    async with running_api(engine, tokenizer) as api:
        async with api.http.stream("POST", CHAT, json={"messages": HELLO, "stream": True}) as response:
            await anext(response.aiter_lines())
            assert engine.num_running == 1
        await asyncio.wait_for(engine.closed.wait(), 20)
        assert engine.num_running == 0


async def test_hanging_up_on_a_whole_answer_ends_the_session(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(FOREVER)
    async with running_api(engine, tokenizer) as api:
        with pytest.raises(httpx.ReadTimeout):
            await api.http.post(CHAT, json={"messages": HELLO}, timeout=0.3)
        await asyncio.wait_for(engine.closed.wait(), 20)
        assert engine.num_running == 0


async def test_one_failing_prompt_ends_the_others(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine([(300,), 0.1, StageFailed("stage 1 went away")])
    async with running_api(engine, tokenizer) as api:
        fields = {"prompt": ["one"] * 20, "max_tokens": 5}
        response = await api.http.post("/v1/completions", json=fields)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "stage_failed"
    assert int(response.headers["retry-after"]) > 0
    assert engine.num_running == 0


async def test_several_tokens_at_once_stop_inside(tokenizer: Tokenizer) -> None:
    stats = GenerationStats(num_windows=3, num_proposed=9, num_accepted=5, prefill_ms=40.0, decode_ms=60.0)
    tokens = tuple(tokenizer.encode(" one two three four five", add_special=False, parse_special=False))
    engine = ScriptedEngine([tokens[:1], tokens[1:], (300,)], stats)
    async with running_api(engine, tokenizer) as api:
        answer: Any = await api.openai.chat.completions.create(model=MODEL, messages=HELLO, stop=[" three"])
    assert answer.choices[0].message.content == " one two"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 3
    details = answer.usage.completion_tokens_details
    # None of them were of a prediction in the request.
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
    assert answer.timings["draft_n"] == 9
    assert answer.timings["draft_n_accepted"] == 5
    assert engine.num_running == 0


@pytest.mark.quiet
async def test_a_shutdown_tells_open_streams_and_is_prompt(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(FOREVER)
    lines: list[str] = []
    begun = asyncio.Event()

    async def read(url: str) -> None:
        async with httpx.AsyncClient(base_url=url) as http:
            fields = {"messages": HELLO, "stream": True}
            async with http.stream("POST", CHAT, json=fields, timeout=30) as response:
                async for line in response.aiter_lines():
                    lines.append(line)
                    begun.set()

    async with running_api(engine, tokenizer) as api:
        reader = asyncio.create_task(read(api.url))
        await begun.wait()
        left_s = time.perf_counter()
    took_s = time.perf_counter() - left_s
    await reader
    assert took_s < 2
    assert engine.num_running == 0
    error = json.loads([line for line in lines if line][-1].removeprefix("data: "))["error"]
    assert error["code"] == "mesh_unavailable"
    assert "shutting down" in error["message"]


@pytest.mark.quiet
async def test_a_shutdown_does_not_wait_for_clients_that_do_not_read(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine([(300,) * 63] * 200_000, context_length=64)
    async with running_api(engine, tokenizer) as api:
        host, port = api.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1)
        body = json.dumps({"messages": HELLO, "stream": True}).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        await reader.readexactly(1)
        await asyncio.sleep(0.5)
        assert engine.num_running == 1
        left_s = time.perf_counter()
    assert time.perf_counter() - left_s < 3
    assert engine.num_running == 0
    writer.close()
