"""Drafters that read features, over real stages in exact mode: the text is the target's own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mesh.coordinator.feature_store import FeatureNeeds
from mesh.coordinator.options import CoordinatorOptions
from mesh.draft.drafter import own_head, read_drafter
from mesh.draft.loading import load_drafter
from mesh.engine import GenerationRequest
from mesh.text.tokenizer import Tokenizer
from speculative.controller import ControllerOptions
from speculative.draft.context import DraftOptions
from speculative.draft.session import FeatureSequence
from speculative.proposer import DrafterKind
from stages.layers import ranges_from_cuts
from stages.runtime.numerics import EXACT_MAX_ROWS
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.sampling.sampler import Sampler, SamplingParams
from stages.serving.feature_outlet import FeatureOutlet
from stages.slicing.model_facts import read_model_facts
from stages.weights.virtual_stages import StageCache
from tests.support.block_drafters import BlockDrafter
from tests.support.eagle3 import DRAFTER
from tests.support.mimo2 import write_mimo2
from tests.support.repairable_ring import RepairableRing, serving
from tests.support.ring_harness import (
    collect,
    feature_streams,
    plugs_for,
    running_coordinator,
    running_stages,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from mesh.coordinator.coordinator import Coordinator
    from mesh.draft.drafter import Drafter
    from speculative.draft.worker import DraftProposer
    from tests.support.ring_harness import RunningStage

pytestmark = pytest.mark.model

CTX_SIZE = 256
NUM_TOKENS = 24
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QUESTIONS = ("What is a tree?", "Count from one to ten.")
KINDS = ("eagle3", "mtp")
# It reads layers as published drafters of blocks do: five, from an early to a late one.
BLOCKS = BlockDrafter(
    reads=(2, 9, 16, 23, 28),
    is_complete=False,
    mixing=40.0,
    n_heads=9,
    n_heads_kv=3,
    head_size=64,
    n_ff=512,
)
SAMPLINGS = {"greedy": SamplingParams(), "drawn": SamplingParams(0.8, seed=5)}


class Setting:
    """A target, its drafter, and the drafter's proposers."""

    def __init__(self, target: Path, drafter: Drafter, cache: Path, *, kv_type: str = "f16") -> None:
        self.target = target
        self.tokenizer = Tokenizer(target)
        n_layers = read_model_facts(target).n_layers
        self.needs = FeatureNeeds(drafter.layers, n_layers, drafter.n_embd)
        options = DraftOptions(ctx_size=CTX_SIZE, num_sessions=4, kv_type=kv_type)
        self.model = load_drafter(drafter, self.tokenizer, options, root=cache)
        self.change: Callable[[NDArray[np.float32]], NDArray[np.float32]] = lambda rows: rows

    def request(self, question: str, sampling: SamplingParams) -> GenerationRequest:
        text = CHAT.format(question)
        prompt = tuple(self.tokenizer.encode(text, add_special=False, parse_special=True))
        return GenerationRequest(prompt, NUM_TOKENS, self.tokenizer.end_tokens, sampling)

    def open(self, request: GenerationRequest) -> DraftProposer:
        proposer = self.model.open(Sampler(request.sampling, len(request.prompt)).sample)
        take = proposer.take_features
        proposer.take_features = lambda start, rows: take(start, self.change(rows))
        return proposer

    @contextlib.asynccontextmanager
    async def coordinator(
        self, stages: list[RunningStage], *, width: int = 3, depth: int = 3, is_on: bool = True
    ) -> AsyncIterator[Coordinator]:
        async with running_coordinator(
            stages,
            context_length=CTX_SIZE,
            num_slots=4,
            n_vocab=self.tokenizer.n_vocab,
            make_proposers=(lambda request: [self.open(request)]) if is_on else None,
            controller=ControllerOptions(fixed_width=width, fixed_depth=depth),
            feature_needs=self.needs if is_on else None,
        ) as coordinator:
            streams = feature_streams(coordinator)
            while streams is not None and streams.why_off is not None:  # noqa: ASYNC110 - connecting
                await asyncio.sleep(0.005)
            yield coordinator

    @contextlib.asynccontextmanager
    async def repairable(
        self,
        cuts: tuple[int, ...],
        stage_options: RuntimeOptions,
        folder: Path,
        make_proposers: Callable[[GenerationRequest], list[DraftProposer]],
        *,
        has_windows: bool = False,
        width: int = 3,
        depth: int = 3,
    ) -> AsyncIterator[tuple[RepairableRing, Coordinator]]:
        """A ring that is repaired when a stage is lost, and a coordinator with plugs as they are needed."""
        cache = StageCache(folder)
        layers = ranges_from_cuts(cuts, self.needs.n_layers)
        files = [cache.cut(self.target, each).path for each in layers]
        ring = RepairableRing(make_runtime=lambda index: StageRuntime(files[index], stage_options))
        options = CoordinatorOptions(
            stage_options.ctx_size,
            stage_options.num_slots,
            EXACT_MAX_ROWS,
            self.tokenizer.n_vocab,
            can_trim=not stage_options.num_checkpoints,
            controller=ControllerOptions(fixed_width=width, fixed_depth=depth),
            ping_timeout_s=30.0,
        )
        plugs = plugs_for(
            has_windows=has_windows,
            num_checkpoints=stage_options.num_checkpoints,
            feature_needs=self.needs,
        )
        async with serving(ring, options, plugs=plugs, make_proposers=make_proposers) as coordinator:
            yield ring, coordinator


