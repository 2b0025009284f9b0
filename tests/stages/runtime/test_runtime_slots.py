"""Hidden states of a stage that computes several slots at once: any slots, any numbers of rows."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from spanmesh_proto.errors import InvalidWindow
from stages.certification.certify import cut_stage
from stages.layers import LayerRange
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime

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
        runtime.memory.trim(0, 0)
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


def test_copied_positions_are_the_source_s_own(first_stage: Path) -> None:
    """Two texts, and slots that go on, go back, or begin with what another holds, at any time."""
    options = RuntimeOptions(num_slots=NUM_SLOTS, ctx_size=len(TEXT), exact=True)
    random = np.random.default_rng(5)
    texts = (TEXT, TEXT[:20] + TEXT[:19:-1])
    with closing(StageRuntime(first_stage, options)) as runtime:
        alone = []
        for text in texts:
            runtime.memory.trim(0, 0)
            alone.append(np.concatenate([runtime.decode([Span(0, 0, text)])[0]]))
        which, ends = [1, 0, 0, 0], [len(TEXT), 0, 0, 0]
        for _ in range(150):
            slot, source = (int(each) for each in random.permutation(NUM_SLOTS)[:2])
            if random.random() < 0.4:
                which[slot], ends[slot] = which[source], int(random.integers(0, ends[source] + 1))
                runtime.memory.copy(source, slot, ends[slot])
            elif ends[slot] < len(TEXT):
                rows = int(random.integers(1, min(9, len(TEXT) - ends[slot]) + 1))
                span = Span(slot, ends[slot], texts[which[slot]][ends[slot] : ends[slot] + rows])
                (hidden,) = runtime.decode([span])
                assert np.array_equal(hidden, alone[which[slot]][span.start : span.start + rows]), span
                ends[slot] += rows - int(random.integers(0, rows))
            else:
                which[slot], ends[slot] = 1 - which[slot], 0
                runtime.memory.trim(slot, 0)
        with pytest.raises(InvalidWindow, match=r"slot 0 holds \d+ positions: 61 cannot be copied"):
            runtime.memory.copy(0, 1, len(TEXT) + 1)
        with pytest.raises(InvalidWindow, match="slot 4 of 4 does not exist"):
            runtime.memory.copy(0, NUM_SLOTS, 0)
