"""Hidden states of a stage that computes several slots at once: any slots, any numbers of rows."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from stages.cutting import cut_stage
from stages.layers import LayerRange
from stages.runtime import RuntimeOptions, Span, StageRuntime

pytestmark = pytest.mark.model

NUM_SLOTS = 4
TEXT = [int(token) for token in np.random.default_rng(3).integers(100, 40000, 60)]


@pytest.fixture(scope="module")
def first_stage(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("first") / "stage.gguf"
    cut_stage(smollm2_path, LayerRange(0, 10), path)
    return path


def test_slots_that_do_not_follow_one_another_share_a_decode(first_stage: Path) -> None:
    options = RuntimeOptions(num_slots=NUM_SLOTS, ctx_size=len(TEXT), exact=True)
    random = np.random.default_rng(11)
    with closing(StageRuntime(first_stage, options)) as runtime:
        alone = np.concatenate([runtime.decode([Span(0, row, [TEXT[row]])])[0] for row in range(len(TEXT))])
        ends = [0] * NUM_SLOTS
        runtime.free(0)
        for _ in range(100):
            slots = [int(slot) for slot in random.permutation(NUM_SLOTS)[: random.integers(1, NUM_SLOTS + 1)]]
            spans = []
            for slot in slots:
                rows = int(random.choice([1, 1, 1, 2, 3, 9]))
                start = ends[slot] if ends[slot] + rows <= len(TEXT) else 0
                ends[slot] = start + rows
                spans.append(Span(slot, start, TEXT[start : start + rows]))
            for span, hidden in zip(spans, runtime.decode(spans), strict=True):
                assert np.array_equal(hidden, alone[span.start : span.start + len(span.tokens)]), span
