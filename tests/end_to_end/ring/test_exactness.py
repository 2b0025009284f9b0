"""Exact mode: one seed, one text. Real stages, llama.cpp and gRPC against the whole model decoding alone."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mesh.engine import Engine, GenerationRequest, GenerationStats
from mesh.text.tokenizer import Tokenizer
from speculative.controller import ControllerOptions
from speculative.lookup_proposers import NgramProposer
from speculative.proposer import Proposal, Proposer
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.sampling.sampler import SamplingParams
from tests.support.proposers import Parrot
from tests.support.ring_harness import RunningStage, running_coordinator, running_stages
from tests.support.short_models import short_smollm2_path  # noqa: F401 - a fixture
from tests.support.whole_model_engine import WholeModelEngine

pytestmark = pytest.mark.model

CTX_SIZE = 512
NUM_SLOTS = 4
WRONG = 100
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
# One that will be quoted, one that will loop, one of more than a chunk, one that is over soon.
TEXTS = (
    CHAT.format("Repeat this line three times: the quick brown fox jumps over the lazy dog."),
    "1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3,",
    "The history of the river begins in the mountains. " * 12 + "It",
    CHAT.format("Say hi."),
)
SAMPLINGS = {
    "greedy": SamplingParams(),
    "hot": SamplingParams(temperature=1.0, seed=11),
    "filtered": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=2**64 - 1),
}


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer(smollm2_path)


@dataclass(frozen=True)
class Model:
    path: Path
    cuts: tuple[int, ...]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> Model:
    """In three stages. Most tests have a few layers of it: what they ask is the same of any number."""
    if request.param == "whole":
        return Model(request.getfixturevalue("smollm2_path"), (10, 20))
    return Model(request.getfixturevalue("short_smollm2_path"), (2, 4))


@pytest.fixture
async def stages(model: Model, stage_cache_dir: Path) -> AsyncIterator[list[RunningStage]]:
    options = RuntimeOptions(num_slots=NUM_SLOTS, ctx_size=CTX_SIZE, exact=True)
    async with running_stages(model.path, model.cuts, options, stage_cache_dir) as running:
        yield running


@pytest.fixture
def whole(model: Model) -> Iterator[WholeModelEngine]:
    engine = WholeModelEngine(model.path, context_length=CTX_SIZE, num_slots=1)
    yield engine
    engine.close()


class Oracle:
    """Knows what comes, and errs on purpose in every fourth token: windows of all span classes."""

    name = "oracle"

    def __init__(self, futures: Sequence[Sequence[int]]) -> None:
        self._futures = futures
        self._tokens: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens.extend(tokens)

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        known = len(self._tokens)
        future = next(future for future in self._futures if list(future[:known]) == self._tokens)
        start = known + len(after)
        ahead = range(start, min(start + max_tokens, len(future)))
        tokens = tuple(future[place] if place % 4 else WRONG for place in ahead)
        return Proposal(tokens, (0.75,) * len(tokens), self.name)

    def listen(self, on_ready: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        pass


def requests(tokenizer: Tokenizer, sampling: SamplingParams, max_tokens: int = 32) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            tuple(tokenizer.encode(text, add_special=False, parse_special=True)),
            max_tokens,
            tokenizer.end_tokens,
            sampling,
        )
        for text in TEXTS
    ]


async def answer(engine: Engine, request: GenerationRequest) -> tuple[list[int], GenerationStats]:
    parts = [part async for part in engine.generate(request)]
    return [token for part in parts for token in part.tokens], parts[-1].stats


async def answers(
    stages: list[RunningStage],
    wanted: list[GenerationRequest],
    make_proposer: Callable[[], Proposer] | None,
    *,
    at_once: bool,
    width: int = 8,
    depth: int = 1,
) -> tuple[list[list[int]], list[GenerationStats]]:
    """The ring's answers, whatever the time they take says about proposing."""
    async with running_coordinator(
        stages,
        context_length=CTX_SIZE,
        num_slots=NUM_SLOTS,
        make_proposer=make_proposer,
        controller=ControllerOptions(fixed_width=width, fixed_depth=depth),
        max_waiting=len(wanted),
    ) as coordinator:
        if at_once:
            results = await asyncio.gather(*(answer(coordinator, request) for request in wanted))
        else:
            results = [await answer(coordinator, request) for request in wanted]
    return [tokens for tokens, _ in results], [stats for _, stats in results]


