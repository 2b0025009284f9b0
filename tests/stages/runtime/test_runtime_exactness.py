"""Exact mode, where it is made: a row's logits do not depend on what else the stage computes."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from stages.runtime.kv_types import KV_TYPES
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from tests.support.short_models import short_gemma3_path, short_smollm2_path  # noqa: F401 - fixtures

pytestmark = pytest.mark.model


def rows_alone(model: Path, text: Sequence[int], kv_type: str = "f16") -> list[NDArray[np.float32]]:
    """Logits after each token, 32 rows at a time, nobody else there."""
    options = RuntimeOptions(ctx_size=len(text), exact=True, kv_type=kv_type)
    with closing(StageRuntime(model, options)) as runtime:
        chunks = [Span(0, start, text[start : start + 32]) for start in range(0, len(text), 32)]
        return [
            row
            for chunk in chunks
            for row in runtime.decode([Span(0, chunk.start, chunk.tokens, None, len(chunk.tokens))])[0]
        ]


@pytest.mark.parametrize(
    ("model", "num_threads", "num_rows", "kv_type"),
    # With several threads, a lone row beyond 512 cached ones would take another path. It is each layer, and
    # the head, that may leave no trace, so most cases have few layers, and the sweep has all.
    [
        ("short_smollm2_path", 2, 560, "f16"),
        ("short_gemma3_path", 1, 100, "f16"),
        ("short_smollm2_path", 1, 100, "q8_0"),
        *(
            pytest.param(model, num_threads, num_rows, kv_type, marks=pytest.mark.sweep)
            for model, num_threads, num_rows in (
                ("smollm2_path", 1, 140),
                ("smollm2_path", 2, 560),
                ("gemma3_path", 1, 100),
            )
            for kv_type in KV_TYPES
        ),
    ],
)
def test_company_leaves_no_trace(
    model: str, num_threads: int, num_rows: int, kv_type: str, request: pytest.FixtureRequest
) -> None:
    """One text grows in windows of many widths, with rejections, among others that trim and leave holes."""
    path: Path = request.getfixturevalue(model)
    random = np.random.default_rng(7)
    text = [int(token) for token in random.integers(100, 40000, num_rows)]
    noise = [int(token) for token in random.integers(100, 40000, 1000)]
    alone = rows_alone(path, text, kv_type)

    options = RuntimeOptions(num_slots=4, ctx_size=1024, exact=True, num_threads=num_threads, kv_type=kv_type)
    with closing(StageRuntime(path, options)) as runtime:
        starts = {0: 0, 1: 0, 3: 0}
        start = max(0, num_rows - 100) // 32 * 32
        for first in range(0, start, 32):
            runtime.decode([Span(2, first, text[first : first + 32])])
        while start < num_rows:
            width = min(int(random.choice([1, 1, 2, 4, 8, 32])), num_rows - start)
            spans = [Span(2, start, text[start : start + width], num_outputs=width)]
            for slot, begin in starts.items():
                count = int(random.choice([0, 1, 2, width, 9]))
                room = runtime.max_rows - sum(len(span.tokens) for span in spans)
                if 0 < count <= room and begin + count <= 900:
                    spans.append(Span(slot, begin, noise[begin : begin + count], num_outputs=1))
                    starts[slot] = begin + count - int(random.integers(0, count + 1))
            random.shuffle(spans)
            outputs = dict(zip((span.slot for span in spans), runtime.decode(spans), strict=True))
            for row, logits in enumerate(outputs[2], start):
                assert np.array_equal(logits, alone[row]), f"row {row}, in a window of {width} at {start}"
            # Some of the window's last rows are taken back and come again in the next one.
            start += width if start + width == num_rows else width - int(random.integers(0, width))


def test_spans_of_different_widths_come_back_in_the_order_asked(smollm2_path: Path) -> None:
    options = RuntimeOptions(num_slots=3, ctx_size=64, exact=True, num_threads=2)
    text = list(range(500, 520))
    alone = rows_alone(smollm2_path, text)
    with closing(StageRuntime(smollm2_path, options)) as runtime:
        asked = [Span(2, 0, text[:5], None, 5), Span(0, 0, text[:1], None, 1), Span(1, 0, text[:7], None, 2)]
        first, second, third = runtime.decode(asked)
    assert [first.shape[0], second.shape[0], third.shape[0]] == [5, 1, 2]
    assert np.array_equal(first, alone[:5])
    assert np.array_equal(second, alone[:1])
    assert np.array_equal(third, alone[5:7])