def target_and_drafter(kind: str, smollm2_path: Path, folder: Path) -> tuple[Path, Drafter]:
    """SmolLM2 with its EAGLE-3 drafter or a random one of blocks, or written again with an MTP head."""
    if kind == "eagle3":
        return smollm2_path, read_drafter(DRAFTER, read_model_facts(smollm2_path))
    if kind != "mtp":
        shape = replace(BLOCKS, kind=DrafterKind[kind.upper()])
        path = shape.write(smollm2_path, folder / f"{kind}.gguf")
        return smollm2_path, read_drafter(path, read_model_facts(smollm2_path))
    target = write_mimo2(smollm2_path, folder / "mimo2.gguf")
    head = own_head(read_model_facts(target))
    assert head is not None
    return target, head


@pytest.fixture(scope="module")
def setting_of(
    smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Setting]]:
    """Settings by kind, each made once: with `params` one is made anew after each change of kind."""
    folder = tmp_path_factory.mktemp("drafters")
    with contextlib.ExitStack() as stack:

        @functools.cache
        def make(kind: str) -> Setting:
            made = Setting(*target_and_drafter(kind, smollm2_path, folder), folder)
            stack.callback(made.model.close)
            return made

        yield make


@pytest.fixture(params=KINDS)
def setting(request: pytest.FixtureRequest, setting_of: Callable[[str], Setting]) -> Setting:
    return setting_of(request.param)


@pytest.fixture
async def stages(setting: Setting, stage_cache_dir: Path) -> AsyncIterator[list[RunningStage]]:
    options = RuntimeOptions(num_slots=4, ctx_size=CTX_SIZE, exact=True)
    async with running_stages(setting.target, (10, 20), options, stage_cache_dir) as running:
        yield running


async def texts(
    setting: Setting, coordinator: Coordinator, sampling: SamplingParams
) -> tuple[list[list[int]], int]:
    """Texts of all questions, one after the other, and accepted tokens."""
    found, num_accepted = [], 0
    for question in QUESTIONS:
        tokens, last = await collect(coordinator, setting.request(question, sampling))
        found.append(tokens)
        num_accepted += last.stats.num_accepted
    return found, num_accepted


@pytest.mark.parametrize(
    ("setting", "sampling"),
    # Of each drafter one way to sample; the sweep has the other.
    [
        pytest.param(
            kind,
            sampling,
            id=f"{kind}-{name}",
            marks=[] if (kind == "eagle3") == (name == "greedy") else pytest.mark.sweep,
        )
        for kind in KINDS
        for name, sampling in SAMPLINGS.items()
    ],
    indirect=["setting"],
)
async def test_the_text_is_the_same_whatever_the_features(
    setting: Setting, stages: list[RunningStage], sampling: SamplingParams
) -> None:
    async with setting.coordinator(stages, is_on=False) as coordinator:
        plain, _ = await texts(setting, coordinator, sampling)
    async with setting.coordinator(stages) as coordinator:
        drafted, num_accepted = await texts(setting, coordinator, sampling)
        assert drafted == plain
        assert num_accepted > 3
        # Several sessions at once, in one step of the drafter.
        requests = [setting.request(question, sampling) for question in QUESTIONS]
        together = await asyncio.gather(*(collect(coordinator, request) for request in requests))
        assert [tokens for tokens, _ in together] == plain
    noise = np.random.default_rng(3)
    setting.change = lambda rows: noise.standard_normal(rows.shape).astype(np.float32)
    try:
        async with setting.coordinator(stages) as coordinator:
            assert (await texts(setting, coordinator, sampling))[0] == plain
    finally:
        setting.change = lambda rows: rows


async def test_a_stream_of_features_that_is_cut_mid_answer_costs_acceptance_only(
    setting: Setting, stages: list[RunningStage]
) -> None:
    async with setting.coordinator(stages, is_on=False) as coordinator:
        (plain, *_), _ = await texts(setting, coordinator, SamplingParams())
    async with setting.coordinator(stages) as coordinator:
        tokens: list[int] = []
        async for part in coordinator.generate(setting.request(QUESTIONS[0], SamplingParams())):
            if len(tokens) < NUM_TOKENS // 2 <= len(tokens) + len(part.tokens):
                for stage in stages:
                    outlet = stage.service.plug_of(FeatureOutlet)
                    assert outlet is not None
                    outlet.left()
            tokens += part.tokens
        streams = feature_streams(coordinator)
        assert streams is not None
        assert streams.why_off is not None
    assert tokens == plain


