"""Clients that leave: in the line, in prefill, in mid-answer. What was theirs is free at once, everywhere."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from mesh.coordinator.prefill_pace import _MOST_IN_FLIGHT
from mesh.text.tokenizer import Tokenizer
from stages.runtime.spans import Span
from tests.support import api_harness
from tests.support.fake_stage import FakeRuntime
from tests.support.raw_client import RawClient, request_bytes
from tests.support.ring_api import CHAT, RingApi, running_ring_api
from tests.support.status_parts import sessions_of

pytestmark = pytest.mark.model

tokenizer = api_harness.tokenizer

LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello " * 40}],
    "max_tokens": 400,
    "ignore_eos": True,
    "temperature": 0,
}
# Position at which a stage is held: not in the first chunk, and long before the end of a long prompt.
HELD = 32
SHORT = {**LONG, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}


@pytest.fixture
async def ring_api(tokenizer: Tokenizer) -> AsyncIterator[RingApi]:
    async with running_ring_api(tokenizer, num_slots=1) as running:
        yield running


class Gate:
    """Holds a stage before it computes rows from a position on."""

    def __init__(self, position: int) -> None:
        self._position = position
        self._open = threading.Event()
        self._reached = threading.Event()

    def __call__(self, spans: Sequence[Span]) -> None:
        if any(span.start >= self._position for span in spans):
            self._reached.set()
            assert self._open.wait(60)

    async def is_reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, 10)

    def open(self) -> None:
        self._open.set()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("position", [16, 90], ids=["in prefill", "in mid-answer"])
@pytest.mark.parametrize("stage", [0, 1])
async def test_a_session_is_gone_while_a_stage_still_computes(
    ring_api: RingApi, *, stream: bool, position: int, stage: int
) -> None:
    gate = Gate(position)
    ring_api.runtimes[stage].on_decode = gate
    client = await RawClient.connect(ring_api.api)
    await client.send(request_bytes({**LONG, "stream": stream}))
    await gate.is_reached()
    assert sessions_of(ring_api.coordinator).running == 1
    client.hang_up()
    try:
        await ring_api.is_idle()
    finally:
        gate.open()
    assert (await ring_api.api.http.post(CHAT, json=SHORT)).status_code == 200
    assert not ring_api.coordinator._sessions


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stage", [0, 1])
async def test_of_a_long_prompt_no_stage_computes_more_than_the_chunk_that_it_is_at(
    ring_api: RingApi, *, stream: bool, stage: int
) -> None:
    gate = Gate(HELD)
    computed: tuple[list[int], list[int]] = ([], [])

    def watched(index: int) -> Callable[[Sequence[Span]], None]:
        def on_decode(spans: Sequence[Span]) -> None:
            computed[index].extend(span.start for span in spans)
            if index == stage:
                gate(spans)

        return on_decode

    for index, runtime in enumerate(ring_api.runtimes):
        runtime.on_decode = watched(index)
    client = await RawClient.connect(ring_api.api)
    long = {**LONG, "messages": [{"role": "user", "content": "Hello " * 300}], "stream": stream}
    await client.send(request_bytes(long))
    await gate.is_reached()
    client.hang_up()
    try:
        await ring_api.is_idle()
        before = [len(starts) for starts in computed]
    finally:
        gate.open()
    for each in ring_api.stages:
        await each.service._engine.drained()
    # The one that was held has ended; chunks that waited behind it are dropped, there and at the other stage.
    assert len(computed[stage]) == before[stage]
    assert len(computed[1 - stage]) <= before[1 - stage] + 1
    assert max(*computed[0], *computed[1]) < HELD + _MOST_IN_FLIGHT * FakeRuntime.max_rows


@pytest.mark.parametrize("stream", [True, False])
async def test_a_place_in_the_line_is_given_up(ring_api: RingApi, *, stream: bool) -> None:
    gate = Gate(0)
    ring_api.runtimes[0].on_decode = gate
    running = await RawClient.connect(ring_api.api)
    await running.send(request_bytes(LONG))
    await gate.is_reached()
    waiting = await RawClient.connect(ring_api.api)
    await waiting.send(request_bytes({**LONG, "stream": stream}))
    coordinator = ring_api.coordinator
    async with asyncio.timeout(20):
        while sessions_of(coordinator).waiting != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    waiting.hang_up()
    try:
        async with asyncio.timeout(20):
            while sessions_of(coordinator).waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert sessions_of(coordinator).running == 1
        running.hang_up()
        await ring_api.is_idle()
    finally:
        gate.open()
    assert (await ring_api.api.http.post(CHAT, json=SHORT)).status_code == 200


async def test_prompts_of_one_request_leave_the_line_together(ring_api: RingApi) -> None:
    gate = Gate(0)
    ring_api.runtimes[0].on_decode = gate
    client = await RawClient.connect(ring_api.api)
    await client.send(request_bytes({"prompt": ["Hello"] * 20, "max_tokens": 400}, path="/v1/completions"))
    await gate.is_reached()
    assert sessions_of(ring_api.coordinator).waiting == 7
    client.hang_up()
    try:
        await ring_api.is_idle()
    finally:
        gate.open()
