"""Drafters that read hidden states of models with recurrent layers, whose stages go back to checkpoints.

The drafters' own layers have attention only, and so their caches are trimmed as those of other models are.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from mesh.draft.drafter import own_head, read_drafter
from mesh.engine import GenerationRequest
from speculative.controller import ControllerOptions
from speculative.draft.session import FeatureSequence
from speculative.proposer import DrafterKind
from stages.runtime.stage_runtime import RuntimeOptions
from stages.sampling.sampler import SamplingParams
from stages.slicing.model_facts import read_model_facts
from tests.end_to_end.ring.test_draft_oracle import WIDTH, SteppedSetting
from tests.end_to_end.ring.test_feature_drafters import CTX_SIZE, Setting
from tests.end_to_end.ring.test_recurrent_speculation import QWEN35
from tests.qualification.fuzz.drafter_fuzz import write_eagle3
from tests.qualification.random_hybrid import write_random_hybrid
from tests.support.block_drafters import BlockDrafter
from tests.support.draft_oracle import OracleMissing, build_draft_oracle
from tests.support.nemotron_h_moe import write_nemotron_h_moe
from tests.support.predictable_models import make_predictable
from tests.support.ring_harness import (
    collect,
    feature_streams,
    running_coordinator,
    running_stages,
)
from tests.support.status_parts import speculation_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
    from pathlib import Path

    from mesh.coordinator.coordinator import Coordinator
    from mesh.draft.drafter import Drafter
    from speculative.draft.worker import DraftProposer
    from tests.support.draft_oracle import Round
    from tests.support.ring_harness import RunningStage

CUTS = (3, 6)
NUM_CHECKPOINTS = 6
NUM_TOKENS = 32
LONG = 60
LEAST_ROUNDS = 80
# So that the heads are right now and then, and wrong as often.
SHARES = {"qwen35": 0.2, "nemotron_h_moe": 0.04}
OPTIONS = RuntimeOptions(num_slots=4, ctx_size=CTX_SIZE, exact=True, num_checkpoints=NUM_CHECKPOINTS)
PROMPT = tuple(number % 300 for number in range(20, 140))
REQUESTS = (
    GenerationRequest(PROMPT, NUM_TOKENS),
    GenerationRequest(PROMPT[:9], NUM_TOKENS, sampling=SamplingParams(1.0, seed=3)),
    GenerationRequest((*PROMPT[:70], 7, 8), NUM_TOKENS),
)
# None is another's beginning, so that each is computed as a whole. Together they are fewer rows than
# attention computes in tiles.
PROMPTS = tuple(PROMPT[index : index + 9 + 4 * index] for index in range(4))


def write_model(architecture: str, path: Path) -> Path:
    """A small model with a head that is right now and then."""
    if architecture == "qwen35":
        write_random_hybrid(path, replace(QWEN35, n_prediction_layers=1))
    else:
        write_nemotron_h_moe(path)
    return make_predictable(path, share=SHARES[architecture])


@contextlib.asynccontextmanager
async def coordinator_of(
    setting: Setting, stages: list[RunningStage], *, width: int = WIDTH, depth: int = 1, is_on: bool = True
) -> AsyncIterator[Coordinator]:
    async with running_coordinator(
        stages,
        context_length=CTX_SIZE,
        num_slots=OPTIONS.num_slots,
        n_vocab=setting.tokenizer.n_vocab,
        can_trim=False,
        num_checkpoints=NUM_CHECKPOINTS,
        make_proposers=(lambda request: [setting.open(request)]) if is_on else None,
        controller=ControllerOptions(fixed_width=width, fixed_depth=depth),
        feature_needs=setting.needs if is_on else None,
    ) as coordinator:
        streams = feature_streams(coordinator)
        while streams is not None and streams.why_off is not None:  # noqa: ASYNC110 - connecting
            await asyncio.sleep(0.005)
        yield coordinator


def own_head_of(model: Path) -> Drafter:
    head = own_head(read_model_facts(model))
    assert head is not None
    return head


def parts_with_drafts(rounds: Sequence[Round]) -> list[list[Round]]:
    """Consecutive rounds with a draft; what had too much to compute again had none."""
    parts = itertools.groupby(rounds, lambda each: bool(each.drafted))
    return [list(part) for has_drafts, part in parts if has_drafts]


@pytest.mark.parametrize("architecture", ["qwen35", pytest.param("nemotron_h_moe", marks=pytest.mark.sweep)])
async def test_the_text_is_the_same_with_the_head(architecture: str, tmp_path: Path) -> None:
    model = write_model(architecture, tmp_path / "model.gguf")
    setting = Setting(model, own_head_of(model), tmp_path)
    try:
        async with running_stages(model, CUTS, OPTIONS, tmp_path) as stages:
            async with coordinator_of(setting, stages, is_on=False) as coordinator:
                plain = await asyncio.gather(*(collect(coordinator, each) for each in REQUESTS))
            async with coordinator_of(setting, stages, depth=3) as coordinator:
                drafted = await asyncio.gather(*(collect(coordinator, each) for each in REQUESTS))
                speculation = speculation_of(coordinator)
    finally:
        setting.model.close()
    assert [tokens for tokens, _ in drafted] == [tokens for tokens, _ in plain]
    assert speculation.accepted > NUM_TOKENS // 4
    # Those of positions that were computed again came once.
    for request, (tokens, last) in zip(REQUESTS, drafted, strict=True):
        assert last.stats.report is not None
        features = last.stats.report().features
        assert features is not None
        assert features.num_received == features.num_wanted == len(request.prompt) + len(tokens) - 1


@pytest.fixture(
    scope="module",
    params=["qwen35", "nemotron_h_moe", "qwen35 eagle3", "qwen35 dflash", "qwen35 dspark", "qwen35 dflash2"],
)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SteppedSetting]:
    try:
        program = build_draft_oracle()
    except OracleMissing as missing:
        pytest.skip(str(missing))
    folder = tmp_path_factory.mktemp("hybrid")
    architecture, *kind = request.param.split()
    model = write_model(architecture, folder / "model.gguf")
    drafter = own_head_of(model)
    if kind:
        # Right by chance only.
        path = folder / "drafter.gguf"
        if kind == ["eagle3"]:
            write_eagle3(model, path, seed=1)
        else:
            BlockDrafter(DrafterKind[kind[0].upper()], reads=(1, 4, 7), mixing=40.0).write(model, path)
        drafter = read_drafter(path, read_model_facts(model))
    with pytest.MonkeyPatch.context() as patch:
        # The drafter has a process of its own, which inherits it.
        patch.setenv("GGML_CPU_TILED_MM", "0")
        setting = SteppedSetting(model, drafter, folder, program, CUTS)
    yield setting
    setting.model.close()


@pytest.fixture
def line(loaded: SteppedSetting, monkeypatch: pytest.MonkeyPatch) -> SteppedSetting:
    loaded.in_step = loaded.new_in_step()
    loaded.in_step.watch(monkeypatch)
    return loaded


@pytest.fixture
async def stages(loaded: SteppedSetting, tmp_path: Path) -> AsyncIterator[list[RunningStage]]:
    async with running_stages(loaded.target, CUTS, OPTIONS, tmp_path) as running:
        yield running


def check(line: SteppedSetting, answers: Iterable[tuple[Sequence[int], Sequence[Round]]]) -> None:
    """Compare rounds with llama.cpp's; a head must be right in some.

    Args:
        line: The models.
        answers: Prompt and answer as one text, and its rounds.
    """
    parts = [(text, part) for text, rounds in answers for part in parts_with_drafts(rounds)]
    num_accepted = [each.num_accepted for _, rounds in parts for each in rounds]
    assert len(num_accepted) >= LEAST_ROUNDS
    assert sum(num_accepted) < line.width * len(num_accepted)
    assert sum(num_accepted) > LEAST_ROUNDS // 4 or line.oracle.drafter is not None
    line.check([text for text, _ in parts], [rounds for _, rounds in parts])


@pytest.mark.sweep
async def test_drafts_are_those_of_llama_cpp(line: SteppedSetting, stages: list[RunningStage]) -> None:
    answers = []
    async with coordinator_of(line, stages) as coordinator:
        for prompt in PROMPTS:
            tokens, rounds = await line.answer(coordinator, GenerationRequest(prompt, LONG))
            answers.append(((*prompt, *tokens), rounds))
    check(line, answers)


@pytest.mark.sweep
async def test_drafts_behind_a_cached_prefix_are_those_of_llama_cpp(
    line: SteppedSetting, stages: list[RunningStage]
) -> None:
    """The second turn goes on from a checkpoint of the first one, and with the drafter's rows."""
    answers = []
    async with coordinator_of(line, stages) as coordinator:
        for prompt in PROMPTS:
            tokens, _ = await line.answer(coordinator, GenerationRequest(prompt, LONG))
            second = GenerationRequest((*prompt, *tokens, 7, 8, 9), LONG)
            again, last = await collect(coordinator, second)
            assert last.stats.num_cached > len(prompt)
            answers += [((*second.prompt, *again), rounds) for rounds in line.take_rounds(second)]
    check(line, answers)


