"""Windows in flight through real stages' servers around a fake model: the text is that of plain decoding."""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.engine import GenerationRequest
from spanmesh_proto.errors import InvalidWindow
from speculative.controller import ControllerOptions
from speculative.lookup_proposers import NgramProposer
from speculative.proposer import Proposer
from stages.runtime.spans import Span
from stages.sampling.sampler import Sampler, SamplingParams
from tests.support.fake_stage import FakeRuntime, fake_ring, plain_answer
from tests.support.proposers import Oracle, Parrot, SlowOracle
from tests.support.ring_harness import RunningStage, collect, running_coordinator, running_services
from tests.support.searches import search
from tests.support.shared_ring import SharedRing, shared_ring

N_VOCAB = 64
NUM_SLOTS = 4
PROMPT = tuple(range(3, 23))


ring = shared_ring


async def answers(
    stages: list[RunningStage],
    requests: Sequence[GenerationRequest],
    make_proposer: Callable[[], Proposer] | None,
    controller: ControllerOptions,
    *,
    cancels: bool = True,
) -> list[list[int]]:
    async with running_coordinator(
        stages,
        context_length=FakeRuntime(0, 1).ctx_size,
        num_slots=NUM_SLOTS,
        make_proposer=make_proposer,
        controller=controller,
        cancels=cancels,
        max_rows=FakeRuntime.max_rows,
        n_vocab=N_VOCAB,
    ) as coordinator:
        return [tokens for tokens, _ in await asyncio.gather(*(collect(coordinator, r) for r in requests))]


def proposers(text: Sequence[int], errs: Sequence[bool]) -> dict[str, Callable[[], Proposer] | None]:
    return {
        "off": None,
        "oracle": lambda: Oracle(text, errs),
        "slow": lambda: SlowOracle(text, errs),
        "ngram": NgramProposer,
        "parrot": Parrot,
    }


@search(few=40, many=120)
@given(
    prompt=st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=40),
    num_tokens=st.integers(1, 32),
    proposer=st.sampled_from(["off", "oracle", "slow", "ngram", "parrot"]),
    errs=st.lists(st.sampled_from([False, False, True]), min_size=1, max_size=12),
    width=st.none() | st.integers(1, 8),
    depth=st.none() | st.integers(1, 8),
    cancels=st.booleans(),
    delays_ms=st.lists(st.sampled_from([0.0, 0.0, 0.5, 2.0]), min_size=1, max_size=7),
    sampling=st.sampled_from(
        [SamplingParams(), SamplingParams(1.0, seed=5), SamplingParams(0.7, top_k=8, top_p=0.9, seed=6)]
    ),
)
def test_one_text_whatever_flies(
    ring: SharedRing,
    *,
    prompt: list[int],
    num_tokens: int,
    proposer: str,
    errs: list[bool],
    width: int | None,
    depth: int | None,
    cancels: bool,
    delays_ms: list[float],
    sampling: SamplingParams,
) -> None:
    expected = plain_answer(prompt, num_tokens, Sampler(sampling).sample)
    delays = itertools.cycle(delays_ms)
    for runtime in ring.runtimes:
        runtime.on_decode = lambda _spans: time.sleep(next(delays) / 1000)
    make_proposer = proposers([*prompt, *expected], errs)[proposer]
    request = GenerationRequest(tuple(prompt), num_tokens, sampling=sampling)
    controller = ControllerOptions(fixed_width=width, fixed_depth=depth)
    texts = ring.runner.run(answers(ring.stages, [request], make_proposer, controller, cancels=cancels))
    assert texts == [expected]


@search(few=8, many=15)
@given(
    prompts=st.lists(
        st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=30), min_size=2, max_size=NUM_SLOTS
    ),
    width=st.none() | st.integers(1, 4),
    depth=st.none() | st.integers(1, 6),
    delays_ms=st.lists(st.sampled_from([0.0, 0.5, 2.0]), min_size=1, max_size=7),
)
def test_one_text_whoever_else_flies(
    ring: SharedRing, prompts: list[list[int]], width: int | None, depth: int | None, delays_ms: list[float]
) -> None:
    """Sessions in shared batches, each with windows of its own in flight."""
    sampling = SamplingParams(0.9, seed=3)
    expected = [plain_answer(prompt, 24, Sampler(sampling).sample) for prompt in prompts]
    delays = itertools.cycle(delays_ms)
    for runtime in ring.runtimes:
        runtime.on_decode = lambda _spans: time.sleep(next(delays) / 1000)
    requests = [GenerationRequest(tuple(prompt), 24, sampling=sampling) for prompt in prompts]
    controller = ControllerOptions(fixed_width=width, fixed_depth=depth)
    texts = ring.runner.run(answers(ring.stages, requests, Parrot, controller))
    assert texts == expected


