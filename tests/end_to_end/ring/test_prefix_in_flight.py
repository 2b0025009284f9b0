"""Sessions that begin with what others left, through real servers around a fake model: the text is the same.

The fake model hashes every cell that a row can see: one stale or missing position changes all that follows.
"""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from mesh.coordinator.coordinator import Coordinator
from mesh.engine import GenerationRequest
from spanmesh_proto.errors import InvalidWindow
from speculative.controller import ControllerOptions
from stages.sampling.sampler import Sampler, SamplingParams
from tests.support.fake_stage import FakeRuntime, fake_ring, plain_answer
from tests.support.proposers import Parrot
from tests.support.ring_harness import RunningStage, collect, running_coordinator, running_services
from tests.support.searches import search
from tests.support.shared_ring import SharedRing, shared_ring

N_VOCAB = 64
NUM_SLOTS = 4
PROMPT = tuple(range(3, 33))
PENALTIES = SamplingParams(0.8, seed=4, repetition_penalty=1.5, presence_penalty=0.7, repetition_window=20)


ring = shared_ring


def serving(stages: list[RunningStage]) -> contextlib.AbstractAsyncContextManager[Coordinator]:
    return running_coordinator(
        stages,
        context_length=FakeRuntime(0, 1).ctx_size,
        num_slots=NUM_SLOTS,
        make_proposer=Parrot,
        controller=ControllerOptions(fixed_width=3, fixed_depth=3),
        max_rows=FakeRuntime.max_rows,
        n_vocab=N_VOCAB,
    )


def alone(request: GenerationRequest) -> list[int]:
    """The answer of a model that never heard anybody else."""
    sampler = Sampler(request.sampling, len(request.prompt))
    said = list(request.prompt)

    def choose(logits, position: int) -> int:  # type: ignore[no-untyped-def]
        said.append(sampler.sample(logits, position, said))
        return said[-1]

    return plain_answer(request.prompt, request.max_tokens, choose)


@dataclass(frozen=True)
class Turn:
    """A request that goes on from an earlier one's text."""

    earlier: int
    """Which of those before it."""
    num_shared: int
    """How much of that one's prompt and answer it repeats."""
    more: tuple[int, ...]
    """What follows."""
    client: str | None
    """Whose it is."""
    num_read: int | None
    """Tokens after which its client hangs up, or None."""
    is_drawn: bool
    """Whether it is sampled, with penalties."""


turns = st.builds(
    Turn,
    earlier=st.integers(0, 5),
    num_shared=st.integers(0, 60),
    more=st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=12).map(tuple),
    client=st.sampled_from([None, "ann"]),
    num_read=st.none() | st.none() | st.integers(0, 6),
    is_drawn=st.booleans(),
)


def requests_of(talk: Sequence[Sequence[Turn]]) -> list[list[tuple[GenerationRequest, int | None]]]:
    texts: list[tuple[int, ...]] = [PROMPT]
    rounds = []
    for group in talk:
        asked = []
        for turn in group:
            shared = texts[turn.earlier % len(texts)][: turn.num_shared]
            sampling = PENALTIES if turn.is_drawn else SamplingParams()
            request = GenerationRequest((*shared, *turn.more), 12, sampling=sampling, client=turn.client)
            asked.append((request, turn.num_read))
        texts += [(*request.prompt, *alone(request)) for request, _ in asked]
        rounds.append(asked)
    return rounds


async def read(coordinator: Coordinator, request: GenerationRequest, num_read: int | None) -> list[int]:
    """The answer, or its beginning if the client hangs up."""
    said: list[int] = []
    async with contextlib.aclosing(coordinator.generate(request)) as parts:
        async for part in parts:
            said += part.tokens
            if num_read is not None and len(said) >= num_read:
                break
    return said


@search(few=15, many=60)
@given(
    talk=st.lists(st.lists(turns, min_size=1, max_size=3), min_size=2, max_size=5),
    delays_ms=st.lists(st.sampled_from([0.0, 0.0, 0.5, 2.0]), min_size=1, max_size=7),
)
def test_one_text_whatever_was_left(ring: SharedRing, talk: list[list[Turn]], delays_ms: list[float]) -> None:
    delays = itertools.cycle(delays_ms)
    for runtime in ring.runtimes:
        runtime.on_decode = lambda _spans: time.sleep(next(delays) / 1000)
    rounds = requests_of(talk)

    async def ask() -> None:
        async with serving(ring.stages) as coordinator:
            for group in rounds:
                said = await asyncio.gather(*(read(coordinator, *asked) for asked in group))
                for (request, num_read), answer in zip(group, said, strict=True):
                    expected = alone(request)
                    assert answer == (expected if num_read is None else expected[: len(answer)])

    ring.runner.run(ask())


