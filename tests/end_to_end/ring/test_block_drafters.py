"""Drafters of blocks, over real stages in exact mode: the text is the target's own.

The drafters have random weights. So that drafts are accepted, too, some of their proposers choose the tokens
of the plain answer, where the test says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mesh.coordinator.options import CoordinatorOptions
from mesh.engine import GenerationRequest
from speculative.controller import ControllerOptions
from speculative.draft.block_sequence import BlockSequence
from speculative.proposer import DrafterKind
from stages.layers import ranges_from_cuts
from stages.runtime.numerics import EXACT_MAX_ROWS
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.sampling.sampler import Sampler, SamplingParams
from stages.weights.virtual_stages import StageCache
from tests.end_to_end.ring.test_feature_drafters import (
    CTX_SIZE,
    NUM_TOKENS,
    QUESTIONS,
    SAMPLINGS,
    Setting,
    check_crash,
    target_and_drafter,
    texts,
)
from tests.support.repairable_ring import RepairableRing, serving
from tests.support.ring_harness import collect, plugs_for, running_stages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from speculative.draft.worker import DraftProposer
    from tests.support.ring_harness import RunningStage

pytestmark = pytest.mark.model

CUTS = (10, 20)
KINDS = (DrafterKind.DFLASH, DrafterKind.DSPARK, DrafterKind.DFLASH2)
LONG = 64
IN_SWEEP = [pytest.param(kind, marks=pytest.mark.sweep) for kind in (DrafterKind.DFLASH, DrafterKind.DFLASH2)]


class BlockSetting(Setting):
    """A target, its block drafter, and proposers that may know the answers."""

    def __init__(self, target: Path, kind: DrafterKind, folder: Path) -> None:
        super().__init__(*target_and_drafter(kind.value, target, folder), folder)
        # Tokens behind a prompt; what is drafted behind it is right.
        self.known: dict[tuple[int, ...], list[int]] = {}
        self.opened: list[DraftProposer] = []

    def open(self, request: GenerationRequest) -> DraftProposer:
        sample = Sampler(request.sampling, len(request.prompt)).sample
        known = self.known.get(request.prompt)

        def choose(logits: NDArray[np.float32], position: int, before: Sequence[int]) -> int:
            place = position - len(request.prompt)
            if known is None or not 0 <= place < len(known):
                return sample(logits, position, before)
            return known[place]

        proposer = self.model.open(choose)
        take = proposer.take_features
        proposer.take_features = lambda start, rows: take(start, self.change(rows))
        self.opened.append(proposer)
        return proposer

    def sequence(self) -> BlockSequence:
        """Text of the newest proposer."""
        sequence = self.opened[-1]._session.sequence
        assert isinstance(sequence, BlockSequence)
        return sequence


@pytest.fixture(scope="module")
def setting_of(
    smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[DrafterKind], BlockSetting]]:
    folder = tmp_path_factory.mktemp("drafters")
    with contextlib.ExitStack() as stack:

        @functools.cache
        def make(kind: DrafterKind) -> BlockSetting:
            made = BlockSetting(smollm2_path, kind, folder)
            stack.callback(made.model.close)
            return made

        yield make


@pytest.fixture
def setting(
    request: pytest.FixtureRequest, setting_of: Callable[[DrafterKind], BlockSetting]
) -> BlockSetting:
    found = setting_of(request.param)
    found.known.clear()
    return found


@pytest.fixture
async def stages(smollm2_path: Path, stage_cache_dir: Path) -> AsyncIterator[list[RunningStage]]:
    options = RuntimeOptions(num_slots=4, ctx_size=CTX_SIZE, exact=True)
    async with running_stages(smollm2_path, CUTS, options, stage_cache_dir) as running:
        yield running


def known_answers(
    setting: BlockSetting, sampling: SamplingParams, plain: Sequence[list[int]]
) -> dict[tuple[int, ...], list[int]]:
    prompts = [setting.request(question, sampling).prompt for question in QUESTIONS]
    return dict(zip(prompts, plain, strict=True))


@pytest.mark.parametrize(
    ("setting", "sampling"),
    # Of each kind one way to sample; the sweep has the other.
    [
        pytest.param(
            kind,
            sampling,
            id=f"{kind.value}-{name}",
            marks=[] if (kind is DrafterKind.DFLASH) == (name == "greedy") else pytest.mark.sweep,
        )
        for kind in KINDS
        for name, sampling in SAMPLINGS.items()
    ],
    indirect=["setting"],
)
async def test_the_text_is_the_same_whatever_is_drafted(
    setting: BlockSetting, stages: list[RunningStage], sampling: SamplingParams
) -> None:
    async with setting.coordinator(stages, is_on=False) as coordinator:
        plain, _ = await texts(setting, coordinator, sampling)
    # Random drafts, nearly all of them rejected.
    async with setting.coordinator(stages) as coordinator:
        assert (await texts(setting, coordinator, sampling))[0] == plain
    assert setting.sequence().real_stop > 0
    # All of them right.
    setting.known = known_answers(setting, sampling, plain)
    async with setting.coordinator(stages) as coordinator:
        drafted, num_accepted = await texts(setting, coordinator, sampling)
        assert drafted == plain
        assert num_accepted > NUM_TOKENS // 2
        # Several sessions at once, in one pass of the drafter, of which every other drafts at random.
        del setting.known[setting.request(QUESTIONS[0], sampling).prompt]
        requests = [setting.request(question, sampling) for question in (*QUESTIONS, *QUESTIONS)]
        together = await asyncio.gather(*(collect(coordinator, request) for request in requests))
        assert [tokens for tokens, _ in together] == [*plain, *plain]
        assert sum(last.stats.num_accepted for _, last in together) > NUM_TOKENS // 4


@pytest.mark.parametrize("setting", [DrafterKind.DSPARK, *IN_SWEEP], indirect=True)
async def test_wrong_features_cost_acceptance_only(setting: BlockSetting, stages: list[RunningStage]) -> None:
    async with setting.coordinator(stages, is_on=False) as coordinator:
        plain, _ = await texts(setting, coordinator, SamplingParams())
    noise = np.random.default_rng(3)
    setting.change = lambda rows: noise.standard_normal(rows.shape).astype(np.float32)
    try:
        async with setting.coordinator(stages) as coordinator:
            assert (await texts(setting, coordinator, SamplingParams()))[0] == plain
    finally:
        setting.change = lambda rows: rows


@pytest.mark.parametrize("setting", [DrafterKind.DSPARK, *IN_SWEEP], indirect=True)
async def test_the_second_turn_drafts_at_once(setting: BlockSetting, stages: list[RunningStage]) -> None:
    """Rows of the first turn are reused, as the stages reuse theirs."""
    async with setting.coordinator(stages) as coordinator:
        first = setting.request(QUESTIONS[0], SamplingParams())
        tokens, _ = await collect(coordinator, first)
        more = setting.tokenizer.encode("<|im_end|>\n", add_special=False, parse_special=True)
        second = GenerationRequest((*first.prompt, *tokens, *more), 64)
        again, last = await collect(coordinator, second)
        assert last.stats.num_cached >= len(first.prompt)
        sequence = setting.sequence()
        assert sequence.first_row <= 1, "it did not begin anew behind the cached tokens"
        assert sequence.real_stop > len(second.prompt)
    async with setting.coordinator(stages, is_on=False) as coordinator:
        assert (await collect(coordinator, second))[0] == again


@pytest.mark.parametrize("lost", [1, pytest.param(2, marks=pytest.mark.sweep)])
async def test_a_repair_leaves_no_gap_in_the_features(
    setting_of: Callable[[DrafterKind], BlockSetting], stage_cache_dir: Path, lost: int
) -> None:
    setting = setting_of(DrafterKind.DFLASH)
    cache = StageCache(stage_cache_dir)
    files = [cache.cut(setting.target, layers).path for layers in ranges_from_cuts(CUTS, 30)]
    runtime_options = RuntimeOptions(num_slots=4, ctx_size=CTX_SIZE, exact=True)
    ring = RepairableRing(make_runtime=lambda index: StageRuntime(files[index], runtime_options))
    options = CoordinatorOptions(
        CTX_SIZE,
        4,
        EXACT_MAX_ROWS,
        setting.tokenizer.n_vocab,
        controller=ControllerOptions(fixed_width=3, fixed_depth=3),
        ping_timeout_s=30.0,
    )
    # As long as it is asked for.
    request = GenerationRequest(setting.request(QUESTIONS[0], SamplingParams()).prompt, LONG)
    plugs = plugs_for(feature_needs=setting.needs)
    async with serving(
        ring, options, plugs=plugs, make_proposers=lambda request: [setting.open(request)]
    ) as coordinator:
        whole, _ = await collect(coordinator, request)
        setting.known = {request.prompt: whole}
        tokens: list[int] = []
        dying = None
        async for part in coordinator.generate(request):
            tokens += part.tokens
            if dying is None and len(tokens) >= LONG // 4:
                dying = asyncio.create_task(ring.kill(lost))
        assert dying is not None
        await dying
    assert tokens == whole
    assert ring.num_repairs == 1
    sequence = setting.sequence()
    assert sequence.first_row <= 1, "it began anew behind a gap"
    # Of the latest tokens, three windows of four rows at the least, they may come after the end.
    positions = range(len(request.prompt) + LONG - 24)
    assert [position for position in positions if position not in sequence.features] == []


async def test_a_crash_of_the_drafter_ends_drafting_and_nothing_else(
    smollm2_path: Path, tmp_path: Path, stages: list[RunningStage]
) -> None:
    setting = BlockSetting(smollm2_path, DrafterKind.DSPARK, tmp_path)
    try:
        async with setting.coordinator(stages, is_on=False) as coordinator:
            plain, _ = await texts(setting, coordinator, SamplingParams())
        setting.known = known_answers(setting, SamplingParams(), plain)
        async with setting.coordinator(stages) as coordinator:
            await check_crash(setting, coordinator, plain[0])
    finally:
        setting.model.close()
