"""Models whose sessions cannot go back: over a ring they say what they say whole, whatever happens to it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.coordinator.coordinator import Coordinator
from mesh.coordinator.options import CoordinatorOptions
from mesh.engine import Committed, GenerationRequest
from stages.layers import LayerRange, ranges_from_cuts
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.sampling.sampler import SamplingParams
from stages.weights.virtual_stages import StageCache
from tests.support.repairable_ring import RepairableRing, serving
from tests.support.ring_harness import running_coordinator, running_stages
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_models import N_VOCAB
from tests.support.whole_model_engine import WholeModelEngine

CTX_SIZE, NUM_SLOTS, NUM_TOKENS = 192, 3, 12
PROMPT = tuple(range(20, 65))
OPTIONS = RuntimeOptions(num_slots=NUM_SLOTS, ctx_size=CTX_SIZE, exact=True)
REQUESTS = (
    GenerationRequest(PROMPT, NUM_TOKENS),
    GenerationRequest(PROMPT[:9], NUM_TOKENS, sampling=SamplingParams(1.0, seed=3)),
    # Begins as the first does.
    GenerationRequest((*PROMPT[:30], 7, 8), NUM_TOKENS, sampling=SamplingParams(1.0, seed=11)),
)


@pytest.fixture(scope="module", params=["mamba2", "falcon-h1"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name: str = request.param
    return TINY_FAMILIES[name].write(tmp_path_factory.mktemp(name) / f"{name}.gguf")


@pytest.fixture(scope="module")
def whole(model: Path) -> Iterator[WholeModelEngine]:
    engine = WholeModelEngine(model, context_length=CTX_SIZE, num_slots=1)
    yield engine
    engine.close()


async def parts(engine: Coordinator | WholeModelEngine, request: GenerationRequest) -> list[Committed]:
    return [part async for part in engine.generate(request)]


async def text(engine: Coordinator | WholeModelEngine, request: GenerationRequest) -> list[int]:
    return [token for part in await parts(engine, request) for token in part.tokens]


async def test_slots_change_hands_whole_or_empty(
    model: Path, whole: WholeModelEngine, tmp_path: Path
) -> None:
    """At once; a chat that goes on, which finds its slot as it left it; one that is hung up on."""
    expected = [await text(whole, request) for request in REQUESTS]
    async with (
        running_stages(model, (1, 2), OPTIONS, tmp_path) as stages,
        running_coordinator(
            stages, context_length=CTX_SIZE, num_slots=NUM_SLOTS, n_vocab=N_VOCAB, can_trim=False
        ) as coordinator,
    ):
        assert not any(stage.service._info.can_trim for stage in stages)
        assert await asyncio.gather(*(text(coordinator, request) for request in REQUESTS)) == expected
        turn = GenerationRequest((*PROMPT, *expected[0], 9, 9), NUM_TOKENS)
        answer = await parts(coordinator, turn)
        assert answer[-1].stats.num_cached == len(PROMPT) + NUM_TOKENS - 1
        assert [token for part in answer for token in part.tokens] == await text(whole, turn)
        other = GenerationRequest((*PROMPT, 5, 5), NUM_TOKENS)
        answer = await parts(coordinator, other)
        assert answer[-1].stats.num_cached == 0
        assert [token for part in answer for token in part.tokens] == await text(whole, other)
        stream = coordinator.generate(REQUESTS[0])
        await anext(stream)
        await stream.aclose()
        for request, tokens in zip(REQUESTS, expected, strict=True):
            assert await text(coordinator, request) == tokens


async def test_lost_stages_leave_no_trace(model: Path, whole: WholeModelEngine, tmp_path: Path) -> None:
    """Stages that survive compute everything again: what they hold lies further on."""
    expected = [await text(whole, request) for request in REQUESTS]
    cache = StageCache(tmp_path)
    n_layers = 4 if model.stem == "mamba2" else 3
    files = [cache.cut(model, layers).path for layers in ranges_from_cuts((1, 2), n_layers)]
    ring = RepairableRing(make_runtime=lambda index: StageRuntime(files[index], OPTIONS))
    options = CoordinatorOptions(CTX_SIZE, NUM_SLOTS, 63, N_VOCAB, can_trim=False)
    async with asyncio.timeout(100), serving(ring, options) as coordinator:

        async def disturb() -> None:
            for num_tokens, index in ((2, 1), (5, 2), (8, 0)):
                while ring.furthest() < num_tokens or not coordinator.is_ready:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
                await ring.kill(index)

        disturbing = asyncio.create_task(disturb())
        answers = await asyncio.gather(*(text(coordinator, request) for request in REQUESTS))
        await disturbing
    assert answers == expected
    assert ring.num_repairs >= 3


def test_a_stage_knows_that_it_cannot_go_back(model: Path, tmp_path: Path) -> None:
    runtime = StageRuntime(StageCache(tmp_path).cut(model, LayerRange(0, 1)).path, OPTIONS)
    assert not runtime.info.can_trim
    runtime.close()
