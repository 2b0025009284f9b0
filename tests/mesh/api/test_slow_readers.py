"""Readers that fall behind pause their own session and nothing else, and cannot pile anything up."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from uvicorn.server import ServerState

from mesh.api import http_server
from mesh.coordinator import session as outbox
from mesh.coordinator.session import Session
from mesh.engine import GenerationRequest
from mesh.text.tokenizer import Tokenizer
from speculative.controller import ControllerOptions
from speculative.lookup_proposers import NgramProposer
from stages.sampling.sampler import Sampler, SamplingParams
from tests.support import api_harness
from tests.support.fake_stage import FakeRuntime, plain_answer
from tests.support.proposers import Oracle, Parrot
from tests.support.raw_client import RawClient, events_of, request_bytes
from tests.support.ring_api import CHAT, RingApi, running_ring_api
from tests.support.ring_harness import collect, running_coordinator
from tests.support.searches import search
from tests.support.shared_ring import SharedRing, shared_ring
from tests.support.status_parts import sessions_of

ring, tokenizer = shared_ring, api_harness.tokenizer

PROMPT = tuple(range(3, 23))
MAX_UNREAD = 8
MAX_UNDER_WAY = 40


@pytest.fixture(autouse=True, scope="module")
def short_patience() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outbox, "MAX_UNREAD_TOKENS", MAX_UNREAD)
        yield


async def read_in_bursts(
    ring: SharedRing, request: GenerationRequest, make: Any, bursts: list[int]
) -> list[int]:
    """Read so many parts, let everybody else work for a while, and again."""
    async with running_coordinator(
        ring.stages,
        context_length=128,
        num_slots=2,
        make_proposer=make,
        controller=ControllerOptions(fixed_width=3, fixed_depth=4) if make is Parrot else ControllerOptions(),
        max_rows=FakeRuntime.max_rows,
        n_vocab=64,
    ) as coordinator:
        tokens: list[int] = []
        turns = itertools.cycle(bursts)
        left = next(turns)
        async for part in coordinator.generate(request):
            tokens.extend(part.tokens)
            left -= 1
            if left <= 0:
                await asyncio.sleep(0.02)
                left = next(turns)
        return tokens


@search(few=6, many=15)
@given(
    prompt=st.lists(st.integers(0, 63), min_size=1, max_size=20),
    num_tokens=st.integers(20, 60),
    proposer=st.sampled_from(["off", "oracle", "ngram", "parrot"]),
    errs=st.lists(st.sampled_from([False, False, True]), min_size=1, max_size=12),
    bursts=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    sampling=st.sampled_from([SamplingParams(), SamplingParams(1.0, seed=5)]),
)
def test_one_text_however_it_is_read(
    ring: SharedRing,
    *,
    prompt: list[int],
    num_tokens: int,
    proposer: str,
    errs: list[bool],
    bursts: list[int],
    sampling: SamplingParams,
) -> None:
    expected = plain_answer(prompt, num_tokens, Sampler(sampling).sample)
    make = {
        "off": None,
        "oracle": lambda: Oracle([*prompt, *expected], errs),
        "ngram": NgramProposer,
        "parrot": Parrot,
    }[proposer]
    request = GenerationRequest(tuple(prompt), num_tokens, sampling=sampling)
    assert ring.runner.run(read_in_bursts(ring, request, make, bursts)) == expected


async def at_rest(session: Session) -> None:
    """Wait until a session is paused and all its windows are home."""
    async with asyncio.timeout(10):
        while not (session.is_paused and not session._in_flight_windows):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        # What came home last is told one turn of the loop later.
        await asyncio.sleep(0)


@pytest.mark.parametrize("speculates", [False, True])
def test_a_session_that_is_not_read_pauses_and_leaves_the_ring_to_others(
    ring: SharedRing, *, speculates: bool
) -> None:
    num_tokens = 90
    expected = plain_answer(PROMPT, num_tokens, Sampler(SamplingParams()).sample)
    other = plain_answer((5,), num_tokens, Sampler(SamplingParams()).sample)

    async def run() -> None:
        async with running_coordinator(
            ring.stages,
            context_length=128,
            num_slots=2,
            make_proposer=(lambda: Oracle([*PROMPT, *expected])) if speculates else None,
            controller=ControllerOptions(fixed_width=3, fixed_depth=4),
            max_rows=FakeRuntime.max_rows,
            n_vocab=64,
        ) as coordinator:
            parts = coordinator.generate(GenerationRequest(PROMPT, num_tokens))
            tokens = [*(await anext(parts)).tokens]
            (session,) = coordinator._sessions.values()
            await at_rest(session)
            unread = session._output_queue._num_tokens
            assert MAX_UNREAD <= unread < MAX_UNREAD + 4 * 4
            before = (await coordinator._ring.stats())[-1].num_windows
            if not speculates:
                text, last = await collect(coordinator, GenerationRequest((5,), num_tokens))
                assert text == other
                # Whatever the stages computed meanwhile was the other's.
                after = (await coordinator._ring.stats())[-1].num_windows
                assert after - before == last.stats.num_windows + 1
            assert session._output_queue._num_tokens == unread
            assert coordinator._num_moving() == 0
            tokens += [token for part in [part async for part in parts] for token in part.tokens]
            assert tokens == expected

    ring.runner.run(run())


@pytest.fixture
async def ring_api(tokenizer: Tokenizer) -> AsyncIterator[RingApi]:
    async with running_ring_api(tokenizer) as running:
        yield running


# Each token brings its twenty likeliest, so that a few dozen fill every buffer on the way.
LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "stream": True, "max_tokens": 300, "ignore_eos": True, "temperature": 1, "seed": 4,
    "logprobs": True, "top_logprobs": 20, "return_token_ids": True,
}  # fmt: skip
SHORT: dict[str, Any] = {**LONG, "stream": False, "max_tokens": 20}


async def stalled(running: RingApi) -> tuple[RawClient, Session]:
    """A client that reads no more than the head of its answer, and its session at rest."""
    client = await RawClient.connect(running.api)
    await client.send(request_bytes(LONG))
    await client.read(100)
    async with asyncio.timeout(20):
        while not running.coordinator._sessions:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    (session,) = running.coordinator._sessions.values()
    await at_rest(session)
    return client, session


@pytest.mark.model
async def test_a_client_that_reads_on_gets_the_same_answer(ring_api: RingApi) -> None:
    whole = (await ring_api.api.http.post(CHAT, json={**LONG, "stream": False})).json()
    client, session = await stalled(ring_api)
    assert session._generation.position < CONTEXT_SHARE
    counts = sessions_of(ring_api.coordinator)
    assert (counts.running, counts.paused) == (1, 1)
    # Nobody else notices.
    other = await ring_api.api.http.post(CHAT, json=SHORT)
    assert other.json()["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"][:20]
    events = events_of(await client.read_until(b"[DONE]"))
    client.hang_up()
    ids = [token for event in events for choice in event["choices"] for token in choice.get("token_ids", ())]
    assert ids == whole["choices"][0]["token_ids"]
    await ring_api.is_idle()


# Of 300 tokens those that fit the buffers, and then no more.
CONTEXT_SHARE = 250


@pytest.mark.model
async def test_a_client_that_never_reads_on_is_cut_off(tokenizer: Tokenizer) -> None:
    async with running_ring_api(tokenizer, patience_s=0.3) as ring_api:
        with capture_logs() as events:
            client, _session = await stalled(ring_api)
            await ring_api.is_idle()
        (cut,) = [event for event in events if event["event"] == "reader_cut_off"]
        assert "did not read" in cut["reason"]
        assert cut["unread_bytes"] > 0
        client.hang_up()
        assert (await ring_api.api.http.post(CHAT, json=SHORT)).status_code == 200


class Clock:
    """What a connection needs of an event loop: times at which something is called."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._due: dict[asyncio.TimerHandle, None] = {}

    def time(self) -> float:
        return self._now_s

    def call_later(self, delay_s: float, call: Any, *args: Any) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(self._now_s + delay_s, call, args, self)  # type: ignore[arg-type]
        self._due[handle] = None
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._due.pop(handle, None)

    def get_debug(self) -> bool:
        return False

    def advance(self, by_s: float) -> None:
        self._now_s += by_s
        for handle in [each for each in self._due if each.when() <= self._now_s]:
            del self._due[handle]
            handle._run()


