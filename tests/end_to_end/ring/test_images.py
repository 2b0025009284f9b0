"""Images in a ring of real stages: the very text of the whole model, whatever is lost, cached or on disk."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest

from mesh.coordinator.options import CoordinatorOptions
from speculative.controller import ControllerOptions
from speculative.lookup_proposers import NgramProposer
from stages.certification.certify import cut_stage
from stages.layers import LayerRange
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.sampling.sampler import SamplingParams
from stages.slicing.source_model import read_source
from tests.support.repairable_ring import Deaths, RepairableRing, serving
from tests.support.ring_harness import (
    collect,
    disk_prefixes,
    plugs_for,
    running_coordinator,
    running_stages,
)
from tests.support.tiny_vision import (
    HYBRID,
    MOST_AT_ONCE,
    SEE_ALL,
    Loads,
    Part,
    image,
    prompt_of,
    text,
    whole_answer,
    write_vision,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from mesh.coordinator.coordinator import Coordinator
    from mesh.engine import GenerationRequest, PrefillProgress
    from stages.runtime.spans import Span

pytestmark = pytest.mark.model
CTX_SIZE: Final = 256
NUM_TOKENS: Final = 14
NUM_CHECKPOINTS: Final = 4
SIZE: Final = 16
SLIDING: Final = {"gemma3", "gemma4-e"}
HOT: Final = SamplingParams(1.0, seed=11, repetition_penalty=1.2, repetition_window=30)
SWEEP: Final = pytest.mark.sweep


class Dying(StageRuntime):
    """Stage that tells of each batch before it computes."""

    def __init__(self, path: Path, options: RuntimeOptions, dies: Callable[[Sequence[Span]], None]) -> None:
        super().__init__(path, options)
        self._dies = dies

    def decode(self, spans: Sequence[Span], *, is_tapped: bool = False) -> list[NDArray[np.float32]]:
        self._dies(spans)
        return super().decode(spans, is_tapped=is_tapped)


def options_of(name: str) -> RuntimeOptions:
    return RuntimeOptions(
        num_slots=2,
        ctx_size=CTX_SIZE,
        exact=True,
        num_checkpoints=NUM_CHECKPOINTS if name in HYBRID else 0,
        most_at_once=MOST_AT_ONCE if name in SEE_ALL else 0,
    )


def prompts(name: str) -> tuple[list[Part], list[Part]]:
    """A prompt of images and text, and the same with another second image."""
    start = [text(1, 40), image(name, 5, 7, 10), text(2, 9)]
    return (
        [*start, image(name, 6, 5, 4), text(3, 3), text(3, 3)],
        [*start, image(name, 7, 5, 4), text(3, 3), text(3, 3)],
    )


def cuts_of(model: Path) -> tuple[int, ...]:
    """Two cuts."""
    allowed = read_source(model).allowed_cuts
    return allowed[0], allowed[-1]


@asynccontextmanager
async def running_ring(
    name: str, model: Path, folder: Path, *, max_rows: int = 32, disk_root: Path | None = None, **options: Any
) -> AsyncIterator[Coordinator]:
    """A coordinator of three stages of a family's model."""
    stage_options = options_of(name)
    async with (
        running_stages(model, cuts_of(model), stage_options, folder / "cache", disk_root=disk_root) as stages,
        running_coordinator(
            stages,
            context_length=CTX_SIZE,
            num_slots=2,
            n_vocab=320,
            max_rows=max_rows,
            can_trim=name not in HYBRID,
            num_checkpoints=stage_options.num_checkpoints,
            **options,
        ) as coordinator,
    ):
        yield coordinator


async def ask(coordinator: Coordinator, request: GenerationRequest) -> tuple[list[int], int]:
    tokens, last = await collect(coordinator, request)
    return tokens, last.stats.num_cached