@pytest.mark.sweep
async def test_drafts_of_several_sessions_at_once_are_those_of_each_alone(
    line: SteppedSetting, stages: list[RunningStage]
) -> None:
    requests = [GenerationRequest(prompt, LONG, uses_cache=False) for prompt in PROMPTS]
    async with coordinator_of(line, stages) as coordinator:
        alone = [await line.answer(coordinator, request) for request in requests]
        together = await asyncio.gather(*(line.answer(coordinator, request) for request in requests))
    assert together == alone
    check(
        line,
        [
            ((*request.prompt, *tokens), rounds)
            for request, (tokens, rounds) in zip(requests, together, strict=True)
        ],
    )


@pytest.mark.sweep
@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_repair_leaves_no_gap_in_the_features(lost: int, tmp_path: Path) -> None:
    model = write_model("qwen35", tmp_path / "model.gguf")
    setting = Setting(model, own_head_of(model), tmp_path)
    proposers: list[DraftProposer] = []

    def make_proposers(request: GenerationRequest) -> list[DraftProposer]:
        proposers.append(setting.open(request))
        return [proposers[-1]]

    request = REQUESTS[0]
    try:
        async with (
            asyncio.timeout(60),
            setting.repairable(CUTS, OPTIONS, tmp_path, make_proposers) as (ring, coordinator),
        ):
            whole, _ = await collect(coordinator, request)
            tokens: list[int] = []
            dying = None
            async for part in coordinator.generate(request):
                tokens += part.tokens
                if dying is None and len(tokens) >= NUM_TOKENS // 2:
                    dying = asyncio.create_task(ring.kill(lost))
            assert dying is not None
            await dying
    finally:
        setting.model.close()
    assert tokens == whole
    assert ring.num_repairs == 1
    sequence = proposers[1]._session.sequence
    assert isinstance(sequence, FeatureSequence)
    # Of the latest tokens they may come after the end.
    positions = range(len(request.prompt) + NUM_TOKENS - 4)
    assert [position for position in positions if position not in sequence.features] == []
