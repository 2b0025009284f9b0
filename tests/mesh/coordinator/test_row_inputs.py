"""A picture of words: rows that a plug of the first stage brings give the text of the words themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from mesh.coordinator.generation import Generation
from mesh.engine import GenerationRequest
from spanmesh_proto.row_ids import FIRST_ROW_ID
from speculative.lookup_proposers import NgramProposer
from stages.runtime.stage_runtime import RuntimeOptions
from stages.sampling.sampler import SamplingParams
from stages.serving.composition import plugs_of
from stages.serving.plugs import StagePlug
from tests.support.ring_harness import collect, running_coordinator, running_stages
from tests.support.short_models import embedding_of, short_smollm2_path  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from spanmesh_proto import windows_pb2 as wire

NUM_TOKENS = 24
TEXT = tuple(int(token) for token in np.random.default_rng(8).integers(100, 40000, 90))
# The second lies at the prompt's end, with as many rows as its last window.
PICTURES = (range(20, 61), range(70, 71), range(89, 90))
SHOWN = tuple(
    FIRST_ROW_ID + token if any(index in picture for picture in PICTURES) else token
    for index, token in enumerate(TEXT)
)


class WordRows(StagePlug):
    """Rows with the embeddings of the tokens that the ids name."""

    def __init__(self, embedding: NDArray[np.float32]) -> None:
        self._embedding = embedding
        self.num_rows = 0

    def input_of(self, window: wire.Window) -> NDArray[np.float32] | None:
        if window.tokens[0] < FIRST_ROW_ID:
            return None
        self.num_rows += len(window.tokens)
        rows: NDArray[np.float32] = self._embedding[np.array(window.tokens) - FIRST_ROW_ID]
        return rows


@pytest.fixture(name="word_rows")
def _word_rows(short_smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> WordRows:  # noqa: F811
    plug = WordRows(embedding_of(short_smollm2_path))

    def with_rows(*arguments: object) -> Iterator[StagePlug]:
        yield from plugs_of(*arguments)  # type: ignore[arg-type]
        yield plug

    monkeypatch.setattr("stages.serving.server.plugs_of", with_rows)
    return plug


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
            found, last = await collect(coordinator, GenerationRequest(SHOWN, NUM_TOKENS, sampling=sampling))
            assert (found, word_rows.num_rows) == (wanted, num_shown)
            # Other rows than the same words, so the first pictures are read again.
            assert last.stats.num_cached == PICTURES[0].start
            # And the same rows, in a later turn.
            again = GenerationRequest((*SHOWN, *found[:5]), NUM_TOKENS - 5, sampling=sampling)
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
        found, _ = await collect(coordinator, GenerationRequest(SHOWN, NUM_TOKENS, sampling=sampling))
    assert len(found) == NUM_TOKENS
    assert word_rows.num_rows == sum(map(len, PICTURES))


def test_no_window_of_a_prompt_holds_rows_and_tokens() -> None:
    generation = Generation(GenerationRequest(SHOWN, NUM_TOKENS), context_length=160, max_rows=32)
    for _ in range(2):
        chunks = []
        while not generation.is_prefilled:
            chunks.append(generation.prefill(32))
        assert [(chunk.start, chunk.stop) for chunk in chunks] == [
            *((0, 20), (20, 52), (52, 61), (61, 70), (70, 71), (71, 89), (89, 90)),
        ]
        generation.rewind()
