"""Exact mode, real stages: an answer whose stages are lost and moved on the way is the undisturbed one."""

import asyncio
from pathlib import Path

import pytest

from mesh.coordinator.coordinator import Coordinator
from mesh.coordinator.options import CoordinatorOptions
from mesh.engine import Committed, GenerationRequest
from mesh.text.tokenizer import Tokenizer
from speculative.controller import ControllerOptions
from speculative.lookup_proposers import NgramProposer
from stages.layers import ranges_from_cuts
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.sampling.sampler import SamplingParams
from stages.slicing.model_facts import read_model_facts
from stages.weights.virtual_stages import StageCache
from tests.support.repairable_ring import RepairableRing, serving

pytestmark = pytest.mark.model

NUM_TOKENS = 20
GRAMMAR = 'root ::= ("{" [a-z]{2,9} ":" [0-9]{1,3} "} ")*'
PENALTIES = SamplingParams(0.8, seed=7, repetition_penalty=1.2, frequency_penalty=0.4, repetition_window=64)
# Longer than a chunk, and short; greedy, drawn, and with a memory of what was said.
REQUESTS = (
    GenerationRequest(
        tuple(range(100, 170)), NUM_TOKENS, num_top_logprobs=2, uses_cache=False, scores_prompt=True
    ),
    # Held to a grammar, which a new tail follows again from its beginning.
    GenerationRequest(
        (504, 28, 216, 28, 260, 28), NUM_TOKENS, sampling=SamplingParams(1.0, seed=3), grammar=GRAMMAR
    ),
    GenerationRequest(tuple(range(900, 920)), NUM_TOKENS, sampling=PENALTIES, num_top_logprobs=0),
    # Replays begin with what the first has computed.
    GenerationRequest((*range(100, 150), 7, 8), NUM_TOKENS, sampling=SamplingParams(1.0, seed=11)),
)
TIMES = ((0, "kill 1"), (4, "kill 2"), (8, "move"), (12, "kill 0"))


async def answers(coordinator: Coordinator) -> list[list[Committed]]:
    async def read(request: GenerationRequest) -> list[Committed]:
        return [part async for part in coordinator.generate(request)]

    return list(await asyncio.gather(*map(read, REQUESTS)))


async def disturb(ring: RepairableRing) -> None:
    """Do each thing as soon as a session has got so far."""
    for num_tokens, what in TIMES:
        while ring.furthest() < num_tokens or not ring.coordinator.is_ready:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        if what == "move":
            ring.coordinator.pause(what)
            await ring.repair()
        else:
            await ring.kill(int(what.removeprefix("kill ")))


async def test_lost_and_moved_stages_leave_no_trace(smollm2_path: Path, stage_cache_dir: Path) -> None:
    cache = StageCache(stage_cache_dir)
    ranges = ranges_from_cuts((10, 20), read_model_facts(smollm2_path).n_layers)
    files = [cache.cut(smollm2_path, layers).path for layers in ranges]
    runtime_options = RuntimeOptions(num_slots=4, ctx_size=256, exact=True)
    ring = RepairableRing(make_runtime=lambda index: StageRuntime(files[index], runtime_options))
    options = CoordinatorOptions(
        256,
        4,
        63,
        49152,
        controller=ControllerOptions(fixed_width=3, fixed_depth=3),
        token_texts=lambda: Tokenizer(smollm2_path).texts,
    )
    async with (
        asyncio.timeout(200),
        serving(ring, options, make_proposers=lambda _request: [NgramProposer()]) as coordinator,
    ):
        undisturbed = await answers(coordinator)
        disturbing = asyncio.create_task(disturb(ring))
        disturbed = await answers(coordinator)
        await disturbing
    assert ring.num_repairs >= len(TIMES)
    assert len(undisturbed[0][0].prompt_logprobs) == len(REQUESTS[0].prompt) - 1
    for one, other in zip(undisturbed, disturbed, strict=True):
        assert [token for part in one for token in part.tokens] == [
            token for part in other for token in part.tokens
        ]
        assert [each for part in one for each in part.logprobs] == [
            each for part in other for each in part.logprobs
        ]
        assert [each for part in one for each in part.prompt_logprobs] == [
            each for part in other for each in part.prompt_logprobs
        ]
        assert other[-1].stats.num_replays == ring.num_repairs
