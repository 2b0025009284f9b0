"""Batches that are padded for speed give what those without padding give, and leave nothing behind."""

from contextlib import closing
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from numpy.typing import NDArray

from mesh.requantize import requantise
from stages.certification.certify import cut_stage
from stages.layers import LayerRange
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from tests.support.tiny_models import TinyModel

NUM_SLOTS = 6
CTX_SIZE = 32
N_LAYERS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose weights are repacked, by rows of whole blocks."""
    folder = tmp_path_factory.mktemp("padded")
    plain = TinyModel("llama", n_embd=256, n_ff=512, head_size=64).write(folder / "plain.gguf")
    requantise(plain, "Q4_0", folder / "model.gguf")
    return folder / "model.gguf"


@pytest.fixture(scope="module", params=["first", "tail"])
def stage(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = LayerRange(0, 2) if request.param == "first" else LayerRange(2, N_LAYERS)
    path = tmp_path_factory.mktemp(request.param) / "stage.gguf"
    cut_stage(model, layers, path)
    return path


@pytest.fixture
def batch_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every batch that llama.cpp computes."""
    sizes: list[int] = []
    decode = llama_cpp.llama_decode

    def counted(context: Any, batch: Any) -> int:
        sizes.append(batch.n_tokens)
        return int(decode(context, batch))

    monkeypatch.setattr(llama_cpp, "llama_decode", counted)
    return sizes


def open_runtime(stage: Path) -> StageRuntime:
    return StageRuntime(stage, RuntimeOptions(num_slots=NUM_SLOTS, ctx_size=CTX_SIZE))


def row_span(runtime: StageRuntime, slot: int, start: int, num_rows: int, *, may_be_padded: bool) -> Span:
    """A span whose content is a function of slot and position."""
    hidden: NDArray[np.float32] | None = None
    if not runtime.info.is_first:
        rows = [
            np.random.default_rng([slot, start + row]).standard_normal(runtime.info.n_embd)
            for row in range(num_rows)
        ]
        hidden = np.array(rows, np.float32)
    tokens = [(7 * slot + 3 * (start + row)) % 200 + 5 for row in range(num_rows)]
    num_outputs = num_rows if runtime.info.is_tail else 0
    return Span(slot, start, tokens, hidden, num_outputs, may_be_padded=may_be_padded)


def assert_alike(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """Equal but for the rounding of other kernels."""
    assert found.shape == expected.shape
    assert float(np.abs(found - expected).max()) < 0.1 * float(np.std(expected))


def test_what_is_padded_is_what_it_would_be_alone(stage: Path, batch_sizes: list[int]) -> None:
    random = np.random.default_rng(7)
    with closing(open_runtime(stage)) as padded, closing(open_runtime(stage)) as plain:
        ends = [0] * NUM_SLOTS
        num_needed = 0
        for _ in range(150):
            num_rows = int(random.choice([1, 1, 1, 2, 3]))
            slots = sorted(int(each) for each in random.permutation(NUM_SLOTS)[: random.integers(1, 5)])
            num_needed += num_rows * len(slots)
            starts = [ends[slot] if ends[slot] + num_rows <= CTX_SIZE else 0 for slot in slots]
            found, expected = (
                runtime.decode(
                    [
                        row_span(runtime, slot, start, num_rows, may_be_padded=runtime is padded)
                        for slot, start in zip(slots, starts, strict=True)
                    ]
                )
                for runtime in (padded, plain)
            )
            for one, other in zip(found, expected, strict=True):
                assert_alike(one, other)
            for slot, start in zip(slots, starts, strict=True):
                ends[slot] = start + num_rows
            assert [padded.memory.length(slot) for slot in range(NUM_SLOTS)] == ends
            assert [plain.memory.length(slot) for slot in range(NUM_SLOTS)] == ends
        # Each of the two computed them, and one of them padding as well.
        assert sum(batch_sizes) > 2 * num_needed


def test_three_rows_are_tried_as_four(stage: Path, batch_sizes: list[int]) -> None:
    with closing(open_runtime(stage)) as runtime:
        for position in range(6):
            spans = [row_span(runtime, slot, position, 1, may_be_padded=True) for slot in (1, 2, 3)]
            assert [len(rows) for rows in runtime.decode(spans)] == [1, 1, 1]
        assert batch_sizes == [3, 3, 3, 4, 4, 4]
        assert [runtime.memory.length(slot) for slot in range(NUM_SLOTS)] == [0, 6, 6, 6, 0, 0]


def test_a_full_slot_pads_nothing(stage: Path, batch_sizes: list[int]) -> None:
    with closing(open_runtime(stage)) as runtime:
        for slot in (0, 4):
            runtime.decode([row_span(runtime, slot, 0, CTX_SIZE, may_be_padded=False)])
        batch_sizes.clear()
        for position in range(6):
            runtime.decode([row_span(runtime, slot, position, 1, may_be_padded=True) for slot in (1, 2, 3)])
        assert batch_sizes == [3] * 6


def test_parts_of_a_prompt_are_never_padded(stage: Path, batch_sizes: list[int]) -> None:
    with closing(open_runtime(stage)) as runtime:
        for position in range(0, 18, 3):
            runtime.decode([row_span(runtime, 0, position, 3, may_be_padded=False)])
        assert batch_sizes == [3] * 6


def test_without_repacked_weights_nothing_is_padded(stage: Path, batch_sizes: list[int]) -> None:
    options = RuntimeOptions(num_slots=NUM_SLOTS, ctx_size=CTX_SIZE, repacks=False)
    with closing(StageRuntime(stage, options)) as runtime:
        for position in range(6):
            runtime.decode([row_span(runtime, slot, position, 1, may_be_padded=True) for slot in (1, 2, 3)])
        assert batch_sizes == [3] * 6


def test_a_failed_batch_leaves_no_padding(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(open_runtime(stage)) as runtime:
        for position in range(3):
            runtime.decode([row_span(runtime, slot, position, 1, may_be_padded=True) for slot in (1, 2, 3)])
        monkeypatch.setattr(llama_cpp, "llama_decode", lambda _context, _batch: -3)
        spans = [row_span(runtime, slot, 3, 1, may_be_padded=True) for slot in (1, 2, 3)]
        with pytest.raises(Exception, match="status -3"):
            runtime.decode(spans)
        monkeypatch.undo()
        assert runtime.memory.length(0) == runtime.memory.length(4) == 0
        assert len(runtime.decode([row_span(runtime, 4, 0, 2, may_be_padded=False)])[0]) == 2