class TestPoison:
    """Stale rows that a slot still holds must be trimmed, or they would change the text."""

    NUM_TOKENS = 30
    FUTURE = (*PROMPT, *plain_answer(PROMPT, NUM_TOKENS, Sampler(SamplingParams()).sample))
    REQUEST = GenerationRequest(PROMPT, NUM_TOKENS)

    async def text(self, runtimes: list[FakeRuntime], *, width: int, depth: int) -> list[int]:
        errs = [False, False, True, False, True, False, False]
        async with running_services(runtimes) as stages:
            texts = await answers(
                stages,
                [self.REQUEST],
                lambda: Oracle(self.FUTURE, errs),
                ControllerOptions(fixed_width=width, fixed_depth=depth),
            )
        return texts[0]

    @pytest.mark.parametrize(("width", "depth"), [(6, 1), (2, 5)])
    async def test_poison_leaves_no_trace(self, width: int, depth: int) -> None:
        runtimes = fake_ring(is_poisoned=True)
        assert await self.text(runtimes, width=width, depth=depth) == list(self.FUTURE[len(PROMPT) :])
        assert all(runtime.memory.num_trims > 3 for runtime in runtimes)

    @pytest.mark.parametrize("depth", [1, 5])
    @pytest.mark.parametrize("trim", [0, 1, 2])
    @pytest.mark.parametrize("stage", [0, 1, 2])
    async def test_one_trim_left_out_shows(self, stage: int, trim: int, depth: int) -> None:
        """Of the slot's poison, or of the rows of the first or second rejection, at one stage alone."""
        runtimes = fake_ring(is_poisoned=True)
        runtimes[stage].memory.forgotten_trims = frozenset({trim})
        # Whatever proposes: here only the first tokens are looked at, as the oracle knows another text.
        errs = [False, False, True, False, True, False, False]
        async with (
            running_services(runtimes) as stages,
            running_coordinator(
                stages,
                context_length=128,
                num_slots=NUM_SLOTS,
                make_proposer=lambda: Forgetful(self.FUTURE, errs),
                controller=ControllerOptions(fixed_width=2, fixed_depth=depth),
                max_rows=FakeRuntime.max_rows,
                n_vocab=N_VOCAB,
            ) as coordinator,
        ):
            text, _ = await collect(coordinator, self.REQUEST)
        assert runtimes[stage].memory.num_trims > trim
        assert text != list(self.FUTURE[len(PROMPT) :])


class Forgetful(Oracle):
    """Goes on proposing its own text where another one has been committed."""

    def extend(self, tokens: Sequence[int]) -> None:
        self.heard = self._text[: len(self.heard) + len(tokens)]


class Gate:
    """Holds a stage before it computes windows from a position on."""

    def __init__(self, position: int) -> None:
        self._position = position
        self._open = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self, spans: Sequence[Span]) -> None:
        if any(span.start >= self._position for span in spans):
            asyncio.run_coroutine_threadsafe(self._open.wait(), self._loop).result()

    def open(self) -> None:
        self._open.set()


