"""Smaller hidden states between real stages: the text is that of the same stages without a network."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from mesh.engine import GenerationRequest
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import StageFailed
from speculative.controller import ControllerOptions
from stages.layers import ranges_from_cuts
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.transport.hidden_codec import HiddenType, decode, encode
from stages.weights.virtual_stages import StageCache
from tests.support.fake_stage import FakeRuntime
from tests.support.proposers import Oracle
from tests.support.ring_harness import collect, running_coordinator, running_services, running_stages

OPTIONS = RuntimeOptions(num_slots=2, ctx_size=128, exact=True)
CUTS = (15,)
NUM_TOKENS = 16
CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


def greedy(paths: Sequence[Path], hidden_type: HiddenType, prompt: Sequence[int]) -> list[int]:
    """What the stages say, one token at a time, in this process."""
    stages = [StageRuntime(path, OPTIONS) for path in paths]
    answer: list[int] = []
    start, tokens = 0, list(prompt)
    while len(answer) < NUM_TOKENS:
        rows: NDArray[np.float32] | None = None
        for stage in stages:
            (rows,) = stage.decode([Span(0, start, tokens, rows, num_outputs=1)])
            if not stage.info.is_tail:
                rows = decode(encode(rows, hidden_type), hidden_type, stage.info.n_embd)
        start += len(tokens)
        assert rows is not None
        tokens = [int(rows[-1].argmax())]
        answer += tokens
    for stage in stages:
        stage.close()
    return answer


@pytest.mark.model
@pytest.mark.parametrize("hidden_type", [HiddenType.F16, HiddenType.Q8])
async def test_the_text_is_that_of_the_stages_alone_with_speculation_and_without(
    hidden_type: HiddenType, smollm2_path: Path, stage_cache_dir: Path
) -> None:
    tokenizer = Tokenizer(smollm2_path)
    prompt = tuple(tokenizer.encode(CHAT, add_special=True, parse_special=True))
    cache = StageCache(stage_cache_dir)
    paths = [cache.cut(smollm2_path, layers).path for layers in ranges_from_cuts(CUTS, 30)]
    alone = greedy(paths, hidden_type, prompt)
    assert b"Paris" in b"".join(tokenizer.piece(token) for token in alone)
    text = [*prompt, *alone, 0]
    async with running_stages(
        smollm2_path, CUTS, OPTIONS, stage_cache_dir, hidden_type=hidden_type
    ) as stages:
        for width, errs in ((0, [False]), (3, [True, False, False])):
            async with running_coordinator(
                stages,
                context_length=128,
                num_slots=2,
                make_proposer=lambda errs=errs: Oracle(text, errs),  # type: ignore[misc]
                controller=ControllerOptions(fixed_width=width),
            ) as coordinator:
                request = GenerationRequest(prompt, NUM_TOKENS)
                tokens, _ = await collect(coordinator, request)
                assert tokens == alone


class Overflowing(FakeRuntime):
    """Computes no number for one token."""

    TOKEN = 13

    def _compute(self, span: Span) -> NDArray[np.float32]:
        rows = super()._compute(span)
        rows[[token == self.TOKEN for token in span.tokens]] = np.inf
        return rows


async def test_a_value_that_is_no_number_fails_one_session_and_names_it() -> None:
    runtimes = [Overflowing(0, 2), FakeRuntime(1, 2)]
    async with (
        running_services(runtimes, hidden_type=HiddenType.Q8) as stages,
        running_coordinator(stages, context_length=128, num_slots=4, n_vocab=64) as coordinator,
    ):
        bad = collect(coordinator, GenerationRequest((5, 6, Overflowing.TOKEN), 4))
        good = collect(coordinator, GenerationRequest((5, 6, 7), 4))
        answers = await asyncio.gather(bad, good, return_exceptions=True)
        match answers:
            case [StageFailed() as error, (list() as tokens, _)]:
                assert "value 0 of row 2 of the hidden states is inf: q8 carries" in error.message
                assert len(tokens) == 4
            case _:
                pytest.fail(f"{answers}")
