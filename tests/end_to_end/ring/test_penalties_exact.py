"""Penalties, biases and logprobs on a real model in exact mode: real stages against the whole model."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from mesh.engine import Engine, GenerationRequest
from mesh.text.tokenizer import Tokenizer
from speculative.controller import ControllerOptions
from speculative.lookup_proposers import NgramProposer
from speculative.proposer import Proposer
from stages.runtime.stage_runtime import RuntimeOptions
from stages.sampling.sampler import SamplingParams, TokenLogprobs
from tests.support.proposers import Oracle, Parrot
from tests.support.ring_harness import RunningStage, running_coordinator, running_stages
from tests.support.whole_model_engine import WholeModelEngine

pytestmark = pytest.mark.model

CTX_SIZE = 256
# One that invites repetition, as a loop and as a list.
TEXT = "apple, pear, plum, apple, pear, plum, apple,"
SAMPLINGS = {
    "greedy": SamplingParams(frequency_penalty=0.4, presence_penalty=0.3, logit_bias=((28, -100.0),)),
    "seeded": SamplingParams(0.8, top_p=0.95, seed=7, repetition_penalty=1.2, repetition_window=64),
}


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer(smollm2_path)


@pytest.fixture
async def stages(smollm2_path: Path, stage_cache_dir: Path) -> AsyncIterator[list[RunningStage]]:
    options = RuntimeOptions(num_slots=1, ctx_size=CTX_SIZE, exact=True)
    async with running_stages(smollm2_path, (10, 20), options, stage_cache_dir) as running:
        yield running


@pytest.fixture(scope="module")
def whole(smollm2_path: Path) -> Iterator[WholeModelEngine]:
    engine = WholeModelEngine(smollm2_path, context_length=CTX_SIZE, num_slots=1)
    yield engine
    engine.close()


async def answer(engine: Engine, request: GenerationRequest) -> tuple[list[int], list[TokenLogprobs]]:
    parts = [part async for part in engine.generate(request)]
    tokens = [token for part in parts for token in part.tokens]
    return tokens, [each for part in parts for each in part.logprobs]


def ways(future: list[int]) -> tuple[tuple[Callable[[], Proposer] | None, int, int], ...]:
    """Proposer, width and depth: off, known text with a third of it wrong, the text itself."""
    errs = [False, False, True, False]
    return (
        (None, 1, 1),
        (lambda: Oracle(future, errs), 6, 1),
        (lambda: Oracle(future, errs), 2, 4),
        (Parrot, 3, 3),
        (NgramProposer, 8, 1),
    )


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(sampling, id=name, marks=[pytest.mark.sweep] if name == "greedy" else [])
        for name, sampling in SAMPLINGS.items()
    ],
)
async def test_text_and_logprobs_are_those_of_the_whole_model(
    whole: WholeModelEngine, stages: list[RunningStage], tokenizer: Tokenizer, sampling: SamplingParams
) -> None:
    prompt = tuple(tokenizer.encode(TEXT, add_special=False, parse_special=False))
    request = GenerationRequest(prompt, 24, sampling=sampling, num_top_logprobs=5)
    text, logprobs = await answer(whole, request)
    plain, _ = await answer(whole, GenerationRequest(prompt, 24))
    assert text != plain, "an adjustment that changes nothing would show nothing"

    for make_proposer, width, depth in ways([*prompt, *text]):
        async with running_coordinator(
            stages,
            context_length=CTX_SIZE,
            num_slots=1,
            make_proposer=make_proposer,
            controller=ControllerOptions(fixed_width=width, fixed_depth=depth),
        ) as coordinator:
            got_text, got_logprobs = await answer(coordinator, request)
        assert got_text == text
        for got, want in zip(got_logprobs, logprobs, strict=True):
            assert got.logprob == pytest.approx(want.logprob, abs=2e-5)
            assert [token for token, _ in got.top] == [token for token, _ in want.top]
            assert [each for _, each in got.top] == pytest.approx([each for _, each in want.top], abs=2e-5)


async def test_a_scored_prompt_has_the_logprobs_of_the_whole_model(
    whole: WholeModelEngine, stages: list[RunningStage], tokenizer: Tokenizer
) -> None:
    prompt = tuple(tokenizer.encode(TEXT * 8, add_special=False, parse_special=False))
    assert len(prompt) > 65, "more than two windows of scored rows"
    for tokens in (prompt, prompt[:2], prompt[:1]):
        request = GenerationRequest(tokens, 3, num_top_logprobs=2, uses_cache=False, scores_prompt=True)
        want = [part async for part in whole.generate(request)]
        async with running_coordinator(
            stages, context_length=CTX_SIZE, num_slots=1, make_proposer=NgramProposer
        ) as coordinator:
            got = [part async for part in coordinator.generate(request)]
        assert [token for part in got for token in part.tokens] == [
            token for part in want for token in part.tokens
        ]
        assert [part.prompt_logprobs for part in got[1:]] == [()] * (len(got) - 1)
        scores = got[0].prompt_logprobs
        assert len(scores) == len(tokens) - 1
        for mine, theirs in zip(scores, want[0].prompt_logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=2e-5)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
