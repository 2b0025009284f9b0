"""How much of a prompt was read, told in streams that have no token to send yet."""

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping, Sequence
from typing import Any

import pytest

from mesh.api.event_stream import DelayedStream, EventStream
from mesh.api.openai_format import OPENAI_STREAM
from mesh.text.tokenizer import Tokenizer
from stages.runtime.spans import Span
from tests.mesh.api.test_client_disconnects import Gate
from tests.support import api_harness
from tests.support.ring_api import CHAT, RingApi, running_ring_api
from tests.support.status_parts import sessions_of

pytestmark = pytest.mark.model

tokenizer = api_harness.tokenizer

# The tail is held before it computes this position, the first of a chunk.
HELD = 112
TEXT = "Hello " * 300
MESSAGES = [{"role": "user", "content": TEXT}]

Emit = Callable[[bytes], Awaitable[None]]

COMMENT = re.compile(r": prefill (\d+)/(\d+) tokens")


class Source:
    """Source of a stream without an answer."""

    form = OPENAI_STREAM

    def __init__(
        self,
        produce: Callable[[Emit], Coroutine[Any, Any, None]],
        comment: Callable[[], bytes],
    ) -> None:
        self._produce, self.comment = produce, comment

    async def produce(self, emit: Emit) -> None:
        await self._produce(emit)

    def is_whole(self) -> bool:
        return True

    def failed(self, error: BaseException) -> bytes:
        return self.form.failed(error)


@pytest.fixture
async def ring_api(tokenizer: Tokenizer) -> AsyncIterator[RingApi]:
    async with running_ring_api(tokenizer, num_slots=1, ping_interval_s=0.02) as running:
        yield running


async def streamed(ring_api: RingApi, path: str, fields: dict[str, Any], held: re.Pattern[str]) -> list[str]:
    """Lines of a stream, whose tail is held until a line matches `held`."""
    gate = Gate(HELD)
    ring_api.runtimes[1].on_decode = gate
    lines: list[str] = []
    is_held = True
    body = {**fields, "stream": True}
    try:
        async with asyncio.timeout(60), ring_api.api.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                lines.append(line)
                # The same line may have been sent several times by now.
                if is_held and held.search(line):
                    is_held = False
                    (reading,) = sessions_of(ring_api.coordinator).prefill
                    assert reading.read == HELD < reading.prompt
                    gate.open()
    finally:
        gate.open()
    assert sessions_of(ring_api.coordinator).prefill == ()
    return lines


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": MESSAGES, "max_tokens": 3}),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 3}),
        ("/v1/responses", {"input": TEXT, "max_output_tokens": 3}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3}),
    ],
)
async def test_comments_tell_how_much_was_read(ring_api: RingApi, path: str, fields: dict[str, Any]) -> None:
    lines = await streamed(ring_api, path, fields, re.compile(f"^: prefill {HELD}/"))
    first = next(index for index, line in enumerate(lines) if line.startswith("data"))
    found = [match for line in lines[:first] if (match := COMMENT.fullmatch(line))]
    read = [int(match[1]) for match in found]
    assert read == sorted(read)
    assert HELD in read
    assert len({match[2] for match in found}) == 1
    assert int(found[0][2]) > 300
    assert not [line for line in lines[first:] if COMMENT.fullmatch(line)]


