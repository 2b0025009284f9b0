"""Rings that break at any moment, around a fake model: one text, each of its tokens once."""

import asyncio
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.coordinator.options import CoordinatorOptions
from mesh.engine import Committed, GenerationRequest
from spanmesh_proto.errors import PrefixMismatch
from speculative.controller import ControllerOptions
from speculative.lookup_proposers import NgramProposer
from speculative.proposer import Proposer
from stages.runtime.row_positions import TOKENS_ONLY, RowPositions
from stages.runtime.slot_memory import Prefix
from stages.sampling.sampler import Sampler, SamplingParams, TokenLogprobs, token_logprobs
from tests.support.fake_recurrent import FakeRecurrentRuntime
from tests.support.fake_stage import FakeRuntime, plain_answer
from tests.support.proposers import Oracle, Parrot, SlowOracle
from tests.support.repairable_ring import NUM_STAGES, Deaths, RepairableRing, serving
from tests.support.ring_harness import plugs_for
from tests.support.searches import search

N_VOCAB = 64
PROMPT = tuple(range(3, 23))
NUM_TOKENS = 24


def options(**changes: object) -> CoordinatorOptions:
    return CoordinatorOptions(
        **{  # type: ignore[arg-type]
            "context_length": 128,
            "num_slots": 4,
            "max_rows": FakeRuntime.max_rows,
            "n_vocab": N_VOCAB,
            "repair_wait_s": 30.0,
            # Here stages die without anybody's doing.
            "most_crashes": 99,
            **changes,
        }
    )


def expected(request: GenerationRequest) -> tuple[list[int], list[TokenLogprobs]]:
    """One token at a time, with a list for a record."""
    sampler = Sampler(request.sampling, len(request.prompt))
    said = list(request.prompt)
    logprobs = []

    def choose(logits, position: int) -> int:  # type: ignore[no-untyped-def]
        said.append(sampler.sample(logits, position, said))
        logprobs.append(token_logprobs(logits, said[-1], 3))
        return said[-1]

    return plain_answer(request.prompt, request.max_tokens, choose), logprobs


def proposers(text: list[int], errs: list[bool]) -> dict[str, Callable[[], Proposer]]:
    return {
        "oracle": lambda: Oracle(text, errs),
        "slow": lambda: SlowOracle(text, errs),
        "ngram": NgramProposer,
        "parrot": Parrot,
    }


def recurrent_stages(dies: Deaths, num_checkpoints: int) -> Callable[[int], FakeRuntime]:
    return lambda index: FakeRecurrentRuntime(
        index,
        NUM_STAGES,
        num_checkpoints=num_checkpoints,
        is_poisoned=True,
        on_decode=lambda spans: dies(index, spans),
    )


async def read(ring: RepairableRing, request: GenerationRequest) -> list[Committed]:
    return [part async for part in ring.coordinator.generate(request)]