@pytest.mark.parametrize(
    "name", ["qwen3vl", "gemma3", "qwen35", "gemma4-e", pytest.param("llama", marks=SWEEP)]
)
async def test_the_very_text_and_no_image_is_taken_for_another(name: str, tmp_path: Path) -> None:
    """With proposals from the text itself; images of a cached prefix are not loaded again."""
    model, options = write_vision(name, tmp_path / "model.gguf"), options_of(name)
    one, other = prompts(name)
    wanted = {
        index: whole_answer(model, options, parts, NUM_TOKENS, HOT)
        for index, parts in enumerate((one, other))
    }
    assert wanted[0] != wanted[1]
    loads = Loads()
    first, second = (loads.request(parts, NUM_TOKENS, HOT) for parts in (one, other))
    begin = sum(len(part.ids) for part in one[:3])
    async with running_ring(
        name,
        model,
        tmp_path,
        has_windows=name in SLIDING,
        make_proposer=NgramProposer,
        controller=ControllerOptions(fixed_width=3, fixed_depth=3),
    ) as coordinator:
        assert await ask(coordinator, first) == (wanted[0], 0)
        assert loads.num_rows == 90
        found, num_cached = await ask(coordinator, second)
        assert found == wanted[1]
        # With recurrent state there is a checkpoint before the second image.
        assert (num_cached, loads.num_rows) == (begin, 110)
        # Both at once, and a turn further.
        both = await asyncio.gather(ask(coordinator, first), ask(coordinator, second))
        assert [tokens for tokens, _ in both] == [wanted[0], wanted[1]]
        further = [*one, Part(tuple(wanted[0])), text(9, 5)]
        before = loads.num_rows
        longer = whole_answer(model, options, further, NUM_TOKENS, HOT)
        request = loads.request(further, NUM_TOKENS, HOT)
        found, num_cached = await ask(coordinator, request)
        assert found == longer
        if name not in HYBRID:
            assert (num_cached >= len(prompt_of(one)), loads.num_rows) == (True, before)
        assert coordinator.status().prefix_mismatches == 0


@pytest.mark.parametrize("name", ["qwen3vl", pytest.param("gemma3", marks=SWEEP)])
async def test_of_two_images_side_by_side_the_first_is_kept(name: str, tmp_path: Path) -> None:
    model, options = write_vision(name, tmp_path / "model.gguf"), options_of(name)
    start = [text(1, 40), image(name, 5, 7, 10)]
    one, other = ([*start, image(name, seed, 5, 4), text(3, 6)] for seed in (6, 7))
    loads = Loads()
    async with running_ring(name, model, tmp_path, has_windows=name in SLIDING) as coordinator:
        for parts, num_cached, num_rows in ((one, 0, 90), (other, 110, 110)):
            wanted = whole_answer(model, options, parts, NUM_TOKENS, HOT)
            assert await ask(coordinator, loads.request(parts, NUM_TOKENS, HOT)) == (wanted, num_cached)
            assert loads.num_rows == num_rows
        assert coordinator.status().prefix_mismatches == 0


@pytest.mark.parametrize("name", ["qwen3vl", pytest.param("qwen35", marks=SWEEP)])
async def test_a_client_leaves_within_an_image(name: str, tmp_path: Path) -> None:
    """What slots hold of the image is not taken for all of it."""
    model, options = write_vision(name, tmp_path / "model.gguf"), options_of(name)
    one, _ = prompts(name)
    wanted = whole_answer(model, options, one, NUM_TOKENS, HOT)
    loads, within = Loads(), asyncio.Event()

    def note(progress: PrefillProgress) -> None:
        if 40 < progress.num_read < 110:
            within.set()

    request = loads.request(one, NUM_TOKENS, HOT)
    async with running_ring(name, model, tmp_path, max_rows=8) as coordinator:
        for _ in range(2):
            within.clear()
            running = asyncio.ensure_future(collect(coordinator, replace(request, on_prefill=note)))
            await within.wait()
            running.cancel()
            await asyncio.wait([running])
        found, num_cached = await ask(coordinator, request)
        # Up to the image; with recurrent state to a checkpoint before it.
        assert found == wanted
        assert num_cached in ({0, 32, 40} if name in HYBRID else {40})
        assert coordinator.status().prefix_mismatches == 0


