"""Drafters of blocks, over real stages in exact mode: the text is the target's own.

The drafters have random weights. So that drafts are accepted, too, some of their proposers choose the tokens
of the plain answer, where the test says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mesh.draft.drafter import read_drafter
from mesh.engine import GenerationRequest
from speculative.draft.block_sequence import BlockSequence
from speculative.proposer import DrafterKind
from stages.runtime.stage_runtime import RuntimeOptions
from stages.sampling.sampler import Sampler, SamplingParams
from stages.slicing.model_facts import read_model_facts
from tests.end_to_end.ring.test_draft_oracle import connected
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
from tests.support.block_cases import RING_TARGETS, ring_case
from tests.support.repairable_ring import NUM_STAGES
from tests.support.ring_harness import collect, running_stages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from mesh.draft.drafter import Drafter
    from speculative.draft.worker import DraftProposer
    from speculative.proposer import Proposal
    from tests.support.ring_harness import RunningStage

pytestmark = pytest.mark.model

CUTS = (10, 20)
KINDS = (DrafterKind.DFLASH, DrafterKind.DSPARK, DrafterKind.DFLASH2)
# Of each kind one temperature; the sweep has the others, and models of other kinds.
IN_SUITE = {
    ("qwen3", DrafterKind.DFLASH, 0.0),
    ("qwen3", DrafterKind.DSPARK, 0.2),
    ("qwen3", DrafterKind.DFLASH2, 0.8),
}
PROMPTS = (tuple(range(24, 37)), tuple(range(50, 59)))
LONG = 64
# Where other programs run, blocks may come too late for an answer.
TRIES = 8
# Features of tiny models come with verdicts, and a block takes milliseconds.
PATIENCE_S = 0.3
IN_SWEEP = [pytest.param(kind, marks=pytest.mark.sweep) for kind in (DrafterKind.DFLASH, DrafterKind.DFLASH2)]


class BlockSetting(Setting):
    """A target, its block drafter, and proposers that may know the answers, or nothing."""

    def __init__(self, target: Path, drafter: Drafter, folder: Path) -> None:
        super().__init__(target, drafter, folder)
        # Draws what is drafted, whatever the drafter says.
        self.noise: np.random.Generator | None = None
        # Tokens behind a prompt; what is drafted behind it is right.
        self.known: dict[tuple[int, ...], list[int]] = {}
        # How long proposers wait for a draft.
        self.patience_s = 0.0
        self.opened: list[DraftProposer] = []

    def open(self, request: GenerationRequest) -> DraftProposer:
        sample = Sampler(request.sampling, len(request.prompt)).sample
        known = self.known.get(request.prompt)

        def choose(logits: NDArray[np.float32], position: int, before: Sequence[int]) -> int:
            if self.noise is not None:
                return int(self.noise.integers(len(logits)))
            place = position - len(request.prompt)
            if known is None or not 0 <= place < len(known):
                return sample(logits, position, before)
            return known[place]

        proposer = self.model.open(choose)
        take = proposer.take_features
        proposer.take_features = lambda start, rows: take(start, self.change(rows))
        propose = proposer.propose

        def wait(max_tokens: int, after: Sequence[int] = ()) -> Proposal:
            proposal = propose(max_tokens, after)
            until_s = time.monotonic() + self.patience_s
            while max_tokens and not proposal.tokens and time.monotonic() < until_s:
                time.sleep(0.0005)
                proposal = propose(max_tokens, after)
            return proposal

        proposer.propose = wait  # type: ignore[method-assign]
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
            made = BlockSetting(*target_and_drafter(kind.value, smollm2_path, folder), folder)
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
    # One of them; the sweep has the others, and the suite has all kinds with tiny models below.
    [
        pytest.param(
            kind,
            sampling,
            id=f"{kind.value}-{name}",
            marks=[] if (kind, name) == (DrafterKind.DFLASH, "greedy") else pytest.mark.sweep,
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
        for _ in range(TRIES):
            drafted, num_accepted = await texts(setting, coordinator, sampling)
            assert drafted == plain
            if num_accepted > NUM_TOKENS // 2:
                break
        assert num_accepted > NUM_TOKENS // 2
        # Several sessions at once, in one pass of the drafter, of which every other drafts at random.
        del setting.known[setting.request(QUESTIONS[0], sampling).prompt]
        requests = [setting.request(question, sampling) for question in (*QUESTIONS, *QUESTIONS)]
        for _ in range(TRIES):
            together = await asyncio.gather(*(collect(coordinator, request) for request in requests))
            assert [tokens for tokens, _ in together] == [*plain, *plain]
            num_accepted = sum(last.stats.num_accepted for _, last in together)
            if num_accepted > NUM_TOKENS // 4:
                break
        assert num_accepted > NUM_TOKENS // 4


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
    # As long as it is asked for.
    request = GenerationRequest(setting.request(QUESTIONS[0], SamplingParams()).prompt, LONG)
    options = RuntimeOptions(num_slots=4, ctx_size=CTX_SIZE, exact=True)
    async with setting.repairable(
        CUTS, options, stage_cache_dir, lambda request: [setting.open(request)]
    ) as (ring, coordinator):
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


@pytest.mark.parametrize(
    ("target", "kind", "temperature"),
    [
        pytest.param(*each, marks=[] if each in IN_SUITE else pytest.mark.sweep)
        for each in itertools.product(RING_TARGETS, KINDS, (0.0, 0.2, 0.8))
    ],
    ids=lambda value: value.value if isinstance(value, DrafterKind) else str(value),
)
async def test_no_loss_and_no_draft_changes_the_text(
    target: str, kind: DrafterKind, temperature: float, tmp_path: Path
) -> None:
    model, path = ring_case(target, kind).write(tmp_path)
    setting = BlockSetting(model, read_drafter(path, read_model_facts(model)), tmp_path)
    setting.patience_s = PATIENCE_S
    sampling = SamplingParams(temperature, seed=5)
    requests = [GenerationRequest(prompt, NUM_TOKENS, sampling=sampling) for prompt in PROMPTS]
    is_on = False

    async def answers() -> tuple[list[list[int]], int]:
        found = [await collect(coordinator, request) for request in requests]
        return [tokens for tokens, _ in found], sum(last.stats.num_accepted for _, last in found)

    try:
        async with setting.repairable(
            RING_TARGETS[target].cuts,
            RING_TARGETS[target].options(),
            tmp_path,
            lambda request: [setting.open(request)] if is_on else [],
            has_windows=RING_TARGETS[target].has_windows,
            depth=1,
        ) as (ring, coordinator):
            plain, _ = await answers()
            await connected(coordinator)
            is_on = True
            assert (await answers())[0] == plain
            assert setting.sequence().real_stop > 0
            setting.noise = np.random.default_rng(7)
            assert (await answers())[0] == plain
            setting.noise = None
            # All drafts are right, so that some are accepted before the tail and the drafter are lost.
            setting.known = dict(zip(PROMPTS, plain, strict=True))
            drafted, num_accepted = await answers()
            assert drafted == plain
            assert num_accepted > NUM_TOKENS // 2
            tokens: list[int] = []
            dying = None
            async for part in coordinator.generate(requests[0]):
                tokens += part.tokens
                if dying is None and len(tokens) >= NUM_TOKENS // 4:
                    dying = asyncio.create_task(ring.kill(NUM_STAGES - 1))
            assert dying is not None
            await dying
            assert tokens == plain[0]
            assert ring.num_repairs == 1
            await check_crash(setting, coordinator, requests[0], plain[0])
    finally:
        setting.model.close()


@pytest.mark.sweep
async def test_a_crash_of_the_drafter_ends_drafting_and_nothing_else(
    smollm2_path: Path, tmp_path: Path, stages: list[RunningStage]
) -> None:
    setting = BlockSetting(*target_and_drafter("dspark", smollm2_path, tmp_path), tmp_path)
    try:
        async with setting.coordinator(stages, is_on=False) as coordinator:
            plain, _ = await texts(setting, coordinator, SamplingParams())
        setting.known = known_answers(setting, SamplingParams(), plain)
        async with setting.coordinator(stages) as coordinator:
            request = setting.request(QUESTIONS[0], SamplingParams())
            await check_crash(setting, coordinator, request, plain[0])
    finally:
        setting.model.close()
