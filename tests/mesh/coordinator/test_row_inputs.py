"""A picture of words: rows that come with a request give the text of the words themselves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mesh.coordinator.generation import Generation
from mesh.engine import GenerationRequest, RowInput
from spanmesh_proto.image_chunk import ImageChunk
from spanmesh_proto.row_ids import FIRST_ROW_ID
from speculative.lookup_proposers import NgramProposer
from stages.runtime.stage_runtime import RuntimeOptions
from stages.sampling.sampler import SamplingParams
from tests.support.ring_harness import collect, running_coordinator, running_stages
from tests.support.short_models import embedding_of, short_smollm2_path  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

NUM_TOKENS = 24
TEXT = tuple(int(token) for token in np.random.default_rng(8).integers(100, 40000, 90))
# The second lies at the prompt's end, with as many rows as its last window.
PICTURES = (range(20, 61), range(70, 71), range(89, 90))
SHOWN = tuple(
    FIRST_ROW_ID + token if any(index in picture for picture in PICTURES) else token
    for index, token in enumerate(TEXT)
)


class WordRows:
    """Rows with the embeddings of the tokens that the ids name, and how many were loaded."""

    def __init__(self, embedding: NDArray[np.float32]) -> None:
        self._embedding = embedding
        self.num_rows = 0

    def inputs(self, prompt: Sequence[int], pictures: Sequence[range] = PICTURES) -> tuple[RowInput, ...]:
        return tuple(self._input(prompt, picture) for picture in pictures)

    def _input(self, prompt: Sequence[int], picture: range) -> RowInput:
        async def load() -> NDArray[np.float32]:
            await asyncio.sleep(0.01)
            self.num_rows += len(picture)
            rows: NDArray[np.float32] = self._embedding[np.array(prompt)[picture] - FIRST_ROW_ID]
            return rows

        return RowInput(ImageChunk(picture.start, len(picture)), load)


@pytest.fixture(name="word_rows")
def _word_rows(short_smollm2_path: Path) -> WordRows:  # noqa: F811
    return WordRows(embedding_of(short_smollm2_path))


@pytest.mark.model
@pytest.mark.parametrize("cuts", [(), (1,)])
@pytest.mark.parametrize("make_proposer", [None, NgramProposer])
async def test_a_picture_of_words_is_answered_as_the_words(
    short_smollm2_path: Path,  # noqa: F811
    word_rows: WordRows,
    cuts: tuple[int, ...],
    make_proposer: Callable[[], NgramProposer] | None,
    stage_cache_dir: Path,
) -> None:
    options = RuntimeOptions(num_slots=2, ctx_size=160, exact=True)
    sampling = SamplingParams(temperature=0.8, seed=5)
    num_shown = sum(map(len, PICTURES))
    async with running_stages(short_smollm2_path, cuts, options, stage_cache_dir) as stages:
        given = {"context_length": 160, "num_slots": 2, "make_proposer": make_proposer, "max_rows": 32}
        async with running_coordinator(stages, **given) as coordinator:  # type: ignore[arg-type]
            wanted, _ = await collect(coordinator, GenerationRequest(TEXT, NUM_TOKENS, sampling=sampling))
            assert word_rows.num_rows == 0
            inputs = word_rows.inputs(SHOWN)
            request = GenerationRequest(SHOWN, NUM_TOKENS, sampling=sampling, inputs=inputs)
            found, last = await collect(coordinator, request)
            assert (found, word_rows.num_rows) == (wanted, num_shown)
            # Other rows than the same words, so the first pictures are read again.
            assert last.stats.num_cached == PICTURES[0].start
            # And the same rows, in a later turn.
            again = replace(request, prompt=(*SHOWN, *found[:5]), max_tokens=NUM_TOKENS - 5)
            found_again, last = await collect(coordinator, again)
            assert last.stats.num_cached >= len(SHOWN)
            assert (found_again, word_rows.num_rows) == (wanted[5:], num_shown)


@pytest.mark.model
async def test_only_the_tokens_count_for_penalties(
    short_smollm2_path: Path,  # noqa: F811
    word_rows: WordRows,
    stage_cache_dir: Path,
) -> None:
    options = RuntimeOptions(num_slots=1, ctx_size=160, exact=True)
    sampling = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5)
    async with (
        running_stages(short_smollm2_path, (1,), options, stage_cache_dir) as stages,
        running_coordinator(stages, context_length=160, num_slots=1) as coordinator,
    ):
        inputs = word_rows.inputs(SHOWN)
        request = GenerationRequest(SHOWN, NUM_TOKENS, sampling=sampling, inputs=inputs)
        found, _ = await collect(coordinator, request)
    assert len(found) == NUM_TOKENS
    assert word_rows.num_rows == sum(map(len, PICTURES))


def test_no_window_of_a_prompt_holds_rows_and_tokens() -> None:
    inputs = WordRows(np.zeros((1, 1), np.float32)).inputs(SHOWN)
    request = GenerationRequest(SHOWN, NUM_TOKENS, inputs=inputs)
    generation = Generation(request, context_length=160, max_rows=32)
    for _ in range(2):
        chunks = []
        while not generation.is_prefilled:
            chunks.append(generation.prefill(32))
        assert [(chunk.start, chunk.stop) for chunk in chunks] == [
            *((0, 20), (20, 52), (52, 61), (61, 70), (70, 71), (71, 89), (89, 90)),
        ]
        generation.rewind()