@pytest.mark.parametrize(
    ("name", "news_s"),
    [
        ("qwen3vl", None),
        ("qwen3vl", 0.001),
        ("qwen35", 0.001),
        ("gemma4-e", None),
        pytest.param("gemma4-e", 0.001, marks=SWEEP),
        *(
            pytest.param(name, news_s, marks=SWEEP)
            for name in ("gemma3", "llama")
            for news_s in (None, 0.001)
        ),
    ],
)
async def test_a_stage_is_lost_before_within_and_behind_an_image(
    name: str, news_s: float | None, tmp_path: Path
) -> None:
    """Each stage in turn, with every third batch; replaced by a new one, or by one that has followed it."""
    model, options = write_vision(name, tmp_path / "model.gguf"), options_of(name)
    one, other = prompts(name)
    n_layers = read_source(model).n_layers
    files = []
    for start, stop in itertools.pairwise((0, *cuts_of(model), n_layers)):
        files.append(tmp_path / f"{start}.gguf")
        cut_stage(model, LayerRange(start, stop), files[-1])
    wanted = [whole_answer(model, options, parts, NUM_TOKENS, HOT) for parts in (one, other)]
    num_lost = 0
    for number in range(2, 40, 4):
        dies = Deaths({number: number // 4 % 3, number + 9: (number // 4 + 1) % 3})

        def make(index: int, dies: Deaths = dies) -> StageRuntime:
            return Dying(files[index], options, partial(dies, index))

        ring = dies.ring = RepairableRing(make_runtime=make, news_s=news_s)
        loads = Loads()
        requests = [loads.request(parts, NUM_TOKENS, HOT) for parts in (one, other)]
        chosen = CoordinatorOptions(
            CTX_SIZE,
            2,
            32,
            320,
            repair_wait_s=30.0,
            most_crashes=99,
            ping_timeout_s=30.0,
            can_trim=name not in HYBRID,
            controller=ControllerOptions(fixed_width=3, fixed_depth=2),
        )
        plugs = plugs_for(num_checkpoints=options.num_checkpoints)
        async with (
            asyncio.timeout(60),
            serving(
                ring, chosen, plugs=plugs, make_proposers=lambda _request: [NgramProposer()]
            ) as coordinator,
        ):
            found = await asyncio.gather(*(ask(coordinator, request) for request in requests))
            await asyncio.gather(*dies.dying)
        assert [tokens for tokens, _ in found] == wanted, number
        num_lost += dies.num_died
    assert num_lost > 10


@pytest.mark.parametrize("name", ["qwen3vl", "qwen35", "gemma3", pytest.param("gemma4-e", marks=SWEEP)])
async def test_a_chat_with_images_goes_on_from_disk(name: str, tmp_path: Path) -> None:
    model, options = write_vision(name, tmp_path / "model.gguf"), options_of(name)
    one, _ = prompts(name)
    answer = whole_answer(model, options, one, NUM_TOKENS, HOT)
    further = [*one, Part(tuple(answer)), text(9, 5)]
    seen = [*further, image(name, 8, 3, 4), text(10, 5)]
    wanted = [whole_answer(model, options, parts, NUM_TOKENS, HOT) for parts in (further, seen)]
    # A prefix from disk that ends within the first image.
    others = [*one[:2], image(name, 9, 2, 2), text(9, 5)]
    unlike = whole_answer(model, options, others, NUM_TOKENS, HOT)
    loads = Loads()
    is_hybrid, has_windows = name in HYBRID, name in SLIDING

    async def answers(requests: list[GenerationRequest]) -> list[tuple[list[int], int]]:
        async with running_ring(
            name,
            model,
            tmp_path,
            disk_root=tmp_path / "kv",
            block_positions=SIZE,
            has_windows=has_windows,
        ) as coordinator:
            async with asyncio.timeout(20):
                while not disk_prefixes(coordinator).is_on:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            found = [await ask(coordinator, request) for request in requests]
            async with asyncio.timeout(20):
                known = disk_prefixes(coordinator)._stages
                while any(len(stage.names) < 4 for stage in known):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            assert coordinator.status().prefix_mismatches == 0
            return found

    assert await answers([loads.request(one, NUM_TOKENS, HOT)]) == [(answer, 0)]
    num_loaded = loads.num_rows
    ((found, num_cached),) = await answers([loads.request(further, NUM_TOKENS, HOT)])
    assert found == wanted[0]
    # All that was computed, or whole blocks of it.
    num_kept = len(prompt_of(one)) + NUM_TOKENS - 1
    assert num_cached == (num_kept if is_hybrid or has_windows else num_kept // SIZE * SIZE)
    assert loads.num_rows == num_loaded
    ((found, num_cached),) = await answers([loads.request(seen, NUM_TOKENS, HOT)])
    assert found == wanted[1]
    # Where an image follows that sees all, behind rows of sliding windows that were brought, all is computed.
    assert (num_cached == 0) == (has_windows and name in SEE_ALL)
    ((found, num_cached),) = await answers([loads.request(others, NUM_TOKENS, HOT)])
    assert found == unlike
    assert num_cached in {0, 40, 110, 110 // SIZE * SIZE, 40 // SIZE * SIZE}
