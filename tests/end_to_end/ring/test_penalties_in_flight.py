"""Penalties through real servers around a fake model: rejected rows leave no trace, whatever flies."""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.engine import Committed, GenerationRequest
from spanmesh_proto.errors import InvalidRequest, ProtocolError, RequestError
from speculative.controller import ControllerOptions
from speculative.lookup_proposers import NgramProposer
from speculative.proposer import Proposer
from stages.sampling.sampler import Sampler, SamplingParams, TokenLogprobs, token_logprobs
from stages.sampling.verifier import SampledTokens, TokenRecord, WindowVerifier
from tests.support.fake_stage import FakeRuntime, fake_ring, plain_answer
from tests.support.proposers import Oracle, Parrot
from tests.support.ring_harness import RunningStage, collect, running_coordinator, running_services
from tests.support.searches import search
from tests.support.shared_ring import SharedRing, shared_ring

N_VOCAB = 64
PROMPT = (3, 16, 17, 3, 16)
STRONG = SamplingParams(
    frequency_penalty=0.6,
    presence_penalty=0.9,
    repetition_penalty=1.4,
    repetition_window=12,
    logit_bias=((5, 1.5), (9, -100.0)),
)


ring = shared_ring


def expected(
    prompt: Sequence[int], num_tokens: int, sampling: SamplingParams
) -> tuple[list[int], list[TokenLogprobs]]:
    """One token at a time, with a list for a record."""
    sampler = Sampler(sampling, len(prompt))
    said = list(prompt)
    logprobs = []

    def choose(logits, position: int) -> int:  # type: ignore[no-untyped-def]
        said.append(sampler.sample(logits, position, said))
        logprobs.append(token_logprobs(logits, said[-1], 3))
        return said[-1]

    return plain_answer(prompt, num_tokens, choose), logprobs


async def answers(
    stages: list[RunningStage],
    requests: Sequence[GenerationRequest],
    make_proposer: Callable[[], Proposer] | None,
    controller: ControllerOptions,
) -> list[tuple[list[int], list[TokenLogprobs]]]:
    async def answer(request: GenerationRequest) -> tuple[list[int], list[TokenLogprobs]]:
        parts: list[Committed] = [part async for part in coordinator.generate(request)]
        assert all(len(part.logprobs) == len(part.tokens) for part in parts)
        return [token for part in parts for token in part.tokens], [
            each for part in parts for each in part.logprobs
        ]

    async with running_coordinator(
        stages,
        context_length=128,
        num_slots=4,
        make_proposer=make_proposer,
        controller=controller,
        max_rows=FakeRuntime.max_rows,
        n_vocab=N_VOCAB,
    ) as coordinator:
        return list(await asyncio.gather(*map(answer, requests)))


@search(few=20, many=60)
@given(
    prompts=st.lists(st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=40), min_size=1, max_size=3),
    num_tokens=st.integers(1, 32),
    proposer=st.sampled_from(["off", "oracle", "ngram", "parrot"]),
    errs=st.lists(st.sampled_from([False, False, True]), min_size=1, max_size=12),
    width=st.none() | st.integers(1, 8),
    depth=st.none() | st.integers(1, 8),
    delays_ms=st.lists(st.sampled_from([0.0, 0.0, 0.5]), min_size=1, max_size=7),
    sampling=st.sampled_from(
        [
            STRONG,
            SamplingParams(0.9, seed=4, frequency_penalty=1.0, repetition_penalty=1.2),
            SamplingParams(
                0.7, top_k=9, seed=5, presence_penalty=-1.0, repetition_penalty=0.8, repetition_window=3
            ),
        ]
    ),
)
def test_one_text_whatever_flies(
    ring: SharedRing,
    *,
    prompts: list[list[int]],
    num_tokens: int,
    proposer: str,
    errs: list[bool],
    width: int | None,
    depth: int | None,
    delays_ms: list[float],
    sampling: SamplingParams,
) -> None:
    wanted = [expected(prompt, num_tokens, sampling) for prompt in prompts]
    delays = itertools.cycle(delays_ms)
    for runtime in ring.runtimes:
        runtime.on_decode = lambda _spans: time.sleep(next(delays) / 1000)
    if proposer == "oracle":
        prompts, wanted = prompts[:1], wanted[:1]
    make_proposer: dict[str, Callable[[], Proposer] | None] = {
        "off": None,
        "oracle": lambda: Oracle([*prompts[0], *wanted[0][0]], errs),
        "ngram": NgramProposer,
        "parrot": Parrot,
    }
    requests = [
        GenerationRequest(tuple(prompt), num_tokens, sampling=sampling, num_top_logprobs=3)
        for prompt in prompts
    ]
    controller = ControllerOptions(fixed_width=width, fixed_depth=depth)
    got = ring.runner.run(answers(ring.stages, requests, make_proposer[proposer], controller))
    for (text, logprobs), (want_text, want_logprobs) in zip(got, wanted, strict=True):
        assert text == want_text
        for each, want in zip(logprobs, want_logprobs, strict=True):
            assert each.logprob == pytest.approx(want.logprob, rel=1e-6)
            assert [token for token, _ in each.top] == [token for token, _ in want.top]


