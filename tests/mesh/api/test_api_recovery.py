"""What clients see while a lost stage is replaced, and when none can be."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from mesh.api.api_keys import ApiKeys
from mesh.coordinator.coordinator import Coordinator
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import ModelDoesNotFit
from tests.support import api_harness
from tests.support.api_harness import Api, ScriptedEngine, running_api
from tests.support.fake_stage import FakeRuntime
from tests.support.ring_harness import RunningStage, running_coordinator, running_services

pytestmark = pytest.mark.model
CHAT = "/v1/chat/completions"
BODY: Any = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}

tokenizer = api_harness.tokenizer


@dataclass
class Repairable:
    api: Api
    coordinator: Coordinator
    stages: list[RunningStage]

    async def repair(self) -> None:
        first, second = self.stages
        for index, stage in enumerate(self.stages):
            await stage.service.rejoin(index, "next", "next key", 0)
        await first.service.connect(second.address.address)
        await self.coordinator.reconnect([first.address, second.address], "next", "next key")


@pytest.fixture
async def mesh(tokenizer: Tokenizer) -> AsyncIterator[Repairable]:
    runtimes = [FakeRuntime(index, 2, n_vocab=tokenizer.n_vocab, ctx_size=256) for index in range(2)]
    async with (
        running_services(runtimes) as stages,
        running_coordinator(
            stages,
            context_length=256,
            num_slots=4,
            max_rows=FakeRuntime.max_rows,
            n_vocab=tokenizer.n_vocab,
            repair_wait_s=0.2,
        ) as coordinator,
        running_api(
            coordinator,
            tokenizer,
            ping_interval_s=0.1,
            is_whole=lambda: coordinator.is_ready,
            refusal=lambda: coordinator.refusal,
        ) as api,
    ):
        yield Repairable(api, coordinator, stages)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_that_waits_too_long_gets_503_even_if_it_asked_for_a_stream(
    mesh: Repairable, *, is_stream: bool
) -> None:
    mesh.coordinator.pause("a test")
    response = await mesh.api.http.post(CHAT, json={**BODY, "stream": is_stream})
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert response.json()["error"]["code"] == "stage_failed"


async def test_a_stream_is_kept_alive_by_comments_and_goes_on(mesh: Repairable) -> None:
    undisturbed = (await mesh.api.http.post(CHAT, json={**BODY, "max_tokens": 100, "stream": True})).text
    lines = []
    async with mesh.api.http.stream(
        "POST", CHAT, json={**BODY, "max_tokens": 100, "stream": True}
    ) as response:
        async for line in response.aiter_lines():
            lines.append(line)
            if len(lines) == 10:
                mesh.coordinator.pause("a test")
            elif line.startswith(":") and sum(each.startswith(":") for each in lines) == 3:
                await mesh.repair()
    assert lines[-2] == "data: [DONE]"
    assert said(lines) == said(undisturbed.split("\n")) != ""


def said(lines: list[str]) -> str:
    """What a stream said, without ids and times."""
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


async def test_without_a_key_health_tells_no_reason(tokenizer: Tokenizer) -> None:
    reason = ModelDoesNotFit("layers [1, 2) need 3 GB, 2 GB of attic are free: join a host", retry_after_s=7)
    keys = ApiKeys.from_plain({"alice": "sk-alice"})
    async with running_api(ScriptedEngine([]), tokenizer, keys=keys, refusal=lambda: reason) as api:
        for headers in ({}, {"authorization": "Bearer sk-alice"}):
            response = await api.http.get("/health", headers=headers)
            assert (response.status_code, response.headers["retry-after"]) == (503, "7")
            assert "/mesh/status" in response.json()["error"]["message"]
            assert not any(word in response.text for word in ("layers", "GB", "attic", "host"))


async def test_when_no_host_can_take_the_layers_everybody_is_told_so(mesh: Repairable) -> None:
    stream = asyncio.create_task(mesh.api.http.post(CHAT, json={**BODY, "max_tokens": 200, "stream": True}))
    async with asyncio.timeout(10):
        while mesh.coordinator.status().stages[1].windows < 4:  # noqa: ASYNC110
            await asyncio.sleep(0)
    mesh.coordinator.give_up(ModelDoesNotFit("layers [1, 2) need 3 GB, 2 GB are free: join a host"))
    last = (await stream).text.strip().split("\n")[-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["message"] == "layers [1, 2) need 3 GB, 2 GB are free: join a host"
    for path in ("/health", CHAT):
        response = await mesh.api.http.request("POST" if path == CHAT else "GET", path, json=BODY)
        assert (response.status_code, response.headers["retry-after"]) == (503, "10")
        assert "layers [1, 2) need 3 GB" in response.text
    await mesh.repair()
    assert (await mesh.api.http.post(CHAT, json=BODY)).status_code == 200
