"""How many answers of one API key may be under way at once; what is over counts no more, however it ended."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import openai
import pytest

from mesh.api.api_keys import ApiKeys, KeyRecord, add_key, digest_of
from mesh.engine import Committed, GenerationStats
from spanmesh_proto.errors import Overloaded, StageFailed
from tests.support import api_harness
from tests.support.api_harness import KEY, MODEL, Api, ScriptedEngine, backend_of, running_api
from tests.support.raw_client import RawClient, request_bytes
from tests.support.ring_api import CHAT, running_ring_api
from tests.support.status_parts import sessions_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping
    from pathlib import Path

    import httpx

    from mesh.engine import GenerationRequest
    from mesh.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

tokenizer = api_harness.tokenizer

COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
BOBS = "sk-of-bob"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20},
    COMPLETIONS: {"prompt": "Hello", "max_tokens": 20},
    RESPONSES: {"input": "Hello", "max_output_tokens": 20},
}


@dataclass
class GatedEngine:
    """Says a token, then waits until it is let, then ends."""

    context_length: int = 64
    num_running: int = 0
    most_running: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, _request: GenerationRequest) -> AsyncGenerator[Committed, None]:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            yield Committed((300,), None, GenerationStats())
            await self.gate.wait()
            yield Committed((301,), "length", GenerationStats())
        finally:
            self.num_running -= 1

    async def runs(self, number: int) -> None:
        async with asyncio.timeout(20):
            while self.num_running != number:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


def keys_of(alice: int | None = None, **settings: Any) -> ApiKeys:
    return ApiKeys(
        [
            KeyRecord("alice", digest_of(KEY), max_concurrent=alice, **settings),
            KeyRecord("bob", digest_of(BOBS)),
        ]
    )


async def post(
    api: Api, path: str = CHAT, fields: Mapping[str, Any] | None = None, key: str = KEY
) -> httpx.Response:
    body = {**BODIES[path], **(fields or {})}
    return await api.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})


@asynccontextmanager
async def under_way(api: Api, engine: GatedEngine, number: int, **fields: Any) -> AsyncIterator[None]:
    """So many requests run; they end, well, with the block."""
    asking = [asyncio.create_task(post(api, fields=fields)) for _ in range(number)]
    await engine.runs(engine.num_running + number)
    yield
    engine.gate.set()
    assert [response.status_code for response in await asyncio.gather(*asking)] == [200] * number


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_one_more_than_allowed_is_told_to_come_back(
    tokenizer: Tokenizer, path: str, *, is_streamed: bool
) -> None:
    engine = GatedEngine()
    async with running_api(engine, tokenizer, keys=keys_of(2), num_slots=8) as api:
        async with under_way(api, engine, 2, stream=is_streamed):
            refused = await post(api, path, {"stream": is_streamed})
            assert refused.status_code == 429
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert "the API key alice may have 2 concurrent answers and has 2" in error["message"]
            assert "`mesh keys add --concurrent N`" in error["message"]
            assert int(refused.headers["retry-after"]) == 5
            assert engine.most_running == 2
            engine.gate.set()
            # It is nothing to the other key, which has its own.
            assert (await post(api, path, key=BOBS)).status_code == 200
        assert (await post(api, path, {"stream": is_streamed})).status_code == 200


@pytest.mark.parametrize(("num_slots", "most"), [(4, 3), (2, 1), (1, 1)])
async def test_all_slots_but_one_unless_given(tokenizer: Tokenizer, num_slots: int, most: int) -> None:
    engine = GatedEngine()
    async with (
        running_api(engine, tokenizer, keys=keys_of(), num_slots=num_slots) as api,
        under_way(api, engine, most),
    ):
        refused = await post(api)
        assert refused.status_code == 429
        said = refused.json()["error"]["message"]
        assert f"may have {most} concurrent answers" in said
        assert ("every slot of smollm2 but one" in said) is (most > 1)


async def test_a_server_without_keys_has_no_such_limit(tokenizer: Tokenizer) -> None:
    engine = GatedEngine()
    async with running_api(engine, tokenizer, num_slots=2) as api, under_way(api, engine, 5):
        assert engine.most_running == 5


async def test_more_than_there_are_slots_may_wait_if_the_key_says_so(tokenizer: Tokenizer) -> None:
    async with running_ring_api(tokenizer, num_slots=2, keys=keys_of(8)) as running:
        found = await asyncio.gather(*(post(running.api) for _ in range(8)))
        assert [response.status_code for response in found] == [200] * 8


async def test_each_model_has_slots_of_its_own_and_a_number_counts_for_all(tokenizer: Tokenizer) -> None:
    for given, num_taken in ((None, 0), (3, 3)):
        engine, other = GatedEngine(), GatedEngine()
        async with running_api(engine, tokenizer, keys=keys_of(given), num_slots=4) as api:
            assert api.backends is not None
            api.backends.add(beside(api, other, tokenizer, num_slots=3))
            async with under_way(api, engine, 3):
                assert (await post(api)).status_code == 429
                if num_taken:
                    assert (await post(api, fields={"model": "other"})).status_code == 429
                else:
                    async with under_way(api, other, 2, model="other"):
                        refused = await post(api, fields={"model": "other"})
                        assert refused.status_code == 429
                        assert "every slot of other but one" in refused.json()["error"]["message"]


def beside(api: Api, engine: GatedEngine, tokenizer: Tokenizer, *, num_slots: int) -> Any:
    assert api.backends is not None
    return backend_of(engine, tokenizer, api=api.backends.first.api, model_id="other", num_slots=num_slots)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_several_choices_run_in_the_places_that_there_are(
    tokenizer: Tokenizer, *, is_streamed: bool
) -> None:
    engine = GatedEngine()
    fields = {"n": 8, "stream": is_streamed, "cache_prompt": False}
    async with running_api(engine, tokenizer, keys=keys_of(3), num_slots=8) as api:
        async with under_way(api, engine, 1):
            asking = asyncio.create_task(post(api, fields=fields))
            await engine.runs(3)
            assert (await post(api)).status_code == 429
        response = await asking
        assert response.status_code == 200
        if not is_streamed:
            assert len(response.json()["choices"]) == 8
        assert engine.most_running == 3
        engine.gate.clear()
        async with under_way(api, engine, 3):
            assert (await post(api)).status_code == 429


async def test_choices_that_are_over_make_room(tokenizer: Tokenizer) -> None:
    lengths = iter([1, 1, 40])

    class Uneven(GatedEngine):
        async def generate(self, request: GenerationRequest) -> AsyncGenerator[Committed, None]:
            if next(lengths, 1) == 40:
                async with aclosing(super().generate(request)) as parts:
                    async for part in parts:
                        yield part
            else:
                yield Committed((300,), "length", GenerationStats())

    engine = Uneven()
    async with running_api(engine, tokenizer, keys=keys_of(3)) as api:
        asking = asyncio.create_task(post(api, fields={"n": 3, "cache_prompt": False}))
        await engine.runs(1)
        # Two of the three are over, though their request is not.
        assert [(await post(api)).status_code for _ in range(2)] == [200, 200]
        engine.gate.set()
        assert (await asking).status_code == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_hangs_up_counts_no_more(tokenizer: Tokenizer, path: str, *, is_streamed: bool) -> None:
    engine = GatedEngine()
    async with running_api(engine, tokenizer, keys=keys_of(1)) as api:
        for _ in range(3):
            client = await RawClient.connect(api)
            await client.send(request_bytes({**BODIES[path], "stream": is_streamed}, path, KEY))
            await engine.runs(1)
            assert (await post(api, path)).status_code == 429
            client.hang_up()
            await engine.runs(0)
        engine.gate.set()
        assert (await post(api, path)).status_code == 200


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    "steps", [[Overloaded("no room")], [(300,), StageFailed("gone")], [(300,), ValueError("a bug")], []]
)
async def test_what_fails_counts_no_more(
    tokenizer: Tokenizer, steps: list[Any], *, is_streamed: bool
) -> None:
    engine = ScriptedEngine(steps)
    async with running_api(engine, tokenizer, keys=keys_of(1)) as api:
        for _ in range(3):
            await post(api, fields={"stream": is_streamed})
        assert len(engine.requests) == 3
        engine.steps = [(300,)]
        assert (await post(api)).status_code == 200


async def test_what_is_refused_takes_no_place(tokenizer: Tokenizer) -> None:
    keys = keys_of(1, tokens_per_minute=80)
    async with running_api(ScriptedEngine([(300,)]), tokenizer, keys=keys, steady_s=lambda: 0.0) as api:
        assert (await post(api)).status_code == 200
        for _ in range(2):
            refused = await post(api)
            assert refused.status_code == 429
            assert "80 tokens a minute" in refused.json()["error"]["message"]
        assert (await post(api, fields={"max_tokens": "x"})).status_code == 400
        assert (await post(api, fields={"max_tokens": 1})).status_code == 200


async def test_it_is_told_to_come_back_when_one_is_likely_to_be_over(tokenizer: Tokenizer) -> None:
    now_s, engine = 100.0, GatedEngine()
    async with running_api(engine, tokenizer, keys=keys_of(2), steady_s=lambda: now_s) as api:
        async with under_way(api, engine, 2):
            now_s += 31.0
        engine.gate.clear()
        async with under_way(api, engine, 2):
            # Two that take 31 s each: one of them is over every 15.5 s.
            assert (await post(api)).headers["retry-after"] == "16"


def _let(may_compute: threading.Event) -> None:
    assert may_compute.wait(60)


async def test_a_full_queue_tells_when_it_will_be_empty(tokenizer: Tokenizer) -> None:
    """By the limits of the answers that wait: short ones behind a long one are over sooner than that was."""
    now_s, may_compute = 100.0, threading.Event()

    async def ask(max_tokens: int) -> Any:
        return await ring_api.api.openai.completions.create(
            model=MODEL, prompt="Hello", max_tokens=max_tokens
        )

    async def refused_for_s(max_tokens: int) -> int:
        with pytest.raises(openai.RateLimitError, match=r"2 requests wait: try again in \d+ s") as refused:
            await ask(max_tokens)
        return int(refused.value.response.headers["retry-after"])

    def sessions() -> tuple[int, int]:
        counts = sessions_of(ring_api.coordinator)
        return counts.running, counts.waiting

    async def until(running: int, waiting: int) -> None:
        async with asyncio.timeout(20):
            while sessions() != (running, waiting):  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async with running_ring_api(tokenizer, num_slots=1, max_waiting=2, clock_s=lambda: now_s) as ring_api:
        ring_api.runtimes[0].on_decode = lambda _spans: _let(may_compute)
        try:
            for max_tokens, held_s in ((200, 8.0), (2, 1.0)):
                may_compute.clear()
                answer = asyncio.create_task(ask(max_tokens))
                await until(1, 0)
                now_s += held_s
                may_compute.set()
                await answer
            may_compute.clear()
            answers = [asyncio.create_task(ask(2)) for _ in range(3)]
            await until(1, 2)
            # A mean of all answers would say 22 s to both.
            assert (await refused_for_s(2), await refused_for_s(200)) == (3, 10)
        finally:
            may_compute.set()
        await asyncio.gather(*answers)
        assert await ask(2)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_as_many_clients_as_allowed_are_never_turned_away(
    tokenizer: Tokenizer, *, is_streamed: bool
) -> None:
    """The next request comes as soon as the answer before it has: by then that counts no more."""
    async with running_ring_api(tokenizer, num_slots=4, keys=keys_of(3)) as running:

        async def client() -> list[int]:
            return [
                (await post(running.api, fields={"stream": is_streamed, "max_tokens": 3})).status_code
                for _ in range(12)
            ]

        for statuses in await asyncio.gather(client(), client(), client()):
            assert statuses == [200] * 12


async def test_after_any_hang_ups_the_key_has_all_its_places(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    add_key(path, KeyRecord("alice", digest_of(KEY), max_concurrent=3))
    random = Random(7)
    async with running_ring_api(tokenizer, num_slots=3, keys=ApiKeys.from_file(path)) as running:

        async def flee(delay_s: float, fields: dict[str, Any]) -> None:
            client = await RawClient.connect(running.api)
            await client.send(request_bytes({**BODIES[CHAT], "max_tokens": 300, **fields}, CHAT, KEY))
            await asyncio.sleep(delay_s)
            client.hang_up()

        for _ in range(12):
            fields = {"stream": random.random() < 0.5, "n": random.choice([1, 1, 2, 5])}
            await asyncio.gather(
                *(flee(random.choice([0.0, 0.002, 0.02, 0.1]) * random.random(), fields) for _ in range(4))
            )
        # What fled last may not even have been read yet.
        async with asyncio.timeout(60):
            while True:
                await running.is_idle()
                found = await asyncio.gather(*(post(running.api) for _ in range(3)))
                if [response.status_code for response in found] == [200] * 3:
                    break
        assert json.loads(found[0].content)["usage"]["completion_tokens"] > 0