class Backlog(asyncio.Transport):
    """The end of a connection that has something to write."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes = num_bytes
        self.is_cut = False

    def get_write_buffer_size(self) -> int:
        return self.num_bytes

    def abort(self) -> None:
        self.is_cut = True


async def never(_scope: object, _receive: object, _send: object) -> None:
    raise AssertionError("nothing was asked")


@pytest.mark.parametrize(
    ("bytes_per_minute", "is_cut"),
    [(0, True), (1, True), (4_000, True), (15_000, True), (15_360, False), (60_000, False)],
)
def test_what_waits_must_be_taken_at_a_pace(bytes_per_minute: int, *, is_cut: bool) -> None:
    clock, backlog = Clock(), Backlog(2**20)
    config = uvicorn.Config(never, lifespan="off", log_config=None)
    settings = {"config": config, "server_state": ServerState(), "app_state": {}, "_loop": clock}
    patient = http_server.Connection(max_connections=9, patience_s=60.0, **settings)
    patient.connection_made(backlog)
    # A request has come, and its answer piles up.
    patient._unset_keepalive_if_required()
    patient.pause_writing()
    for second in range(1, 600):
        if second % 6 == 0:
            backlog.num_bytes -= bytes_per_minute // 10
        clock.advance(1.0)
        if backlog.is_cut:
            assert second == 60
            break
    assert backlog.is_cut is is_cut
    if not is_cut:
        # Once there is room again, and nothing waits, it is not looked at any more.
        patient.resume_writing()
        clock.advance(600.0)
        assert not backlog.is_cut


@pytest.mark.model
async def test_a_client_that_reads_slowly_is_not_cut_off(tokenizer: Tokenizer) -> None:
    async with running_ring_api(tokenizer, patience_s=2.0) as ring_api:
        with capture_logs() as events:
            client, _session = await stalled(ring_api)
            answer = bytearray()
            for _ in range(6):
                await asyncio.sleep(0.5)
                # More than the third of the kernel's buffer that has to be free before it takes anything.
                wanted = len(answer) + 60_000
                while len(answer) < wanted:
                    more = await client.read()
                    assert more, "it was cut off"
                    answer += more
            assert b"[DONE]" not in answer
            assert b"[DONE]" in await client.read_until(b"[DONE]")
        client.hang_up()
        await ring_api.is_idle()
    assert not [event for event in events if event["event"] == "reader_cut_off"]