@pytest.mark.parametrize("cancels", [True, False])
@pytest.mark.parametrize("position", [0, 1, 2])
async def test_void_windows_die_where_they_are(*, position: int, cancels: bool) -> None:
    """Windows pile up before one stage; one is rejected; what waits there is never computed."""
    num_tokens = 12
    future = [*PROMPT, *plain_answer(PROMPT, num_tokens, Sampler(SamplingParams()).sample)]
    # The third token is wrong: it is the first of the second window, where the gate is.
    wrong = len(PROMPT) + 2
    errs = [place == wrong for place in range(len(future))]
    runtimes = fake_ring()
    gate = Gate(wrong)
    runtimes[position].on_decode = gate
    async with (
        running_services(runtimes) as stages,
        running_coordinator(
            stages,
            context_length=128,
            num_slots=1,
            make_proposer=lambda: Oracle(future, errs),
            controller=ControllerOptions(fixed_width=2, fixed_depth=4),
            cancels=cancels,
            max_rows=FakeRuntime.max_rows,
            n_vocab=N_VOCAB,
        ) as coordinator,
    ):
        answer = asyncio.create_task(collect(coordinator, GenerationRequest(PROMPT, num_tokens)))
        async with asyncio.timeout(10):
            while not any(session._epoch for session in coordinator._sessions.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            # Control streams keep their order: what answers this has heard the cancel before.
            await coordinator._ring.stats()
            gate.open()
            tokens, last = await answer
        after = await coordinator._ring.stats()
    assert tokens == future[len(PROMPT) :]
    assert last.stats.report is not None
    report = last.stats.report()
    assert (report.num_voided_windows, report.num_cancels) == (3, int(cancels))
    if cancels:
        assert report.num_wasted_rows == 0
        # One may be in computing when the cancel comes: it goes no further, and its verdict is not sent.
        at_tail = position == len(runtimes) - 1
        num_chunks = 2
        num_computed_in_vain = after[-1].num_windows - last.stats.num_windows - num_chunks
        assert 0 <= num_computed_in_vain <= at_tail
        assert sum(stage.num_dropped_windows for stage in after[: position + 1]) == 3 - num_computed_in_vain


async def test_a_proposer_that_knows_more_wakes_the_pump() -> None:
    """A plain window is under way and held; what the proposer finds out meanwhile follows it at once."""
    future = [*PROMPT, *plain_answer(PROMPT, 8, Sampler(SamplingParams()).sample)]
    proposer = Awakened(future)
    runtimes = fake_ring()
    gate = Gate(len(PROMPT))
    runtimes[0].on_decode = gate
    async with (
        running_services(runtimes) as stages,
        running_coordinator(
            stages,
            context_length=128,
            num_slots=1,
            make_proposer=lambda: proposer,
            controller=ControllerOptions(fixed_width=2, fixed_depth=3),
            max_rows=FakeRuntime.max_rows,
            n_vocab=N_VOCAB,
        ) as coordinator,
    ):
        parts = coordinator.generate(GenerationRequest(PROMPT, 8))
        first = await anext(parts)
        (session,) = coordinator._sessions.values()
        assert session._generation.num_in_flight == 1
        await asyncio.to_thread(proposer.wake)
        await asyncio.sleep(0)
        assert session._generation.num_in_flight == 3
        gate.open()
        tokens = [*first.tokens, *[token async for part in parts for token in part.tokens]]
    assert tokens == future[len(PROMPT) :]


class Awakened(Oracle):
    """Knows nothing until it is woken."""

    is_awake = False

    @property
    def num_known(self) -> int:
        return len(self._text) if self.is_awake else 0

    def listen(self, on_ready: Callable[[], None]) -> None:
        self._on_ready = on_ready

    def wake(self) -> None:
        self.is_awake = True
        self._on_ready()


async def test_a_client_that_does_not_read_delays_nobody() -> None:
    num_tokens = 12
    async with (
        running_services(fake_ring()) as stages,
        running_coordinator(
            stages, context_length=128, num_slots=1, max_rows=FakeRuntime.max_rows, n_vocab=N_VOCAB
        ) as coordinator,
    ):
        parts = coordinator.generate(GenerationRequest(PROMPT, num_tokens))
        first = await anext(parts)
        num_windows = 0
        async with asyncio.timeout(10):
            while num_windows < 2 + num_tokens - 1:
                num_windows = (await coordinator._ring.stats())[-1].num_windows
        rest = [part async for part in parts]
    assert len(first.tokens) + sum(len(part.tokens) for part in rest) == num_tokens
    assert rest[-1].finish == "length"


async def test_a_failure_of_a_void_window_is_nobody_s_concern(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that refuses a window which a rejection has voided meanwhile must not end the answer."""
    num_tokens = 12
    future = [*PROMPT, *plain_answer(PROMPT, num_tokens, Sampler(SamplingParams()).sample)]
    wrong = len(PROMPT) + 2
    runtimes = fake_ring()
    gate = Gate(wrong)
    is_taken = threading.Event()
    has_failed = False

    def reject_once_taken(span: Span) -> None:
        """Without this a fast tail voids the second window before the stage takes it, which then drops it."""
        assert span.start < len(PROMPT) or is_taken.wait(60)

    def refuse_once(span: Span) -> None:
        nonlocal has_failed
        if span.start >= wrong:
            is_taken.set()
        gate([span])
        if span.start >= wrong and not has_failed:
            has_failed = True
            raise InvalidWindow("this window is refused")

    monkeypatch.setattr(runtimes[1], "check", refuse_once)
    monkeypatch.setattr(runtimes[2], "check", reject_once_taken)
    async with (
        running_services(runtimes) as stages,
        running_coordinator(
            stages,
            context_length=128,
            num_slots=1,
            make_proposer=lambda: Oracle(future, [place == wrong for place in range(len(future))]),
            controller=ControllerOptions(fixed_width=2, fixed_depth=4),
            max_rows=FakeRuntime.max_rows,
            n_vocab=N_VOCAB,
        ) as coordinator,
    ):
        answer = asyncio.create_task(collect(coordinator, GenerationRequest(PROMPT, num_tokens)))
        async with asyncio.timeout(10):
            while not any(session._epoch for session in coordinator._sessions.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        gate.open()
        tokens, _ = await answer
    assert has_failed
    assert tokens == future[len(PROMPT) :]
