"""Chats that go on after every process has ended: in exact mode the very text, cached as far as on disk."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

import pytest

from mesh.engine import GenerationRequest
from speculative.controller import ControllerOptions
from speculative.lookup_proposers import NgramProposer
from stages.runtime.stage_runtime import RuntimeOptions
from stages.sampling.sampler import SamplingParams
from tests.support.disks import block_files, damage
from tests.support.ring_harness import collect, disk_prefixes, running_coordinator, running_stages
from tests.support.short_models import short_smollm2_path  # noqa: F401 - a fixture
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.whole_model_engine import WholeModelEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from mesh.coordinator.coordinator import Coordinator

pytestmark = pytest.mark.model
SWEEP: Final = pytest.mark.sweep

CTX_SIZE: Final = 256
NUM_SLOTS: Final = 2
SIZE: Final = 16
NUM_TOKENS: Final = 20
HOT: Final = SamplingParams(1.0, seed=11, repetition_penalty=1.2, repetition_window=30)


@contextlib.asynccontextmanager
async def mesh(
    model: Path, cuts: tuple[int, ...], cache: Path, root: Path, options: RuntimeOptions, **more: Any
) -> AsyncIterator[Coordinator]:
    """A mesh from its start to its end, whose stages tell what is on disk."""
    async with (
        running_stages(model, cuts, options, cache, disk_root=root) as stages,
        running_coordinator(
            stages,
            context_length=CTX_SIZE,
            num_slots=NUM_SLOTS,
            block_positions=SIZE,
            num_checkpoints=options.num_checkpoints,
            **more,
        ) as coordinator,
    ):
        async with asyncio.timeout(20):
            while not disk_prefixes(coordinator).is_on:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        yield coordinator


async def known(coordinator: Coordinator, num_blocks: int) -> None:
    """The coordinator knows of so many blocks at every stage."""
    async with asyncio.timeout(20):
        stages = disk_prefixes(coordinator)._stages
        while any(len(stage.names) < num_blocks for stage in stages):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def whole_text(engine: WholeModelEngine, request: GenerationRequest) -> list[int]:
    return [token async for part in engine.generate(request) for token in part.tokens]


async def ask(coordinator: Coordinator, request: GenerationRequest) -> tuple[list[int], int]:
    tokens, last = await collect(coordinator, request)
    return tokens, last.stats.num_cached


@pytest.mark.parametrize(
    "sampling", [pytest.param(SamplingParams(), marks=SWEEP), HOT], ids=["greedy", "hot"]
)
async def test_a_chat_goes_on_with_the_very_text(
    sampling: SamplingParams,
    short_smollm2_path: Path,  # noqa: F811
    stage_cache_dir: Path,
    tmp_path: Path,
) -> None:
    """With proposals in flight; then with one of its files damaged, and computed anew."""
    whole = WholeModelEngine(short_smollm2_path, context_length=CTX_SIZE, num_slots=1)
    options = RuntimeOptions(num_slots=NUM_SLOTS, ctx_size=CTX_SIZE, exact=True)
    prompt = tuple(100 + number * 37 % 900 for number in range(60)) + tuple(range(300, 330)) * 2
    first = GenerationRequest(prompt, NUM_TOKENS, sampling=sampling)
    answer = await whole_text(whole, first)
    second = GenerationRequest((*prompt, *answer, 7, 8, 9), NUM_TOKENS, sampling=sampling)
    expected = await whole_text(whole, second)
    whole.close()
    num_kept = (len(prompt) + NUM_TOKENS - 1) // SIZE * SIZE

    def serving() -> contextlib.AbstractAsyncContextManager[Coordinator]:
        return mesh(
            short_smollm2_path,
            (2, 4),
            stage_cache_dir,
            tmp_path,
            options,
            make_proposer=NgramProposer,
            controller=ControllerOptions(fixed_width=3, fixed_depth=3),
        )

    async with serving() as coordinator:
        assert await ask(coordinator, first) == (answer, 0)
        await known(coordinator, num_kept // SIZE)
    async with serving() as coordinator:
        assert await ask(coordinator, second) == (expected, num_kept)
    files = block_files([tmp_path])
    for number, path in enumerate(files):
        if path.parent == files[0].parent:
            damage(path, "flip", 4321 + 97 * number)
    async with serving() as coordinator:
        assert await ask(coordinator, second) == (expected, 0)


@pytest.mark.parametrize(
    "name", ["falcon-h1", *(pytest.param(each, marks=SWEEP) for each in ("mamba2", "qwen3next"))]
)
async def test_a_model_with_recurrent_layers_goes_on_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    """Behind the answer, or where the next turn is written otherwise, before the end of the prompt."""
    model = TINY_FAMILIES[name].write(tmp_path / f"{name}.gguf")
    whole = WholeModelEngine(model, context_length=CTX_SIZE, num_slots=1)
    options = RuntimeOptions(num_slots=NUM_SLOTS, ctx_size=CTX_SIZE, exact=True, num_checkpoints=4)
    prompt = tuple(number * 7 % 300 + 10 for number in range(90))
    first = GenerationRequest(prompt, NUM_TOKENS)
    answer = await whole_text(whole, first)
    goes_on = GenerationRequest((*prompt, *answer, 9, 9), NUM_TOKENS, sampling=SamplingParams(1.0, seed=3))
    branches = GenerationRequest((*prompt[:-3], 5, 5), NUM_TOKENS)
    turns = [(goes_on, len(prompt) + NUM_TOKENS - 1), (branches, len(prompt) - 8)]
    expected = [(await whole_text(whole, turn), num_cached) for turn, num_cached in turns]
    whole.close()
    cuts = TINY_FAMILIES[name].cuts[:1]

    def serving() -> contextlib.AbstractAsyncContextManager[Coordinator]:
        return mesh(model, cuts, tmp_path / "cache", tmp_path / "kv", options, n_vocab=320, can_trim=False)

    async with serving() as coordinator:
        assert await ask(coordinator, first) == (answer, 0)
        # Whole blocks, and one before each of two states.
        await known(coordinator, (len(prompt) + NUM_TOKENS - 2) // SIZE + 2)
    for (turn, _num_cached), found in zip(turns, expected, strict=True):
        async with serving() as coordinator:
            assert await ask(coordinator, turn) == found
            # And further, from the checkpoint in its slot.
            again = GenerationRequest((*turn.prompt, *found[0], 3), 2)
            assert (await ask(coordinator, again))[1] == len(turn.prompt) + NUM_TOKENS - 1


@pytest.mark.parametrize("name", ["gemma4", pytest.param("gpt-oss", marks=SWEEP)])
async def test_a_model_with_sliding_windows_goes_on_behind_an_answer(name: str, tmp_path: Path) -> None:
    """Its slot then holds nothing before the windows: what begins with less is computed from the start."""
    model = TINY_FAMILIES[name].write(tmp_path / f"{name}.gguf")
    whole = WholeModelEngine(model, context_length=CTX_SIZE, num_slots=1)
    options = RuntimeOptions(num_slots=NUM_SLOTS, ctx_size=CTX_SIZE, exact=True)
    prompt = tuple(number * 7 % 300 + 10 for number in range(90))
    first = GenerationRequest(prompt, NUM_TOKENS)
    answer = await whole_text(whole, first)
    goes_on = GenerationRequest((*prompt, *answer, 9, 9), NUM_TOKENS, sampling=SamplingParams(1.0, seed=3))
    branches = GenerationRequest((*prompt[:-3], 5, 5), NUM_TOKENS)
    texts = {turn: await whole_text(whole, turn) for turn in (goes_on, branches)}
    whole.close()
    num_kept = len(prompt) + NUM_TOKENS - 1

    def serving() -> contextlib.AbstractAsyncContextManager[Coordinator]:
        return mesh(
            model,
            TINY_FAMILIES[name].cuts[:1],
            tmp_path / "cache",
            tmp_path / "kv",
            options,
            n_vocab=320,
            has_windows=True,
            make_proposer=NgramProposer,
            controller=ControllerOptions(fixed_width=3, fixed_depth=3),
        )

    async with serving() as coordinator:
        assert await ask(coordinator, first) == (answer, 0)
        # Whole blocks, and one behind the last position.
        await known(coordinator, (num_kept - 1) // SIZE + 1)
        assert await ask(coordinator, branches) == (texts[branches], len(prompt) - 3), "from its slot"
    async with serving() as coordinator:
        assert await ask(coordinator, goes_on) == (texts[goes_on], num_kept)
        assert await ask(coordinator, branches) == (texts[branches], 0)
        assert coordinator.status().prefix_mismatches == 0
