"""A real draft model proposes while windows fly, in exact mode: one seed, one text, and it is often right."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from mesh.draft.drafter import read_drafter
from mesh.draft.loading import load_drafter
from mesh.engine import GenerationRequest, SpeculationLimits, SpeculationMode
from mesh.requantize import requantise
from mesh.serve.proposers import Proposers
from mesh.text.tokenizer import Tokenizer
from speculative.controller import ControllerOptions
from speculative.draft.context import DraftOptions
from speculative.draft.worker import LoadedDrafter
from stages.runtime.stage_runtime import RuntimeOptions
from stages.sampling.sampler import SamplingParams
from stages.slicing.model_facts import read_model_facts
from tests.support.ring_harness import RunningStage, collect, running_coordinator, running_stages

pytestmark = pytest.mark.model

CTX_SIZE = 256
NUM_SLOTS = 3
NUM_TOKENS = 32
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TEXTS = ("Write a function that sorts a list in Python.", "Name the planets.", "Why is the sky blue?")
SAMPLINGS = {
    "greedy": SamplingParams(),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=17),
}


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def draft(
    smollm2_path: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LoadedDrafter]:
    path = tmp_path_factory.mktemp("draft") / "draft.gguf"
    requantise(smollm2_path, "Q4_0", path)
    options = DraftOptions(draft_max=8, ctx_size=CTX_SIZE, num_sessions=NUM_SLOTS)
    model = load_drafter(read_drafter(path, read_model_facts(smollm2_path)), tokenizer, options)
    yield model
    model.close()


@pytest.fixture
async def stages(smollm2_path: Path, stage_cache_dir: Path) -> AsyncIterator[list[RunningStage]]:
    options = RuntimeOptions(num_slots=NUM_SLOTS, ctx_size=CTX_SIZE, exact=True)
    async with running_stages(smollm2_path, (10, 20), options, stage_cache_dir) as running:
        yield running


def request(
    tokenizer: Tokenizer, text: str, sampling: SamplingParams, mode: SpeculationMode
) -> GenerationRequest:
    prompt = tokenizer.encode(CHAT.format(text), add_special=False, parse_special=True)
    return GenerationRequest(
        tuple(prompt),
        NUM_TOKENS,
        tokenizer.end_tokens,
        sampling,
        SpeculationLimits(mode),
    )


@pytest.mark.parametrize(
    ("sampling", "width", "depth"),
    [
        pytest.param(
            sampling,
            width,
            depth,
            id=f"{name}-{width}-{depth}",
            marks=[] if (name == "greedy") == (depth == 1) else pytest.mark.sweep,
        )
        for name, sampling in SAMPLINGS.items()
        for width, depth in ((4, 1), (2, 6))
    ],
)
async def test_one_seed_one_text(
    stages: list[RunningStage],
    draft: LoadedDrafter,
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    width: int,
    depth: int,
) -> None:
    async with running_coordinator(
        stages,
        context_length=CTX_SIZE,
        num_slots=NUM_SLOTS,
        make_proposers=Proposers("auto", draft=draft),
        controller=ControllerOptions(fixed_width=width, fixed_depth=depth),
    ) as coordinator:
        plain = [(await collect(coordinator, request(tokenizer, text, sampling, "off")))[0] for text in TEXTS]
        alone, last = await collect(coordinator, request(tokenizer, TEXTS[0], sampling, "draft"))
        together = await asyncio.gather(
            *(collect(coordinator, request(tokenizer, text, sampling, "auto")) for text in TEXTS)
        )
    assert alone == plain[0]
    assert [tokens for tokens, _ in together] == plain
    # How much is proposed depends on how quick the draft is here and now; that it is often right does not.
    stats = [last.stats, *(each.stats for _, each in together)]
    assert sum(each.num_proposed for each in stats) > 0
    assert sum(each.num_accepted for each in stats) > 0.3 * sum(each.num_proposed for each in stats)