async def test_a_second_turn_computes_only_what_is_new() -> None:
    runtimes = fake_ring()
    rows: list[int] = []
    runtimes[0].on_decode = lambda spans: rows.extend(len(span.tokens) for span in spans)
    async with running_services(runtimes) as stages, serving(stages) as coordinator:
        answer, last = await collect(coordinator, GenerationRequest(PROMPT, 8))
        assert last.stats.num_cached == 0
        second = GenerationRequest((*PROMPT, *answer, 5, 6, 7), 1)
        rows.clear()
        text, last = await collect(coordinator, second)
        assert text == alone(second)
        # All but the token that was drawn last, which no stage has computed.
        assert last.stats.num_cached == len(PROMPT) + 7
        assert rows == [4]


async def test_others_copy_while_it_runs() -> None:
    """Four requests with one beginning: three of them begin with it, each in a slot of its own."""
    runtimes = fake_ring()
    async with running_services(runtimes) as stages, serving(stages) as coordinator:
        first = coordinator.generate(GenerationRequest(PROMPT, 40))
        said = list((await anext(first)).tokens)
        others = [GenerationRequest((*PROMPT, token), 6) for token in (40, 41, 42)]
        found = await asyncio.gather(*(collect(coordinator, request) for request in others))
        async for part in first:
            said += part.tokens
    assert said == alone(GenerationRequest(PROMPT, 40))
    assert [tokens for tokens, _ in found] == [alone(request) for request in others]
    assert [last.stats.num_cached for _, last in found] == [len(PROMPT)] * 3


async def test_a_client_begins_with_its_own_only_and_may_decline() -> None:
    async with running_services(fake_ring()) as stages, serving(stages) as coordinator:
        await collect(coordinator, GenerationRequest(PROMPT, 2, client="ann"))
        for request, num_cached in (
            (GenerationRequest(PROMPT, 2, client="bob"), 0),
            (GenerationRequest(PROMPT, 2, client="ann", uses_cache=False), 0),
            (GenerationRequest(PROMPT, 2, client="ann"), len(PROMPT) - 1),
        ):
            assert (await collect(coordinator, request))[1].stats.num_cached == num_cached


async def test_after_an_error_nothing_is_taken_for_granted() -> None:
    runtimes = fake_ring()
    async with running_services(runtimes) as stages, serving(stages) as coordinator:
        await collect(coordinator, GenerationRequest(PROMPT, 2))

        def fail(_spans: object) -> None:
            raise InvalidWindow("a row went missing")

        runtimes[1].on_decode = fail
        with pytest.raises(InvalidWindow, match="stage 1: a row went missing"):
            await collect(coordinator, GenerationRequest(PROMPT, 2))
        runtimes[1].on_decode = lambda _spans: None
        tokens, last = await collect(coordinator, GenerationRequest(PROMPT, 2))
        assert last.stats.num_cached == 0
        assert tokens == alone(GenerationRequest(PROMPT, 2))


class Failing:
    """Holds a stage's next batch until it is told to, then fails it."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self.computes = asyncio.Event()
        self._runtime = runtime
        self._loop = asyncio.get_running_loop()
        self._goes_on = threading.Event()
        runtime.on_decode = self._fail

    def go_on(self) -> None:
        self._goes_on.set()

    def _fail(self, _spans: object) -> None:
        self._loop.call_soon_threadsafe(self.computes.set)
        assert self._goes_on.wait(60)
        self._runtime.on_decode = lambda _spans: None
        raise InvalidWindow("a row went missing")


async def test_a_window_that_fails_behind_its_session_s_back_is_remembered() -> None:
    runtimes = fake_ring()
    async with running_services(runtimes) as stages, serving(stages) as coordinator:
        await collect(coordinator, GenerationRequest(PROMPT, 2))
        failing = Failing(runtimes[1])
        hanging_up = asyncio.create_task(collect(coordinator, GenerationRequest(PROMPT, 2)))
        await failing.computes.wait()
        hanging_up.cancel()
        await asyncio.wait({hanging_up})
        failing.go_on()
        async with asyncio.timeout(10):
            while coordinator._slots.prefix_cache._cached:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        tokens, last = await collect(coordinator, GenerationRequest(PROMPT, 2))
        assert last.stats.num_cached == 0
        assert tokens == alone(GenerationRequest(PROMPT, 2))


async def test_who_copies_from_a_session_that_fails_begins_anew() -> None:
    runtimes = fake_ring()
    async with running_services(runtimes) as stages, serving(stages) as coordinator:
        source = coordinator.generate(GenerationRequest(PROMPT, 40))
        await anext(source)
        failing = Failing(runtimes[1])
        await failing.computes.wait()
        request = GenerationRequest((*PROMPT, 40), 6)
        copier = asyncio.create_task(collect(coordinator, request))
        async with asyncio.timeout(10):
            while (await coordinator.stage_stats())[1].num_open_sessions < 2:
                pass
        failing.go_on()
        with pytest.raises(InvalidWindow, match="stage 1: a row went missing"):
            async for _ in source:
                pass
        tokens, last = await copier
    assert tokens == alone(request)
    assert last.stats.num_replays == 1


class Held:
    """Holds the next batch of a stage until it is let go."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self.is_held = asyncio.Event()
        self._runtime = runtime
        self._loop = asyncio.get_running_loop()
        self._goes_on = threading.Event()
        runtime.on_decode = self._hold

    def let_go(self) -> None:
        self._runtime.on_decode = lambda _spans: None
        self._goes_on.set()

    def _hold(self, _spans: object) -> None:
        self._loop.call_soon_threadsafe(self.is_held.set)
        assert self._goes_on.wait(60)


