"""Models with recurrent layers speculate: over a ring they say what they say whole, whatever was proposed."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.coordinator.coordinator import Coordinator
from mesh.coordinator.options import CoordinatorOptions
from mesh.engine import Committed, GenerationRequest
from speculative.controller import ControllerOptions
from speculative.proposer import Proposer
from stages.layers import ranges_from_cuts
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.sampling.sampler import SamplingParams
from stages.slicing.model_facts import read_model_facts
from stages.weights.virtual_stages import StageCache
from tests.qualification.random_hybrid import HybridShape, write_random_hybrid
from tests.support.proposers import Oracle
from tests.support.repairable_ring import RepairableRing, serving
from tests.support.ring_harness import plugs_for, running_coordinator, running_stages
from tests.support.status_parts import speculation_of
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.whole_model_engine import WholeModelEngine

CTX_SIZE, NUM_SLOTS, NUM_TOKENS, NUM_CHECKPOINTS = 320, 3, 40, 6
OPTIONS = RuntimeOptions(num_slots=NUM_SLOTS, ctx_size=CTX_SIZE, exact=True, num_checkpoints=NUM_CHECKPOINTS)
PROMPT = tuple(number % 300 for number in range(20, 140))
REQUESTS = (
    GenerationRequest(PROMPT, NUM_TOKENS),
    GenerationRequest(PROMPT[:9], NUM_TOKENS, sampling=SamplingParams(1.0, seed=3)),
    GenerationRequest((*PROMPT[:70], 7, 8), NUM_TOKENS, sampling=SamplingParams(1.0, seed=11)),
)
QWEN35 = HybridShape(
    n_layers=8,
    n_embd=64,
    n_ff=96,
    n_vocab=320,
    n_heads=2,
    n_heads_kv=1,
    head_width=32,
    n_state_heads=2,
    state_width=32,
)


@pytest.fixture(scope="module", params=["mamba2", "falcon-h1", "qwen35"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name: str = request.param
    path = tmp_path_factory.mktemp(name) / f"{name}.gguf"
    if name != "qwen35":
        return TINY_FAMILIES[name].write(path)
    write_random_hybrid(path, QWEN35)
    return path


@pytest.fixture(scope="module")
def whole(model: Path) -> Iterator[WholeModelEngine]:
    engine = WholeModelEngine(model, context_length=CTX_SIZE, num_slots=1)
    yield engine
    engine.close()


async def parts(engine: Coordinator | WholeModelEngine, request: GenerationRequest) -> list[Committed]:
    return [part async for part in engine.generate(request)]


async def text(engine: Coordinator | WholeModelEngine, request: GenerationRequest) -> list[int]:
    return [token for part in await parts(engine, request) for token in part.tokens]


class Oracles:
    """Proposers that know the answers of some requests, and err at some of their tokens."""

    def __init__(self, answers: Mapping[GenerationRequest, Sequence[int]], errs: Sequence[bool]) -> None:
        self._answers = answers
        self._errs = errs

    def __call__(self, request: GenerationRequest) -> Sequence[Proposer]:
        return [Oracle((*request.prompt, *self._answers[request]), self._errs)]


def cuts_of(model: Path) -> tuple[int, int]:
    n_layers = read_model_facts(model).n_layers
    return (1, 2) if n_layers <= 4 else (3, 6)


# Right always, seldom wrong, wrong as often as right, wrong always.
@pytest.mark.parametrize("errs", [(False,), (False,) * 6 + (True,), (False, True, True), (True,)])
@pytest.mark.parametrize(("width", "depth"), [(3, 1), (4, 6)])
async def test_the_text_does_not_depend_on_what_is_proposed(
    model: Path, whole: WholeModelEngine, tmp_path: Path, errs: tuple[bool, ...], width: int, depth: int
) -> None:
    answers = {request: await text(whole, request) for request in REQUESTS}
    async with (
        running_stages(model, cuts_of(model), OPTIONS, tmp_path) as stages,
        running_coordinator(
            stages,
            context_length=CTX_SIZE,
            num_slots=NUM_SLOTS,
            n_vocab=320,
            can_trim=False,
            num_checkpoints=NUM_CHECKPOINTS,
            make_proposers=Oracles(answers, errs),
            controller=ControllerOptions(fixed_width=width, fixed_depth=depth),
        ) as coordinator,
    ):
        found = await asyncio.gather(*(text(coordinator, request) for request in REQUESTS))
        speculation = speculation_of(coordinator)
        for stage in stages:
            runtime = stage.service._engine.slots.runtime
            assert all(
                len(runtime.memory.return_points(slot)) <= NUM_CHECKPOINTS + 2 for slot in range(NUM_SLOTS)
            )
    assert dict(zip(REQUESTS, found, strict=True)) == answers
    assert speculation.accepted > 0 or all(errs)
    # Only a rejection behind an accepted token makes rows be computed again.
    assert (speculation.recomputed_rows > 0) == (True in errs)


async def test_a_turn_goes_on_from_a_checkpoint(model: Path, whole: WholeModelEngine, tmp_path: Path) -> None:
    request = GenerationRequest(PROMPT, NUM_TOKENS)
    answer = await text(whole, request)
    async with (
        running_stages(model, cuts_of(model), OPTIONS, tmp_path) as stages,
        running_coordinator(
            stages,
            context_length=CTX_SIZE,
            num_slots=NUM_SLOTS,
            n_vocab=320,
            can_trim=False,
            num_checkpoints=NUM_CHECKPOINTS,
            make_proposers=Oracles({request: answer}, (False, False, True)),
            controller=ControllerOptions(fixed_width=4, fixed_depth=3),
        ) as coordinator,
    ):
        assert await text(coordinator, request) == answer
        # The whole answer stays as it was; or it is written otherwise from its header on.
        for turn, least in (
            (GenerationRequest((*PROMPT, *answer, 9, 9), 1), len(PROMPT) + NUM_TOKENS - 16),
            (GenerationRequest((*PROMPT[:-2], 5, 5), 1), len(PROMPT) - 9),
        ):
            coordinator._speculators._make_proposers = None
            found = await parts(coordinator, turn)
            assert found[-1].stats.num_cached >= least
            assert [token for part in found for token in part.tokens] == await text(whole, turn)
        assert coordinator.status().prefix_mismatches == 0


@pytest.mark.parametrize("news_s", [None, 0.01])
async def test_lost_stages_leave_no_trace(
    model: Path, whole: WholeModelEngine, tmp_path: Path, news_s: float | None
) -> None:
    """Stages that survive go on from where they are, and so do copies that followed."""
    answers = {request: await text(whole, request) for request in REQUESTS}
    cache = StageCache(tmp_path)
    cuts, n_layers = cuts_of(model), read_model_facts(model).n_layers
    files = [cache.cut(model, layers).path for layers in ranges_from_cuts(cuts, n_layers)]
    ring = RepairableRing(make_runtime=lambda index: StageRuntime(files[index], OPTIONS), news_s=news_s)
    options = CoordinatorOptions(
        CTX_SIZE,
        NUM_SLOTS,
        63,
        320,
        can_trim=False,
        controller=ControllerOptions(fixed_width=3, fixed_depth=4),
    )
    oracles, plugs = Oracles(answers, (False, False, False, True)), plugs_for(num_checkpoints=NUM_CHECKPOINTS)
    async with (
        asyncio.timeout(100),
        serving(ring, options, plugs=plugs, make_proposers=oracles) as coordinator,
    ):

        async def disturb() -> None:
            for num_tokens, index in ((2, 1), (12, 2), (24, 0)):
                while ring.furthest() < num_tokens or not coordinator.is_ready:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
                await ring.kill(index)

        disturbing = asyncio.create_task(disturb())
        found = await asyncio.gather(*(text(coordinator, request) for request in REQUESTS))
        await disturbing
    assert dict(zip(REQUESTS, found, strict=True)) == answers
    assert ring.num_repairs >= 3


async def test_a_copy_goes_on_from_the_latest_checkpoint(tmp_path: Path) -> None:
    """Of 2,000 rows fewer than 200 are computed again; the text is the undisturbed one."""
    model = tmp_path / "qwen35.gguf"
    write_random_hybrid(model, QWEN35)
    ctx_size = 2048
    runtime_options = replace(OPTIONS, ctx_size=ctx_size)
    prompt = tuple(number * 7 % 300 + 10 for number in range(1900))
    request = GenerationRequest(prompt, 110)
    cache = StageCache(tmp_path)
    files = [cache.cut(model, layers).path for layers in ranges_from_cuts((3, 6), 8)]
    options = CoordinatorOptions(
        ctx_size,
        NUM_SLOTS,
        63,
        320,
        can_trim=False,
        controller=ControllerOptions(fixed_width=3, fixed_depth=4),
    )
    answers: list[list[int]] = []
    num_rows = 0
    for is_disturbed in (False, True):
        ring = RepairableRing(
            make_runtime=lambda index: StageRuntime(files[index], runtime_options), news_s=0.01
        )
        oracles = Oracles({request: answers[0]}, (False, False, False, True)) if answers else None
        plugs = plugs_for(num_checkpoints=NUM_CHECKPOINTS)
        async with (
            asyncio.timeout(100),
            serving(ring, options, plugs=plugs, make_proposers=oracles) as coordinator,
        ):
            running = asyncio.create_task(text(coordinator, request))
            if not is_disturbed:
                answers.append(await running)
                continue
            while ring.furthest() < 90:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            replica = ring.copies[1]
            assert replica is not None
            await ring.kill(1)
            answers.append(await running)
            assert ring.num_repairs == 1
            num_rows = replica.service.stats().num_rows
    assert answers[1] == answers[0]
    # What it computed includes the rest of the answer.
    assert 0 < num_rows < 200
