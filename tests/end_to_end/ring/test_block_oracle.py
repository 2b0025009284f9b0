"""Blocks over three stages in exact mode: token for token those of llama.cpp on whole models of many kinds.

Rounds are in step, as `test_draft_oracle` has them. Tiny models and their drafters are random; few tokens are
likely, so that drafts of each length are accepted by chance. Formats of KV caches are those of the stages and
of the drafter, and llama.cpp's of both.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mesh.coordinator.options import CoordinatorOptions
from mesh.draft.drafter import read_drafter
from mesh.engine import GenerationRequest
from speculative.controller import ControllerOptions
from speculative.proposer import DrafterKind
from stages.layers import ranges_from_cuts
from stages.runtime.numerics import EXACT_MAX_ROWS
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.slicing.model_facts import read_model_facts
from stages.weights.virtual_stages import StageCache
from tests.end_to_end.ring.test_draft_oracle import SteppedSetting, connected
from tests.end_to_end.ring.test_feature_drafters import CTX_SIZE
from tests.end_to_end.ring.test_hybrid_drafters import LONG, PROMPTS, check
from tests.support.block_cases import PROMPT, RING_CASES, BlockCase, lines, recorded
from tests.support.block_drafters import BlockDrafter
from tests.support.draft_oracle import OracleMissing, build_draft_oracle
from tests.support.repairable_ring import RepairableRing, serving
from tests.support.ring_harness import collect, plugs_for, running_coordinator, running_stages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from mesh.coordinator.coordinator import Coordinator
    from speculative.draft.worker import DraftProposer
    from tests.support.draft_oracle import Round
    from tests.support.ring_harness import RunningStage

pytestmark = pytest.mark.model

NUM_SLOTS = 4
NUM_CHECKPOINTS = 6
KINDS = (DrafterKind.DFLASH, DrafterKind.DSPARK, DrafterKind.DFLASH2)
LEAST_RECORDED = 20
# The record is llama.cpp's.
NO_PROGRAM = Path("not built")


@dataclass(frozen=True)
class Target:
    """How a tiny model runs in three stages."""

    cuts: tuple[int, int]
    """First layers of the second and the third stage."""
    kv_types: tuple[str, ...] = ("f16",)
    """Formats of KV caches that it can have."""
    can_trim: bool = True
    """False for models with recurrent layers."""
    has_windows: bool = False
    """Whether layers attend to a sliding window only."""


ALL_TYPES = ("f16", "q8_0", "q4_0")
TARGETS = {
    "qwen3": Target((2, 4), ALL_TYPES),
    "gemma4": Target((2, 4), has_windows=True),
    # Experts, with windows and without.
    "gpt-oss": Target((1, 3), ALL_TYPES, has_windows=True),
    "qwen3moe": Target((1, 3)),
    # Recurrent layers, and experts.
    "qwen3next": Target((2, 4), ALL_TYPES, can_trim=False),
}
CASES = {
    f"{name}-{kind.value}-{kv_type}": BlockCase(
        BlockDrafter(kind, mixing=40.0), target=name, cuts=target.cuts, kv_type=kv_type, is_terse=True
    )
    for name, target in TARGETS.items()
    for kind in KINDS
    for kv_type in target.kv_types
}


class BlockLine(SteppedSetting):
    """A tiny target in three stages with a block drafter, in step."""

    def __init__(self, case: BlockCase, folder: Path, program: Path) -> None:
        model, path = case.write(folder)
        drafter = read_drafter(path, read_model_facts(model))
        width = case.script.num_drafted
        super().__init__(model, drafter, folder, program, case.cuts, width=width, kv_type=case.kv_type)
        self.cuts = case.cuts
        self.kind = TARGETS[case.target]
        self.options = RuntimeOptions(
            num_slots=NUM_SLOTS,
            ctx_size=CTX_SIZE,
            exact=True,
            kv_type=case.kv_type,
            num_checkpoints=0 if self.kind.can_trim else NUM_CHECKPOINTS,
        )
        self.controller = ControllerOptions(fixed_width=width, fixed_depth=1)

    def open(self, request: GenerationRequest) -> DraftProposer:
        """A proposer that goes on behind an end token, as the reference does."""
        proposer = super().open(request)
        proposer._session.sequence._is_end = lambda _token: False
        return proposer

    def _until_end(self, round: Round) -> Round:
        return round

    @contextlib.asynccontextmanager
    async def ring(self, stages: list[RunningStage]) -> AsyncIterator[Coordinator]:
        """A coordinator over these stages, whose features come."""
        async with running_coordinator(
            stages,
            context_length=CTX_SIZE,
            num_slots=NUM_SLOTS,
            n_vocab=self.tokenizer.n_vocab,
            can_trim=self.kind.can_trim,
            has_windows=self.kind.has_windows,
            num_checkpoints=self.options.num_checkpoints,
            make_proposers=lambda request: [self.open(request)],
            controller=self.controller,
            feature_needs=self.needs,
        ) as coordinator:
            await connected(coordinator)
            yield coordinator


@pytest.fixture(scope="module", params=CASES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlockLine]:
    try:
        program = build_draft_oracle()
    except OracleMissing as missing:
        pytest.skip(str(missing))
    with pytest.MonkeyPatch.context() as patch:
        # The drafter has a process of its own, which inherits it.
        patch.setenv("GGML_CPU_TILED_MM", "0")
        line = BlockLine(CASES[request.param], tmp_path_factory.mktemp("blocks"), program)
    yield line
    line.model.close()


@pytest.fixture
def line(loaded: BlockLine, monkeypatch: pytest.MonkeyPatch) -> BlockLine:
    loaded.in_step = loaded.new_in_step()
    loaded.in_step.watch(monkeypatch)
    return loaded


@pytest.fixture
async def stages(loaded: BlockLine, tmp_path: Path) -> AsyncIterator[list[RunningStage]]:
    async with running_stages(loaded.target, loaded.cuts, loaded.options, tmp_path) as running:
        yield running


@pytest.mark.parametrize("name", RING_CASES)
async def test_blocks_are_those_recorded_of_llama_cpp(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_CPU_TILED_MM", "0")
    line = BlockLine(RING_CASES[name], tmp_path, NO_PROGRAM)
    line.in_step.watch(monkeypatch)
    try:
        async with (
            running_stages(line.target, line.cuts, line.options, tmp_path) as stages,
            line.ring(stages) as coordinator,
        ):
            _, rounds = await line.answer(coordinator, GenerationRequest(PROMPT, LONG))
    finally:
        line.model.close()
    [theirs] = recorded()[name]
    known = {line.split()[0]: line for line in theirs}
    # Where a model with recurrent layers has much to compute again, nothing is drafted, and rounds may then
    # begin at other positions.
    ours = [each for each in rounds if each.drafted and str(each.position) in known]
    assert len(ours) >= LEAST_RECORDED
    assert lines(ours) == [known[str(each.position)] for each in ours]


@pytest.mark.sweep
async def test_blocks_are_those_of_llama_cpp(line: BlockLine, stages: list[RunningStage]) -> None:
    answers = []
    async with line.ring(stages) as coordinator:
        for prompt in PROMPTS:
            tokens, rounds = await line.answer(coordinator, GenerationRequest(prompt, LONG))
            answers.append(((*prompt, *tokens), rounds))
    check(line, answers)


@pytest.mark.sweep
async def test_blocks_behind_a_cached_prefix_are_those_of_llama_cpp(
    line: BlockLine, stages: list[RunningStage]
) -> None:
    answers = []
    async with line.ring(stages) as coordinator:
        for prompt in PROMPTS:
            tokens, _ = await line.answer(coordinator, GenerationRequest(prompt, LONG))
            second = GenerationRequest((*prompt, *tokens, 7, 8, 9), LONG)
            again, last = await collect(coordinator, second)
            assert last.stats.num_cached > len(prompt)
            answers += [((*second.prompt, *again), rounds) for rounds in line.take_rounds(second)]
    check(line, answers)


@pytest.mark.sweep
async def test_blocks_behind_a_repair_are_those_of_llama_cpp(line: BlockLine, tmp_path: Path) -> None:
    """Each stage is lost in turn; see `test_draft_oracle`."""
    cache = StageCache(tmp_path)
    layers = ranges_from_cuts(line.cuts, line.needs.n_layers)
    files = [cache.cut(line.target, each).path for each in layers]
    ring = RepairableRing(make_runtime=lambda index: StageRuntime(files[index], line.options))
    options = CoordinatorOptions(
        CTX_SIZE,
        NUM_SLOTS,
        EXACT_MAX_ROWS,
        line.tokenizer.n_vocab,
        can_trim=line.kind.can_trim,
        controller=line.controller,
        ping_timeout_s=30.0,
    )
    plugs = plugs_for(
        has_windows=line.kind.has_windows,
        num_checkpoints=line.options.num_checkpoints,
        feature_needs=line.needs,
    )
    answers = []
    async with (
        asyncio.timeout(100),
        serving(
            ring, options, plugs=plugs, make_proposers=lambda request: [line.open(request)]
        ) as coordinator,
    ):
        for index, prompt in enumerate(PROMPTS[: len(files)]):
            await connected(coordinator)
            request = GenerationRequest(prompt, 2 * LONG)
            text, dying = list(prompt), None
            async for part in coordinator.generate(request):
                text += part.tokens
                if dying is None and len(text) > len(prompt) + LONG // 4:
                    dying = asyncio.create_task(ring.kill(index))
            assert dying is not None
            await dying
            _, behind = line.take_rounds(request)
            answers.append((text, behind[1:]))
    assert ring.num_repairs == len(files)
    check(line, answers)


@pytest.mark.sweep
async def test_blocks_of_four_sessions_at_once_are_those_of_llama_cpp(
    line: BlockLine, stages: list[RunningStage]
) -> None:
    requests = [GenerationRequest(prompt, LONG) for prompt in PROMPTS]
    async with line.ring(stages) as coordinator:
        answers = await asyncio.gather(*(line.answer(coordinator, request) for request in requests))
    check(
        line,
        [
            ((*request.prompt, *tokens), rounds)
            for request, (tokens, rounds) in zip(requests, answers, strict=True)
        ],
    )
