"""What an API key may use: requests and tokens per minute, its time, its place in the file."""

import asyncio
import datetime as dt
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from mesh.api.api_keys import ApiKeys, KeyRecord, add_key, digest_of, remove_key
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import Overloaded, StageFailed
from tests.support import api_harness
from tests.support.api_harness import KEY, Api, ScriptedEngine, running_api
from tests.support.raw_client import RawClient, request_bytes

pytestmark = pytest.mark.model

tokenizer = api_harness.tokenizer

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}
HEADERS = {"authorization": f"Bearer {KEY}"}
NOW = dt.datetime(2026, 11, 21, tzinfo=dt.UTC)
OPEN_ENDED = KeyRecord("carol", digest_of("sk-of-carol"))


@dataclass
class Clock:
    """Stands still unless told."""

    steady_s: float = 1000.0
    unix_s: float = NOW.timestamp()


@dataclass
class Limited:
    api: Api
    clock: Clock
    engine: ScriptedEngine

    async def ask(self, **fields: object) -> int:
        return (await self.post(**fields)).status_code

    async def post(self, **fields: object) -> httpx.Response:
        return await self.api.http.post(CHAT, json={**ASKED, **fields}, headers=HEADERS)


@pytest.fixture
async def limited(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> AsyncIterator[Limited]:
    """An API that alice may use as far as the test's parameter says, with an engine that says 3 tokens."""
    clock, engine = Clock(), ScriptedEngine([(300,), (301, 302)])
    keys = ApiKeys([KeyRecord("alice", digest_of(KEY), **request.param)])
    async with running_api(
        engine, tokenizer, keys=keys, steady_s=lambda: clock.steady_s, now_s=lambda: clock.unix_s
    ) as api:
        yield Limited(api, clock, engine)


def limits(**settings: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("limited", [settings], indirect=True)


@limits(requests_per_minute=2)
async def test_requests_beyond_the_share_get_429_and_the_time_to_come_back(limited: Limited) -> None:
    first = await limited.post()
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"] == "30s"
    assert "x-ratelimit-limit-tokens" not in first.headers
    assert (await limited.api.http.get("/v1/models", headers=HEADERS)).status_code == 200
    refused = await limited.post()
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "2 requests a minute" in error["message"]
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(limited.engine.requests) == 1
    limited.clock.steady_s += int(refused.headers["retry-after"])
    assert await limited.ask() == 200


async def remaining(limited: Limited) -> int:
    response = await limited.api.http.get("/v1/models", headers=HEADERS)
    return int(response.headers["x-ratelimit-remaining-tokens"])


@limits(tokens_per_minute=200)
async def test_tokens_are_reserved_and_what_was_not_used_comes_back(limited: Limited) -> None:
    response = await limited.post()
    num_prompt = response.json()["usage"]["prompt_tokens"]
    assert response.json()["usage"]["completion_tokens"] == 3
    assert int(response.headers["x-ratelimit-remaining-tokens"]) == 200 - num_prompt - 20
    assert await remaining(limited) == 200 - num_prompt - 3
    streamed = await limited.post(stream=True)
    assert int(streamed.headers["x-ratelimit-limit-tokens"]) == 200
    assert await remaining(limited) == 200 - 2 * (num_prompt + 3)
    limited.clock.steady_s += 60
    assert await remaining(limited) == 200


@limits(tokens_per_minute=40)
async def test_more_than_the_share_waits_for_a_full_bucket_and_is_paid_off(limited: Limited) -> None:
    first = await limited.post()
    assert first.status_code == 200
    used = first.json()["usage"]["total_tokens"]
    refused = await limited.post()
    assert refused.status_code == 429
    assert "40 tokens a minute" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) == -(-used * 60 // 40)
    limited.clock.steady_s += int(refused.headers["retry-after"])
    assert await limited.ask() == 200


@limits(tokens_per_minute=1000)
async def test_what_the_engine_turns_away_costs_nothing(limited: Limited) -> None:
    limited.engine.steps = [Overloaded("no room")]
    assert await limited.ask() == 429
    assert await remaining(limited) == 1000
    limited.engine.steps = [(300,), StageFailed("gone")]
    assert await limited.ask() == 503
    assert await remaining(limited) < 1000


@limits(tokens_per_minute=1000)
async def test_who_hangs_up_pays_for_the_prompt(limited: Limited) -> None:
    limited.engine.steps = [60.0, (300,)]
    client = await RawClient.connect(limited.api)
    await client.send(request_bytes(ASKED, key=KEY))
    async with asyncio.timeout(20):
        while not limited.engine.num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        client.hang_up()
        await limited.engine.closed.wait()
        (asked,) = limited.engine.requests
        while await remaining(limited) != 1000 - len(asked.prompt):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@limits(expires_at=NOW + dt.timedelta(seconds=5))
async def test_a_key_stops_at_its_time(limited: Limited) -> None:
    assert await limited.ask() == 200
    limited.clock.unix_s += 5
    response = await limited.post()
    assert response.status_code == 401
    assert "alice has expired" in response.json()["error"]["message"]


async def test_a_key_that_is_removed_stops_at_the_next_request_of_an_open_connection(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    for name, key in (("alice", KEY), ("bob", "sk-of-bob")):
        add_key(path, KeyRecord(name, digest_of(key)))
    async with running_api(ScriptedEngine([(300,)]), tokenizer, keys=ApiKeys.from_file(path)) as api:
        assert (await api.http.get("/v1/models", headers=HEADERS)).status_code == 200
        with capture_logs() as events:
            remove_key(path, "alice")
            assert (await api.http.get("/v1/models", headers=HEADERS)).status_code == 401
        bobs = {"authorization": "Bearer sk-of-bob"}
        assert (await api.http.get("/v1/models", headers=bobs)).status_code == 200
    assert [event["names"] for event in events if event["event"] == "api_keys_changed"] == [["bob"]]


async def test_keys_do_not_share_their_shares(tokenizer: Tokenizer) -> None:
    keys = ApiKeys(
        [KeyRecord("alice", digest_of(KEY), 1), KeyRecord("bob", digest_of("sk-of-bob"), 1), OPEN_ENDED]
    )
    async with running_api(ScriptedEngine([(300,)]), tokenizer, keys=keys, steady_s=lambda: 0.0) as api:
        for key in (KEY, "sk-of-bob"):
            headers = {"authorization": f"Bearer {key}"}
            found = [(await api.http.get("/v1/models", headers=headers)).status_code for _ in range(2)]
            assert found == [200, 429]
        for _ in range(5):
            response = await api.http.get("/v1/models", headers={"authorization": "Bearer sk-of-carol"})
            assert response.status_code == 200
            assert not any(name.startswith("x-ratelimit") for name in response.headers)


@pytest.mark.parametrize("limited", [{"max_concurrent": 1}], indirect=True)
async def test_requests_that_count_tokens_have_places_of_their_own(limited: Limited) -> None:
    data = request_bytes({"prompt": "Hello"}, path="/tokenize", key=KEY)
    client = await RawClient.connect(limited.api)
    await client.send(data[:-1])

    async def count() -> httpx.Response:
        return await limited.api.http.post("/tokenize", json={"prompt": "Hello"}, headers=HEADERS)

    async with asyncio.timeout(20):
        while (refused := await count()).status_code == 200:
            pass
    assert refused.status_code == 429
    assert "1 requests at once that count tokens" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) > 0
    assert (await limited.post()).status_code == 200
    await client.send(data[-1:])
    assert (await client.read_until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert (await count()).status_code == 200
    client.hang_up()