async def test_progress_comes_as_events_where_it_is_asked_for(ring_api: RingApi) -> None:
    fields = {"messages": MESSAGES, "max_tokens": 3, "return_progress": True}
    fields["stream_options"] = {"include_usage": True}
    lines = await streamed(ring_api, CHAT, fields, re.compile(f'"processed": {HELD}'))
    assert not [line for line in lines if COMMENT.fullmatch(line)]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    events: list[dict[str, Any]] = [json.loads(line) for line in data]
    told = [event for event in events if "prompt_progress" in event]
    assert {event["prompt_progress"]["total"] for event in told} == {events[-1]["usage"]["prompt_tokens"]}
    assert told[-1]["prompt_progress"]["processed"] >= HELD
    assert told[-1]["prompt_progress"]["cache"] == 0
    assert told[-1]["prompt_progress"]["time_ms"] >= 0
    assert told[0]["choices"] == [
        {"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert lines[-2:] == ["data: [DONE]", ""]


async def test_what_a_cache_holds_counts_as_read(ring_api: RingApi) -> None:
    asked = {"prompt": TEXT, "max_tokens": 1}
    assert (await ring_api.api.http.post("/v1/completions", json=asked)).status_code == 200
    gate = Gate(0)
    ring_api.runtimes[0].on_decode = gate
    fields = {"prompt": TEXT + "and goodbye", "max_tokens": 1, "stream": True, "return_progress": True}
    try:
        async with (
            asyncio.timeout(60),
            ring_api.api.http.stream("POST", "/v1/completions", json=fields) as response,
        ):
            async for line in response.aiter_lines():
                if "prompt_progress" in line:
                    progress = json.loads(line.removeprefix("data: "))["prompt_progress"]
                    assert progress["processed"] == progress["cache"] > 290
                    assert progress["total"] > progress["cache"]
                    gate.open()
    finally:
        gate.open()


async def test_progress_is_told_of_the_choice_whose_prompt_is_read(ring_api: RingApi) -> None:
    turns = threading.Semaphore(0)

    def hold(spans: Sequence[Span]) -> None:
        # Answers begin further behind.
        if any(span.start == HELD for span in spans):
            assert turns.acquire(timeout=60)

    ring_api.runtimes[1].on_decode = hold
    fields = {"prompt": [TEXT, "Other " * 300], "max_tokens": 3, "stream": True, "return_progress": True}
    told: list[tuple[int, bool]] = []
    let_go: set[int] = set()
    try:
        async with (
            asyncio.timeout(60),
            ring_api.api.http.stream("POST", "/v1/completions", json=fields) as response,
        ):
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                (choice,) = event["choices"]
                index, progress = choice["index"], event.get("prompt_progress")
                told.append((index, progress is not None))
                if progress is not None and progress["processed"] == HELD and index not in let_go:
                    let_go.add(index)
                    turns.release()
    finally:
        turns.release(2)
    for index in (0, 1):
        is_progress = [is_it for each, is_it in told if each == index]
        begun = is_progress.index(False)
        assert begun > 0
        assert not any(is_progress[begun:])


async def test_a_comment_that_waits_for_its_turn_tells_what_is_so_then() -> None:
    comment, sent = [b"too early"], list[bytes]()
    goes_on = asyncio.Event()

    async def send(message: MutableMapping[str, Any]) -> None:
        if message.get("body") == b"first":
            # A reader that takes its time.
            await goes_on.wait()
        sent.append(message.get("body", b""))

    async def receive() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def produce(emit: Callable[[bytes], Awaitable[None]]) -> None:
        emitting = asyncio.ensure_future(emit(b"first"))
        # By now the comment waits behind it.
        await asyncio.sleep(0.2)
        comment[0] = b"in time"
        goes_on.set()
        await emitting
        async with asyncio.timeout(10):
            while b"in time" not in sent:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    stream = EventStream(Source(produce, lambda: comment[0]), asyncio.Event(), 0.01)
    await stream({"type": "http"}, receive, send)
    assert b"too early" not in sent
    assert sent[1] == b"first"


async def test_comments_of_a_stream_whose_model_was_loaded_first_are_its_own() -> None:
    sent: list[bytes] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def until_sent(body: bytes) -> None:
        async with asyncio.timeout(10):
            while body not in sent:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def produce(emit: Callable[[bytes], Awaitable[None]]) -> None:
        await until_sent(b": prefill 3/9 tokens\n\n")
        await emit(b"data: 1\n\n")

    async def make() -> EventStream:
        source = Source(produce, lambda: b": prefill 3/9 tokens\n\n")
        return EventStream(source, asyncio.Event(), 0.01)

    stream = DelayedStream(make, OPENAI_STREAM, asyncio.Event(), 0.01)
    await stream({"type": "http"}, receive, send)
    assert b"data: 1\n\n" in sent
