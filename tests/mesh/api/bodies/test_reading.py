"""Bodies on their way in: memory by key, slow senders, refused bodies, and the process that parses."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from mesh.api import bodies
from mesh.api.api_keys import ApiKeys, KeyRecord, digest_of
from mesh.api.bodies import BodyBudget
from mesh.text.tokenizer import Tokenizer
from mesh.util import worker_pool
from mesh.util.worker_pool import WorkerPool
from tests.support import api_harness
from tests.support.api_harness import KEY, Api, ScriptedEngine, running_api
from tests.support.raw_client import RawClient, request_bytes
from tests.support.ring_api import CHAT

pytestmark = pytest.mark.model

tokenizer = api_harness.tokenizer

ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}
# So large that another process parses it, and so small that it is sent without being read.
LARGE = {**ASKED, "more": "a" * 100_000}
BODY_BYTES = 2**20 + 64 * 256
OTHER_KEY = "sk-of-bob"
ALICE = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> BodyBudget:
    """Room for one body of each key that is not empty, and for two in all."""
    found = BodyBudget(body_bytes=lambda: BODY_BYTES, client_bodies=1, total_bodies=2)
    monkeypatch.setattr("mesh.api.app.BodyBudget", lambda **_given: found)
    return found


@pytest.fixture
async def api(tokenizer: Tokenizer, budget: BodyBudget) -> AsyncIterator[Api]:
    keys = ApiKeys([KeyRecord("alice", digest_of(KEY)), KeyRecord("bob", digest_of(OTHER_KEY))])
    async with running_api(ScriptedEngine([(300,)]), tokenizer, keys=keys) as found:
        yield found


async def begun(api: Api, budget: BodyBudget, key: str = KEY) -> tuple[RawClient, bytes]:
    """A request whose body has arrived but for its end, and that end."""
    before = budget.num_bytes
    client, data = await RawClient.connect(api), request_bytes(LARGE, key=key)
    await client.send(data[:-1000])
    async with asyncio.timeout(20):
        while budget.num_bytes == before:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return client, data[-1000:]


async def test_a_large_body_is_answered_like_a_small_one(api: Api, budget: BodyBudget) -> None:
    with capture_logs() as logs:
        answers = [await api.http.post(CHAT, json=fields, headers=ALICE) for fields in (ASKED, LARGE)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert [log["field"] for log in logs if log["event"] == "unknown_field_ignored"] == ["more"]
    assert budget.num_bytes == 0


async def test_a_large_body_is_read_and_handed_over_at_a_rate(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "_UNPACED_BYTES", 0)
    monkeypatch.setattr(worker_pool, "_MOST_BYTES_PER_S", 2**21)
    # The first one waits for its process.
    for more in (LARGE["more"], "a" * 2**19):
        begun_s = time.monotonic()
        answer = await api.http.post(CHAT, json={**ASKED, "more": more}, headers=ALICE)
        assert answer.status_code == 200
    # Each of both takes a quarter of a second.
    assert time.monotonic() - begun_s > 0.45


async def test_an_error_of_a_large_body_names_its_field(api: Api) -> None:
    wrong = {**LARGE, "messages": [{"role": "user", "content": [{"type": "image"}]}]}
    answer = await api.http.post(CHAT, json=wrong, headers=ALICE)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content")


async def test_a_body_that_ends_its_process_is_refused(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = WorkerPool(
        "mesh.api.body_worker", num_workers=1, cpu_limit_s=0.001, wall_limit_s=60, memory_bytes=2**30
    )
    monkeypatch.setattr(bodies, "shared_body_pool", lambda: pool)
    try:
        answer = await api.http.post(CHAT, json={**ASKED, "more": [0] * 16_000}, headers=ALICE)
    finally:
        pool.close()
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the body took more than 0.001 s of computing: send less"


async def test_a_body_waits_for_others_of_its_key_and_not_for_those_of_others(
    api: Api, budget: BodyBudget
) -> None:
    first, rest = await begun(api, budget)
    second = asyncio.create_task(api.http.post(CHAT, json=LARGE, headers=ALICE))
    other = await api.http.post(CHAT, json=LARGE, headers={"authorization": f"Bearer {OTHER_KEY}"})
    assert other.status_code == 200
    assert budget.is_wanted
    assert not second.done()
    await first.send(rest)
    assert (await first.read_until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert (await second).status_code == 200
    assert budget.num_bytes == 0
    first.hang_up()


async def test_a_hang_up_makes_room_at_once(api: Api, budget: BodyBudget) -> None:
    first, _ = await begun(api, budget)
    second = asyncio.create_task(api.http.post(CHAT, json=LARGE, headers=ALICE))
    first.hang_up()
    assert (await second).status_code == 200


async def test_a_body_that_stays_away_is_given_up_once_another_one_waits(
    api: Api, budget: BodyBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_START_S", 0.01)
    monkeypatch.setattr(bodies, "_LOOK_AGAIN_S", 0.01)
    first, _ = await begun(api, budget)
    # More than its time; but it waits alone.
    await asyncio.sleep(0.1)
    assert budget.num_bytes > 0
    assert (await api.http.post(CHAT, json=LARGE, headers=ALICE)).status_code == 200
    head = await first.read_until(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 429")
    assert b"retry-after: 5" in head.lower()
    first.hang_up()


async def test_a_client_that_asks_first_is_told_to_go_on_when_there_is_room(
    api: Api, budget: BodyBudget
) -> None:
    first, rest = await begun(api, budget)
    asking = await RawClient.connect(api)
    head, _, body = request_bytes(LARGE, key=KEY).partition(b"\r\n\r\n")
    await asking.send(head + b"\r\nExpect: 100-continue\r\n\r\n")
    async with asyncio.timeout(20):
        while not budget.is_wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    told = asyncio.create_task(asking.read())
    await asyncio.sleep(0.05)
    assert not told.done()
    await first.send(rest)
    assert (await told).startswith(b"HTTP/1.1 100")
    await asking.send(body)
    assert (await asking.read_until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    for client in (first, asking):
        client.hang_up()


async def test_a_body_of_unknown_length_counts_as_the_largest_until_it_is_there(
    api: Api, budget: BodyBudget
) -> None:
    data = json.dumps(LARGE).encode()
    client = await RawClient.connect(api)
    head = request_bytes({}, key=KEY).partition(b"Content-Length")[0]
    await client.send(head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(data) + data)
    async with asyncio.timeout(20):
        while not budget.num_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert budget.num_bytes == BODY_BYTES
    await client.send(b"\r\n0\r\n\r\n")
    assert (await client.read_until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    client.hang_up()


@pytest.mark.parametrize("head", ["Content-Length: 99999999", "Transfer-Encoding: chunked"])
async def test_the_body_of_a_refused_request_is_left_unread(api: Api, budget: BodyBudget, head: str) -> None:
    client = await RawClient.connect(api)
    start = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{head}\r\n\r\n"
    await client.send(start.encode())
    assert (await client.read_until(b"}")).startswith(b"HTTP/1.1 401")
    part = b"ffff\r\n" + b"a" * 0xFFFF + b"\r\n"
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        # The kernel's buffers take some of it.
        await client.send(part * 1000)
    assert budget.num_bytes == 0
    client.hang_up()