async def check_crash(
    setting: Setting, coordinator: Coordinator, request: GenerationRequest, plain: list[int]
) -> None:
    """Kill the drafter's process in mid-answer: the text is the plain one, and later drafts are none."""
    tokens: list[int] = []
    num_accepted = []
    async for part in coordinator.generate(request):
        if len(tokens) < NUM_TOKENS // 2 <= len(tokens) + len(part.tokens):
            pid = setting.model._context.thread_id
            assert pid is not None
            os.kill(pid, signal.SIGABRT)
        tokens += part.tokens
        num_accepted.append(part.stats.num_accepted)
    again, last = await collect(coordinator, request)
    assert tokens == again == plain
    assert num_accepted[-1] > 0
    assert last.stats.num_accepted == 0


async def test_a_crash_of_the_drafter_ends_drafting_and_nothing_else(
    smollm2_path: Path, tmp_path: Path, stage_cache_dir: Path
) -> None:
    drafter = read_drafter(DRAFTER, read_model_facts(smollm2_path))
    setting = Setting(smollm2_path, drafter, tmp_path)
    options = RuntimeOptions(num_slots=4, ctx_size=CTX_SIZE, exact=True)
    try:
        async with running_stages(smollm2_path, (10, 20), options, stage_cache_dir) as stages:
            async with setting.coordinator(stages, is_on=False) as coordinator:
                (plain, *_), _ = await texts(setting, coordinator, SamplingParams())
            async with setting.coordinator(stages) as coordinator:
                request = setting.request(QUESTIONS[0], SamplingParams())
                await check_crash(setting, coordinator, request, plain)
    finally:
        setting.model.close()


@pytest.mark.parametrize(
    ("setting", "lost"),
    # A stage that streams its features, and the tail, whose features come with verdicts.
    [
        pytest.param(
            kind,
            lost,
            id=f"{kind}-{lost}",
            marks=[] if lost == (1 if kind == "eagle3" else 2) else pytest.mark.sweep,
        )
        for kind in KINDS
        for lost in range(3)
    ],
    indirect=["setting"],
)
async def test_a_repair_leaves_no_gap_in_the_features(
    setting: Setting, stage_cache_dir: Path, lost: int
) -> None:
    """Stages compute again what the drafter lacks, and the drafter keeps what it has read before."""
    request = setting.request(QUESTIONS[0], SamplingParams())
    proposers: list[DraftProposer] = []

    def make_proposers(request: GenerationRequest) -> list[DraftProposer]:
        proposers.append(setting.open(request))
        return [proposers[-1]]

    options = RuntimeOptions(num_slots=4, ctx_size=CTX_SIZE, exact=True)
    async with setting.repairable((10, 20), options, stage_cache_dir, make_proposers) as (ring, coordinator):
        whole, _ = await collect(coordinator, request)
        tokens: list[int] = []
        dying = None
        async for part in coordinator.generate(request):
            tokens += part.tokens
            if dying is None and len(tokens) >= NUM_TOKENS // 2:
                dying = asyncio.create_task(ring.kill(lost))
        assert dying is not None
        await dying
    assert tokens == whole
    assert ring.num_repairs == 1
    sequence = proposers[1]._session.sequence
    assert isinstance(sequence, FeatureSequence)
    assert sequence.first_row <= 1, "it began anew behind a gap"
    # Of the latest tokens they may come after the end.
    positions = range(len(request.prompt) + NUM_TOKENS - 4)
    assert [position for position in positions if position not in sequence.features] == []


async def test_the_second_turn_of_a_conversation_drafts_at_once(
    setting: Setting, stages: list[RunningStage]
) -> None:
    """Rows of the first turn are reused, as the stages reuse theirs."""
    async with setting.coordinator(stages) as coordinator:
        first = setting.request(QUESTIONS[0], SamplingParams())
        tokens, _ = await collect(coordinator, first)
        more = setting.tokenizer.encode(
            "<|im_end|>\n" + CHAT.format(QUESTIONS[1]), add_special=False, parse_special=True
        )
        prompt = (*first.prompt, *tokens, *more)
        # Long enough for features to arrive on a busy machine.
        second = GenerationRequest(prompt, 64)
        proposers: list[DraftProposer] = []
        open_proposer = setting.open
        setting.open = lambda request: proposers.append(open_proposer(request)) or proposers[-1]  # type: ignore[method-assign, func-returns-value]
        try:
            again, last = await collect(coordinator, second)
        finally:
            setting.open = open_proposer  # type: ignore[method-assign]
        assert last.stats.num_cached >= len(first.prompt)
        (sequence,) = [proposer._session.sequence for proposer in proposers]
        assert isinstance(sequence, FeatureSequence)
        assert sequence.first_row <= 1, "it did not begin anew behind the cached tokens"
        assert sequence.real_stop > len(prompt)
    async with setting.coordinator(stages, is_on=False) as coordinator:
        assert (await collect(coordinator, second))[0] == again