async def given_up(task: asyncio.Task[object]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def idle(stages: Sequence[RunningStage]) -> None:
    """No session is open at any stage."""
    async with asyncio.timeout(10):
        while any(stage.service.stats().num_open_sessions for stage in stages):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_hang_up_before_the_first_stage_is_free_leaves_no_slot_that_others_go_wrong_in() -> None:
    """The next request with the same beginning is not computed on what another key left at later stages."""
    runtimes = fake_ring()
    first, second = PROMPT, tuple(range(32, 2, -1))
    request = GenerationRequest((*first, 40), 6, client="xena")
    async with running_services(runtimes) as stages, serving(stages) as coordinator:
        await collect(coordinator, GenerationRequest(second, 3, client="zoe"))
        running = coordinator.generate(GenerationRequest(first, 60, client="xena"))
        await anext(running)
        for _ in range(3):
            held = Held(runtimes[0])
            await held.is_held.wait()
            hanging_up = asyncio.create_task(collect(coordinator, request))
            async with asyncio.timeout(10):
                while stages[0].service.stats().num_open_sessions < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            await given_up(hanging_up)
            async with asyncio.timeout(10):
                while stages[0].service.stats().num_open_sessions > 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            held.let_go()
            tokens, _ = await collect(coordinator, request)
            assert tokens == alone(request)
            await collect(coordinator, GenerationRequest(second, 3, client="zoe"))
        await running.aclose()
        await idle(stages)


async def test_a_session_that_is_given_up_is_opened_at_every_stage() -> None:
    runtimes = fake_ring()
    request = GenerationRequest((*PROMPT, 40), 6)
    async with running_services(runtimes) as stages, serving(stages) as coordinator:
        running = coordinator.generate(GenerationRequest(PROMPT, 60))
        await anext(running)
        held = Held(runtimes[0])
        await held.is_held.wait()
        hanging_up = asyncio.create_task(collect(coordinator, request))
        await asyncio.sleep(0)
        await given_up(hanging_up)
        held.let_go()
        # In the slot after the one that runs.
        tokens = [stage.service._engine.slots.tokens for stage in stages]
        async with asyncio.timeout(10):
            while any(each.tokens(1).tolist() != list(PROMPT) for each in tokens):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert not coordinator._slots.prefix_cache._expected, "it is over"
        assert 1 not in coordinator._slots.prefix_cache._cached, "no verdict has confirmed it"
        await running.aclose()
        await idle(stages)


@pytest.mark.parametrize("num_more", [3, 70], ids=["own slot", "copied"])
@pytest.mark.parametrize("stale", range(3))
async def test_what_a_slot_does_not_hold_is_computed_anew(stale: int, num_more: int) -> None:
    """Whatever the coordinator believes, and whichever stage finds that out."""
    runtimes = fake_ring()
    request = GenerationRequest((*PROMPT, 40, 41), 6)
    async with running_services(runtimes) as stages, serving(stages) as coordinator:
        # Of a long text the common part is copied, of a short one its slot taken.
        await collect(coordinator, GenerationRequest(PROMPT, num_more))
        engine = stages[stale].service._engine
        await engine.in_worker(lambda: engine.slots.trim(0, 20))
        with capture_logs() as logs:
            tokens, last = await collect(coordinator, request)
        assert tokens == alone(request)
        assert last.stats.num_replays == 1
        (event,) = [each for each in logs if each["event"] == "prefix_mismatch"]
        assert event["reason"] == (
            f"stage {stale}: a session begins in slot {int(num_more == 70)} with 30 cached tokens of slot 0, "
            "which has only the first 20 of them: compute them again"
        )
        assert coordinator.status().prefix_mismatches == 1
        await idle(stages)
        tokens, last = await collect(coordinator, request)
        assert tokens == alone(request)
        assert last.stats.num_cached >= len(PROMPT), "known again"
        assert coordinator.status().prefix_mismatches == 1


async def test_a_void_window_that_fails_costs_time_only() -> None:
    """The stage has emptied the slot for it: no later window of the session could be computed there."""
    runtimes = fake_ring()
    request = GenerationRequest(PROMPT, 40)
    num_failed = 0
    async with running_services(runtimes) as stages, serving(stages) as coordinator:

        def fail(_spans: object) -> None:
            nonlocal num_failed
            sessions = [*coordinator._sessions.values()]
            if num_failed or not sessions:
                return
            epoch, until_s = sessions[0]._epoch, time.monotonic() + 0.05
            while time.monotonic() < until_s:
                if sessions[0]._epoch > epoch:
                    num_failed += 1
                    raise InvalidWindow("a row went missing")
                time.sleep(0.001)

        runtimes[1].on_decode = fail
        tokens, last = await collect(coordinator, request)
    assert num_failed == 1
    assert tokens == alone(request)
    assert last.stats.num_replays == 1
