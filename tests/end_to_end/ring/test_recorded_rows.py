"""Recorded rows are those of each conversation alone, whatever shared the stages with it."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mesh.coordinator.options import CoordinatorOptions
from mesh.engine import GenerationRequest, RecordedPrompt
from mesh.text.tokenizer import Tokenizer
from mesh.tuning.recorder import CONTEXT
from speculative.controller import ControllerOptions
from stages.layers import ranges_from_cuts
from stages.runtime.numerics import EXACT_MAX_ROWS
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.sampling.sampler import SamplingParams
from stages.weights.virtual_stages import StageCache
from tests.support.proposers import Parrot
from tests.support.recorded_answers import LAYERS, NEEDS, recording
from tests.support.repairable_ring import RepairableRing, serving
from tests.support.ring_harness import (
    collect,
    feature_streams,
    plugs_for,
    running_coordinator,
    running_stages,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from mesh.coordinator.coordinator import Coordinator
    from mesh.tuning.conversation_file import Conversation
    from tests.support.recorded_answers import Recorded
    from tests.support.ring_harness import RunningStage

pytestmark = pytest.mark.model

CTX_SIZE, CUTS = 256, (10, 20)
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QUESTIONS = (
    "Count from one to ten.",
    "Write one SQL statement that counts the rows of the table orders, by customer.",
    "Repeat: one two, one two.",
)


@asynccontextmanager
async def coordinator_of(
    stages: list[RunningStage], recorded: Recorded | None, *, speculates: bool = True
) -> AsyncIterator[Coordinator]:
    async with running_coordinator(
        stages,
        context_length=CTX_SIZE,
        num_slots=2,
        # Often wrong, so that windows in flight are void.
        make_proposer=Parrot if speculates else None,
        controller=ControllerOptions(fixed_width=3, fixed_depth=3),
        feature_needs=None if recorded is None else NEEDS,
        recorder=None if recorded is None else recorded.recorder,
    ) as coordinator:
        await connected(coordinator)
        yield coordinator


async def connected(coordinator: Coordinator) -> None:
    streams = feature_streams(coordinator)
    while streams is not None and streams.why_off is not None:  # noqa: ASYNC110 - connecting
        await asyncio.sleep(0.005)


async def written(recorded: Recorded, count: int) -> None:
    """Wait until so many answers are written: their last rows come behind their ends."""
    async with asyncio.timeout(10):
        while recorded.recorder.status().written < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def request_of(
    tokenizer: Tokenizer, question: str, before: Sequence[int] = (), *, num_tokens: int = 16
) -> GenerationRequest:
    text = CHAT.format(question)
    prompt = (*before, *tokenizer.encode(text, add_special=False, parse_special=True))
    sampling = SamplingParams(0.7, seed=len(prompt))
    return GenerationRequest(
        prompt, num_tokens, tokenizer.end_tokens, sampling, recording=RecordedPrompt("chat", question)
    )


def alone(whole: StageRuntime, tokens: Sequence[int]) -> NDArray[np.float16]:
    """Features of a conversation, by the whole model: (positions, layers, n_embd)."""
    found = []
    for start in range(0, len(tokens), 32):
        chunk = list(map(int, tokens[start : start + 32]))
        whole.decode([Span(0, start, chunk)], is_tapped=True)
        parts = [part[: len(chunk)].copy() for part in whole.features(0) if part is not None]
        found.append(np.stack(parts, axis=1))
    return np.concatenate(found).astype(np.float16)


@contextmanager
def whole_model(model: Path, *, exact: bool) -> Iterator[StageRuntime]:
    runtime = StageRuntime(model, RuntimeOptions(num_slots=1, ctx_size=CTX_SIZE, exact=exact))
    assert runtime.tap_features(LAYERS) == LAYERS
    try:
        yield runtime
    finally:
        runtime.close()


def of_conversation(features: NDArray[np.float16], conversation: Conversation) -> NDArray[np.float16]:
    start = conversation.info.start
    return features[start : start + len(conversation.features)]


async def test_rows_of_sessions_that_share_slots_batches_and_prefixes(
    smollm2_path: Path, stage_cache_dir: Path, tmp_path: Path
) -> None:
    """In exact mode they are equal; and so are the texts, with and without recording."""
    tokenizer = Tokenizer(smollm2_path)
    requests = [
        request_of(tokenizer, question, num_tokens=5 * number)
        for number, question in enumerate(QUESTIONS, start=1)
    ]

    async def answers(coordinator: Coordinator) -> list[list[int]]:
        together = await asyncio.gather(*(collect(coordinator, request) for request in requests))
        first, _ = await collect(coordinator, requests[0])
        assert first == together[0][0]
        # The next turn begins behind what the stages hold of this one.
        turn = request_of(tokenizer, "Go on.", (*requests[0].prompt, *first), num_tokens=8)
        second, last = await collect(coordinator, turn)
        num_cached.append(last.stats.num_cached)
        report = last.stats.report
        assert report is not None
        num_void.append(report().num_voided_windows)
        return [*(tokens for tokens, _ in together), second]

    num_cached: list[int] = []
    num_void: list[int] = []
    options = RuntimeOptions(num_slots=2, ctx_size=CTX_SIZE, exact=True)
    async with running_stages(smollm2_path, CUTS, options, stage_cache_dir) as stages:
        async with coordinator_of(stages, None) as coordinator:
            plain = await answers(coordinator)
        with recording(smollm2_path, tmp_path / "of") as recorded:
            async with coordinator_of(stages, recorded) as coordinator:
                assert await answers(coordinator) == plain
                await written(recorded, len(plain) + 1)
        with recording(smollm2_path, tmp_path / "gone") as lost:
            shutil.rmtree(lost.folder)
            async with coordinator_of(stages, lost) as coordinator:
                assert (await collect(coordinator, requests[0]))[0] == plain[0]
                async with asyncio.timeout(10):
                    while not lost.recorder.status().left_out:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
        # What cannot be written costs its record, and nothing else.
        assert "No such file" in (lost.recorder.status().off or "")
    found = {each.info.prompt_id: each for each in reversed(recorded.conversations())}
    assert len(found) == len(QUESTIONS) + 1
    assert min(num_cached) > 8
    assert max(num_void) > 0
    with whole_model(smollm2_path, exact=True) as whole:
        for request, answer in zip(requests, plain, strict=False):
            assert request.recording is not None
            conversation, tokens = found[request.recording.id], [*request.prompt, *answer]
            assert list(conversation.token_ids) == tokens
            # All rows that were wanted came, also those behind the last verdict.
            assert conversation.info.start + len(conversation.features) == len(tokens) - 2
            assert conversation.info.start == max(0, len(request.prompt) - CONTEXT)
            assert np.array_equal(conversation.features, of_conversation(alone(whole, tokens), conversation))
        turn = found["Go on."]
        assert turn.info.start + len(turn.features) == len(turn.token_ids) - 2
        assert turn.info.start >= num_cached[1]
        rows = of_conversation(alone(whole, list(turn.token_ids)), turn)
        assert np.array_equal(turn.features, rows)


async def test_rows_of_an_answer_whose_ring_was_repaired(
    smollm2_path: Path, stage_cache_dir: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(smollm2_path)
    request = request_of(tokenizer, QUESTIONS[0], num_tokens=16)
    stage_options = RuntimeOptions(num_slots=2, ctx_size=CTX_SIZE, exact=True)
    cache = StageCache(stage_cache_dir)
    files = [cache.cut(smollm2_path, layers).path for layers in ranges_from_cuts(CUTS, 30)]
    ring = RepairableRing(make_runtime=lambda index: StageRuntime(files[index], stage_options))
    options = CoordinatorOptions(CTX_SIZE, 2, EXACT_MAX_ROWS, tokenizer.n_vocab, ping_timeout_s=30.0)
    with recording(smollm2_path, tmp_path / "of") as recorded:
        plugs = plugs_for(feature_needs=NEEDS, recorder=recorded.recorder)
        async with serving(ring, options, plugs=plugs) as coordinator:
            await connected(coordinator)
            whole_answer, _ = await collect(coordinator, request)
            tokens: list[int] = []
            dying = None
            async for part in coordinator.generate(request):
                tokens += part.tokens
                if dying is None and len(tokens) >= 6:
                    dying = asyncio.create_task(ring.kill(1))
            assert dying is not None
            await dying
            await written(recorded, 2)
        assert tokens == whole_answer
        assert ring.num_repairs == 1
    undisturbed, repaired = recorded.conversations()
    assert len(repaired.features) < len(undisturbed.features)
    assert repaired.info.answer_start > repaired.info.start
    with whole_model(smollm2_path, exact=True) as whole:
        features = alone(whole, (*request.prompt, *tokens))
    for conversation in (undisturbed, repaired):
        assert np.array_equal(conversation.features, of_conversation(features, conversation))


async def test_rows_of_fast_mode_differ_by_its_numerics_only(
    smollm2_path: Path, stage_cache_dir: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(smollm2_path)
    requests = [request_of(tokenizer, question) for question in QUESTIONS]
    options = RuntimeOptions(num_slots=2, ctx_size=CTX_SIZE)
    with recording(smollm2_path, tmp_path / "of") as recorded:
        async with (
            running_stages(smollm2_path, CUTS, options, stage_cache_dir) as stages,
            coordinator_of(stages, recorded, speculates=False) as coordinator,
        ):
            await asyncio.gather(*(collect(coordinator, request) for request in requests))
            await written(recorded, len(requests))
    conversations = recorded.conversations()
    assert len(conversations) == len(requests)
    with whole_model(smollm2_path, exact=False) as whole:
        for conversation in conversations:
            own = conversation.features.astype(np.float32)
            other = of_conversation(alone(whole, list(conversation.token_ids)), conversation)
            apart = np.linalg.norm(own - other, axis=-1) / np.linalg.norm(own, axis=-1)
            # Rows of another session, or of another position, are as far apart as they are long.
            assert np.median(apart) < 0.05
            assert apart.max() < 0.2