@pytest.mark.parametrize("depth", [1, 4])
async def test_a_trace_of_rejected_rows_would_show(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """With a record that is not cut where a window starts, another text comes out."""
    num_tokens = 24
    text, _ = expected(PROMPT, num_tokens, STRONG)
    request = GenerationRequest(PROMPT, num_tokens, sampling=STRONG, num_top_logprobs=0)
    errs = [False, True, False, False, True]
    controller = ControllerOptions(fixed_width=3, fixed_depth=depth)

    async def answer() -> list[int]:
        async with running_services(fake_ring()) as stages:
            ((got, _),) = await answers(
                stages, [request], lambda: Forgetful([*PROMPT, *text], errs), controller
            )
        return got

    assert await answer() == text
    write = TokenRecord.write
    monkeypatch.setattr(TokenRecord, "write", lambda record, _start, ids: write(record, len(record), ids))
    assert await answer() != text


class Forgetful(Oracle):
    """Goes on proposing its own text where another one has been committed."""

    def extend(self, tokens: Sequence[int]) -> None:
        self.heard = self._text[: len(self.heard) + len(tokens)]


async def test_penalties_and_bans_do_something() -> None:
    async with (
        running_services(fake_ring()) as stages,
        running_coordinator(
            stages, context_length=128, num_slots=1, max_rows=FakeRuntime.max_rows, n_vocab=N_VOCAB
        ) as coordinator,
    ):
        plain, _ = await collect(coordinator, GenerationRequest(PROMPT, 30))
        fewer = SamplingParams(frequency_penalty=2.0, presence_penalty=2.0)
        varied, _ = await collect(coordinator, GenerationRequest(PROMPT, 30, sampling=fewer))
        assert len(set(varied)) > len(set(plain))
        only = SamplingParams(logit_bias=((9, 100.0),))
        forced, _ = await collect(coordinator, GenerationRequest(PROMPT, 5, sampling=only))
        assert forced == [9] * 5
        without = SamplingParams(logit_bias=tuple((token, -100.0) for token in set(plain)))
        banned, _ = await collect(coordinator, GenerationRequest(PROMPT, 30, sampling=without))
        assert not set(banned) & set(plain)
        with pytest.raises(InvalidRequest, match="token id 64"):
            await collect(
                coordinator,
                GenerationRequest(PROMPT, 1, sampling=SamplingParams(logit_bias=((N_VOCAB, 1.0),))),
            )


async def test_a_tail_that_does_not_know_a_biased_token_says_so() -> None:
    """As when the coordinator believes in a larger vocabulary: that session fails, and no other."""
    async with (
        running_services(fake_ring()) as stages,
        running_coordinator(
            stages, context_length=128, num_slots=2, max_rows=FakeRuntime.max_rows, n_vocab=N_VOCAB + 9
        ) as coordinator,
    ):
        beyond = GenerationRequest(PROMPT, 5, sampling=SamplingParams(logit_bias=((N_VOCAB, 1.0),)))
        other = asyncio.create_task(collect(coordinator, GenerationRequest(PROMPT, 20)))
        with pytest.raises(RequestError, match="stage 2: logit_bias names the token id 64"):
            await collect(coordinator, beyond)
        assert len((await other)[0]) == 20
        assert len((await collect(coordinator, GenerationRequest(PROMPT, 5)))[0]) == 5


async def test_a_tail_that_leaves_out_logprobs_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = WindowVerifier.verify
    monkeypatch.setattr(
        WindowVerifier,
        "verify",
        lambda *window, **scored: SampledTokens(verifier(*window, **scored).tokens),
    )
    request = GenerationRequest(PROMPT, 5, num_top_logprobs=2)
    async with running_services(fake_ring()) as stages:
        with pytest.raises(ProtocolError, match="sent 0 logprobs for 1 ids, not 1"):
            await answers(stages, [request], None, ControllerOptions())