@pytest.mark.parametrize(
    ("model", "sampling", "ways"),
    [
        # Drawing through filters is the harder case of drawing; the other is left to the sweep. So are the
        # ways that the other of these two goes, and all layers, which tests/end_to_end/lab/test_multi_host.py
        # has.
        pytest.param("short", "greedy", (0, 1, 2, 4), id="greedy"),
        pytest.param("short", "filtered", (3, 5), id="filtered"),
        *(
            pytest.param("whole", name, range(6), id=f"{name}, all", marks=pytest.mark.sweep)
            for name in SAMPLINGS
        ),
    ],
    indirect=["model"],
)
async def test_one_seed_one_text(
    whole: WholeModelEngine,
    stages: list[RunningStage],
    tokenizer: Tokenizer,
    sampling: str,
    ways: Sequence[int],
) -> None:
    """Off, n-gram, an oracle that errs; one after the other and all at once; in step and in flight."""
    wanted = requests(tokenizer, SAMPLINGS[sampling])
    expected = [(await answer(whole, request))[0] for request in wanted]
    futures = [[*request.prompt, *tokens] for request, tokens in zip(wanted, expected, strict=True)]

    plain, _ = await answers(stages, wanted, None, at_once=False)
    assert plain == expected

    cases: tuple[tuple[Callable[[], Proposer], bool, int, int], ...] = (
        (lambda: Oracle(futures), False, 8, 1),
        (lambda: Oracle(futures), True, 8, 1),
        (lambda: Oracle(futures), False, 2, 6),
        (lambda: Oracle(futures), True, 3, 4),
        (Parrot, True, 8, 1),
        (Parrot, True, 1, 4),
    )
    for make_proposer, at_once, width, depth in (cases[way] for way in ways):
        texts, stats = await answers(stages, wanted, make_proposer, at_once=at_once, width=width, depth=depth)
        assert texts == expected
        # Windows that proposed nothing, or in which nothing was rejected, would show nothing.
        if make_proposer is not Parrot:
            assert sum(each.num_accepted for each in stats) > 0
        assert sum(each.num_proposed - each.num_accepted for each in stats) > 0
        reports = [each.report() for each in stats if each.report is not None]
        assert (sum(report.num_voided_windows for report in reports) > 0) == (depth > 1)


EITHER = pytest.mark.parametrize(
    "model", ["short", pytest.param("whole", marks=pytest.mark.sweep)], indirect=True
)


@EITHER
async def test_seeds_differ(stages: list[RunningStage], tokenizer: Tokenizer) -> None:
    texts = []
    for seed in (1, 2):
        wanted = requests(tokenizer, SamplingParams(temperature=1.0, seed=seed), max_tokens=16)[2:3]
        texts += (await answers(stages, wanted, NgramProposer, at_once=True))[0]
    assert texts[0] != texts[1]


@EITHER
async def test_tokens_come_with_the_model_s_own_probabilities(
    model: Model, stages: list[RunningStage], tokenizer: Tokenizer
) -> None:
    """First tokens of many seeds through the ring, against the softmax of the whole model's logits."""
    prompt = tuple(tokenizer.encode("Music of the", add_special=False, parse_special=False))
    runtime = StageRuntime(model.path, RuntimeOptions(num_slots=1, ctx_size=64, exact=True))
    logits = runtime.decode([Span(0, 0, prompt, num_outputs=1)])[0][-1].astype(np.float64)
    runtime.close()
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()

    n_draws = 400
    wanted = [
        GenerationRequest(prompt, 1, sampling=SamplingParams(temperature=1.0, seed=seed))
        for seed in range(n_draws)
    ]
    first_half, _ = await answers(stages, wanted[: n_draws // 2], None, at_once=True)
    second_half, _ = await answers(stages, wanted[n_draws // 2 :], NgramProposer, at_once=True)
    drawn = [text[0] for text in first_half + second_half]

    cells = [int(token) for token in np.flatnonzero(shares * n_draws >= 5)]
    expected = np.array([*shares[cells], 1 - shares[cells].sum()]) * n_draws
    counted = np.array([drawn.count(token) for token in cells])
    counted = np.append(counted, n_draws - counted.sum())
    assert len(cells) >= 8
    chi_square = float(((counted - expected) ** 2 / expected).sum())
    assert chi_square < len(cells) + 4.5 * math.sqrt(2 * len(cells))