@search(few=8, many=20)
@given(
    common=st.lists(st.integers(0, N_VOCAB - 1), max_size=30),
    prompts=st.lists(st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=40), min_size=1, max_size=4),
    deaths=st.dictionaries(st.integers(1, 90), st.integers(-1, NUM_STAGES - 1), min_size=1, max_size=3),
    proposer=st.sampled_from(["off", "oracle", "slow", "ngram", "parrot"]),
    errs=st.lists(st.sampled_from([False, False, True]), min_size=1, max_size=12),
    width=st.none() | st.integers(1, 6),
    depth=st.none() | st.integers(1, 6),
    sampling=st.sampled_from(
        [
            SamplingParams(),
            SamplingParams(1.0, seed=5),
            SamplingParams(0.8, seed=4, repetition_penalty=1.5, presence_penalty=0.7, repetition_window=20),
        ]
    ),
    most_sent_rows=st.sampled_from([0, 30, 80, 1000]),
    news_s=st.sampled_from([None, 0.001, 0.01]),
    num_checkpoints=st.sampled_from([0, 0, 1, 3]),
)
def test_one_text_whenever_stages_die(
    *,
    common: list[int],
    prompts: list[list[int]],
    deaths: dict[int, int],
    proposer: str,
    errs: list[bool],
    width: int | None,
    depth: int | None,
    sampling: SamplingParams,
    most_sent_rows: int,
    news_s: float | None,
    num_checkpoints: int,
) -> None:
    """Whether a lost stage is made anew, or a copy that followed it takes its place.

    With checkpoints, slots have recurrent state and go back to nothing else.
    """
    if proposer in {"oracle", "slow"}:
        prompts = prompts[:1]
    prompts = [[*common, *prompt] for prompt in prompts]
    requests = [
        GenerationRequest(tuple(prompt), NUM_TOKENS, sampling=sampling, num_top_logprobs=3)
        for prompt in prompts
    ]
    wanted = [expected(request) for request in requests]
    make = proposers([*prompts[0], *wanted[0][0]], errs).get(proposer)

    async def ask() -> list[list[Committed]]:
        dies = Deaths(deaths)
        ring = dies.ring = RepairableRing(
            dies,
            recurrent_stages(dies, num_checkpoints) if num_checkpoints else None,
            most_sent_bytes=4 * most_sent_rows,
            news_s=news_s,
        )
        chosen = options(
            controller=ControllerOptions(fixed_width=width, fixed_depth=depth),
            can_trim=not num_checkpoints,
        )
        plugs = plugs_for(num_checkpoints=num_checkpoints)
        make_proposers = None if make is None else lambda _request: [make()]
        async with asyncio.timeout(60), serving(ring, chosen, plugs=plugs, make_proposers=make_proposers):
            answers = await asyncio.gather(*(read(ring, request) for request in requests))
            await asyncio.gather(*dies.dying)
        return answers

    for parts, (tokens, logprobs) in zip(asyncio.run(ask()), wanted, strict=True):
        assert [token for part in parts for token in part.tokens] == tokens
        assert [part.finish for part in parts] == [None] * (len(parts) - 1) + ["length"]
        for each, want in zip([each for part in parts for each in part.logprobs], logprobs, strict=True):
            assert each.logprob == pytest.approx(want.logprob, rel=1e-6)
            assert [token for token, _ in each.top] == [token for token, _ in want.top]


async def test_sessions_behind_one_that_begins_anew_in_its_replay_have_their_turn() -> None:
    """What it was to begin with is not there: others wait for it to have sent all, which it does twice."""
    ring = RepairableRing(lambda _index, _spans: time.sleep(0.003))
    common = tuple(range(3, 33))
    requests = [GenerationRequest((*common, *range(1, 1 + num_more)), 24) for num_more in (1, 50, 60)]
    failed: list[int] = []
    async with serving(ring, CoordinatorOptions(128, 4, FakeRuntime.max_rows, N_VOCAB)) as coordinator:
        running = [coordinator.generate(request) for request in requests]
        said = [list((await anext(parts)).tokens) for parts in running]
        coordinator.pause("stages move")
        engine = ring.running[-1].service._engine
        begin = engine.slots.begin

        def fail_once(
            slot: int,
            source: int,
            cached: Sequence[int],
            num_resumed: int,
            sent_row_bytes: int,
            *,
            brought: Prefix | None = None,
            positions: RowPositions = TOKENS_ONLY,
        ) -> None:
            if cached and not failed:
                failed.append(slot)
                raise PrefixMismatch("it is not there")
            begin(slot, source, cached, num_resumed, sent_row_bytes, brought=brought, positions=positions)

        engine.slots.begin = fail_once  # type: ignore[method-assign]
        async with asyncio.timeout(20):
            await ring.repair()
            for parts, tokens in zip(running, said, strict=True):
                async for part in parts:
                    tokens.extend(part.tokens)
    assert len(failed) == 1
    assert said == [expected(request)[0] for request in requests]


async def test_a_session_alone_is_replayed_with_the_speculation_that_the_controller_chooses() -> None:
    """It is itself among those that share what stages can compute when it sends its first window."""
    ring = RepairableRing(lambda _index, _spans: time.sleep(0.003))
    request = GenerationRequest(PROMPT[:8], 40)
    wanted = expected(request)[0]
    chosen = options(controller=ControllerOptions())
    proposer = lambda _request: [Oracle([*request.prompt, *wanted])]  # noqa: E731 - as the coordinator takes it
    async with serving(ring, chosen, make_proposers=proposer) as coordinator, asyncio.timeout(30):
        parts = coordinator.generate(request)
        said = list((await anext(parts)).tokens)
        coordinator.pause("stages move")
        assert len(coordinator._sessions) == 1
        await ring.repair()
        async for part in parts:
            said += part.tokens
    assert said == wanted
