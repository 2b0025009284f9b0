"""Rings of stages on a GPU and on the processor: repairs from one to the other, and copies that follow."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from mesh.coordinator.options import CoordinatorOptions
from mesh.engine import GenerationRequest
from stages.layers import ranges_from_cuts
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.slicing.model_facts import read_model_facts
from stages.weights.virtual_stages import StageCache
from tests.qualification.device_parity import PROCESSOR, follow
from tests.stages.serving.test_kv_replication import until_sent
from tests.support.float_models import write_float
from tests.support.repairable_ring import RepairableRing, serving
from tests.support.ring_harness import collect
from tests.support.tiny_models import N_VOCAB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from stages.runtime.devices import Device

pytestmark = pytest.mark.gpu
CTX_SIZE, NUM_SLOTS, NUM_TOKENS = 192, 3, 24
PROMPT = tuple(range(20, 120))
MODELS = {"llama": (2, 4), "gemma3": (2, 4), "qwen3moe": (1, 2), "falcon-h1": (1, 2)}


def write(name: str, folder: Path) -> Path:
    return write_float(name, folder / f"{name}.gguf")


def maker(
    model: Path, folder: Path, gpu: Device, is_on_gpu: Callable[[int, int], bool]
) -> Callable[[int], StageRuntime]:
    """Loads stages, on the GPU if that is wanted of an index and the times that it was loaded before."""
    facts, cache = read_model_facts(model), StageCache(folder / "stages")
    ranges = ranges_from_cuts(MODELS[model.stem], facts.n_layers)
    files = [cache.cut(model, layers).path for layers in ranges]
    loaded = Counter[int]()

    def make(index: int) -> StageRuntime:
        gpu_layers = ((gpu.name, len(ranges[index])),) if is_on_gpu(index, loaded[index]) else ()
        loaded[index] += 1
        options = RuntimeOptions(num_slots=NUM_SLOTS, ctx_size=CTX_SIZE, gpu_layers=gpu_layers)
        return StageRuntime(files[index], options)

    return make


def options_of(model: Path) -> CoordinatorOptions:
    return CoordinatorOptions(CTX_SIZE, NUM_SLOTS, 63, N_VOCAB, can_trim=read_model_facts(model).can_trim)


def require_model_s_own(model: Path, prompt: Sequence[int], said: list[int]) -> None:
    """What was said is what the whole model would say on the processor after the same text."""
    assert len(said) == NUM_TOKENS
    with closing(StageRuntime(model, RuntimeOptions(ctx_size=CTX_SIZE, gpu_layers=()))) as whole:
        chosen, _ = follow([whole], prompt, NUM_TOKENS, said)
    agreed = sum(ours == theirs for ours, theirs in zip(chosen, said, strict=True))
    print(f"{model.stem}: {agreed} of {NUM_TOKENS}")
    assert agreed >= PROCESSOR.least_share * NUM_TOKENS


@pytest.mark.parametrize("name", MODELS)
async def test_a_stage_moves_from_gpu_to_processor_and_back(name: str, tmp_path: Path, gpu: Device) -> None:
    """The first on the processor, the last on the GPU, and the middle one on the other after each loss."""
    model = write(name, tmp_path)
    make = maker(model, tmp_path, gpu, lambda index, before: index == 2 or (index == 1 and before % 2 == 0))
    ring = RepairableRing(make_runtime=make)
    requests = [GenerationRequest(PROMPT[:length], NUM_TOKENS) for length in (100, 40, 7)]
    async with asyncio.timeout(200), serving(ring, options_of(model)) as coordinator:

        async def disturb() -> None:
            for num_tokens in (4, 12):
                while ring.furthest() < num_tokens or not coordinator.is_ready:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
                await ring.kill(1)

        disturbing = asyncio.create_task(disturb())
        answers = await asyncio.gather(*(collect(coordinator, request) for request in requests))
        await disturbing
    assert ring.num_repairs >= 2
    for request, (said, _) in zip(requests, answers, strict=True):
        require_model_s_own(model, request.prompt, said)


@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
@pytest.mark.parametrize("is_stage_on_gpu", [True, False])
async def test_a_copy_follows_from_gpu_to_processor_and_from_there(
    name: str, *, is_stage_on_gpu: bool, tmp_path: Path, gpu: Device
) -> None:
    model = write(name, tmp_path)
    make = maker(model, tmp_path, gpu, lambda index, before: index == 1 and (before == 0) == is_stage_on_gpu)
    ring = RepairableRing(make_runtime=make, news_s=0.001)
    async with asyncio.timeout(200), serving(ring, options_of(model)) as coordinator:
        parts = coordinator.generate(GenerationRequest(PROMPT, NUM_TOKENS))
        said = list((await anext(parts)).tokens)
        await until_sent(ring, len(PROMPT))
        replica = ring.copies[1]
        assert replica is not None
        before = replica.service.stats().num_rows
        await ring.kill(1)
        async for part in parts:
            said += part.tokens
        num_rows = replica.service.stats().num_rows - before
        assert ring.num_repairs == 1
    require_model_s_own(model, PROMPT, said)
    # What it was told it does not compute again.
    assert 0 < num_rows < len(PROMPT)
