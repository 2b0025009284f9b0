"""Blocks over three stages in exact mode: token for token those of llama.cpp on whole models of many kinds.

Rounds are in step, as `test_draft_oracle` has them. Tiny models and their drafters are random; few tokens are
likely, so that drafts of each length are accepted by chance. Formats of KV caches are those of the stages and
of the drafter, and llama.cpp's of both.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mesh.draft.drafter import read_drafter
from mesh.engine import GenerationRequest
from speculative.controller import ControllerOptions
from speculative.proposer import DrafterKind
from stages.slicing.model_facts import read_model_facts
from tests.end_to_end.ring.test_draft_oracle import SteppedSetting, connected
from tests.end_to_end.ring.test_hybrid_drafters import LONG, PROMPTS, check
from tests.support.block_cases import PROMPT, RING_CASES, RING_TARGETS, lines, recorded, ring_case
from tests.support.draft_oracle import OracleMissing, build_draft_oracle
from tests.support.repairable_ring import NUM_STAGES
from tests.support.ring_harness import collect, running_coordinator, running_stages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from mesh.coordinator.coordinator import Coordinator
    from speculative.draft.worker import DraftProposer
    from tests.support.block_cases import BlockCase
    from tests.support.draft_oracle import Round
    from tests.support.ring_harness import RunningStage

pytestmark = pytest.mark.model

KINDS = (DrafterKind.DFLASH, DrafterKind.DSPARK, DrafterKind.DFLASH2)
LEAST_RECORDED = 20
# The record is llama.cpp's.
NO_PROGRAM = Path("not built")
CASES = {
    f"{target}-{kind.value}-{kv_type}": ring_case(target, kind, kv_type)
    for target, found in RING_TARGETS.items()
    for kind in KINDS
    for kv_type in found.kv_types
}


class BlockLine(SteppedSetting):
    """A tiny target in three stages with a block drafter, in step."""

    def __init__(self, case: BlockCase, folder: Path, program: Path) -> None:
        model, path = case.write(folder)
        drafter = read_drafter(path, read_model_facts(model))
        width = case.script.num_drafted
        super().__init__(model, drafter, folder, program, case.cuts, width=width, kv_type=case.kv_type)
        self.case = case
        self.ring_target = RING_TARGETS[case.target]
        self.options = self.ring_target.options(case.kv_type)

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
            context_length=self.options.ctx_size,
            num_slots=self.options.num_slots,
            n_vocab=self.tokenizer.n_vocab,
            can_trim=self.ring_target.can_trim,
            has_windows=self.ring_target.has_windows,
            num_checkpoints=self.options.num_checkpoints,
            make_proposers=lambda request: [self.open(request)],
            controller=ControllerOptions(fixed_width=self.width, fixed_depth=1),
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
    async with running_stages(loaded.target, loaded.case.cuts, loaded.options, tmp_path) as running:
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
            running_stages(line.target, line.case.cuts, line.options, tmp_path) as stages,
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
            second = GenerationRequest((*prompt, *tokens, *reversed(prompt)), LONG)
            again, last = await collect(coordinator, second)
            assert last.stats.num_cached > len(prompt)
            answers += [((*second.prompt, *again), rounds) for rounds in line.take_rounds(second)]
    check(line, answers)


@pytest.mark.sweep
async def test_blocks_behind_a_repair_are_those_of_llama_cpp(line: BlockLine, tmp_path: Path) -> None:
    """Each stage is lost in turn; see `test_draft_oracle`."""
    answers = []
    async with (
        asyncio.timeout(100),
        line.repairable(
            line.case.cuts,
            line.options,
            tmp_path,
            lambda request: [line.open(request)],
            has_windows=line.ring_target.has_windows,
            width=line.width,
            depth=1,
        ) as (ring, coordinator),
    ):
        for index, prompt in enumerate(PROMPTS[:NUM_STAGES]):
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
    assert ring.num_repairs == NUM_STAGES
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
