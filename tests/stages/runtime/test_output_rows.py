"""Logits of the last rows of a window are those that llama.cpp computes where all rows are marked."""

from __future__ import annotations

import itertools
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest

from stages.certification.certify import cut_stage
from stages.layers import LayerRange
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from tests.support.tiny_models import N_VOCAB
from tests.support.tiny_vision import write_vision

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

WINDOWS = (63, 3, 4, 5)
N_LAYERS = 3


def logits(
    stages: Sequence[Path], num_outputs: int | None, *, exact: bool, num_sessions: int = 1
) -> list[NDArray[np.float32]]:
    """Logits of the last rows of each window, or of all rows.

    Args:
        stages: Files of the stages.
        num_outputs: Rows of each window that are marked; None for all.
        exact: Whether in exact mode.
        num_sessions: Sessions that compute the same tokens together.
    """
    options = RuntimeOptions(num_slots=num_sessions, ctx_size=128, exact=exact)
    noise = np.random.default_rng(3)
    windows = [noise.integers(N_VOCAB, size=count).tolist() for count in WINDOWS]
    hidden: list[list[NDArray[np.float32] | None]] = [[None] * num_sessions for _ in windows]
    for path in stages:
        with closing(StageRuntime(path, options)) as runtime:
            for index, tokens in enumerate(windows):
                start = sum(WINDOWS[:index])
                count = (num_outputs or len(tokens)) if runtime.info.is_tail else 0
                spans = [Span(slot, start, tokens, rows, count) for slot, rows in enumerate(hidden[index])]
                if len(spans) * len(tokens) <= runtime.max_rows:
                    hidden[index] = [*runtime.decode(spans)]
                else:
                    hidden[index] = [runtime.decode([span])[0] for span in spans]
    return [rows for found in hidden for rows in found if rows is not None]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("cuts", [(), (1,), (1, 2)])
def test_marked_rows_are_the_last_ones(tmp_path: Path, cuts: tuple[int, ...], exact: bool) -> None:  # noqa: FBT001
    """CogVLM's graph does not gather the rows that are marked."""
    model = write_vision("cogvlm", tmp_path / "model.gguf")
    stages = []
    for start, stop in itertools.pairwise((0, *cuts, N_LAYERS)):
        stages.append(tmp_path / f"{start}-{stop}.gguf")
        cut_stage(model, LayerRange(start, stop), stages[-1])
    for num_sessions in (1, 2):
        every = logits(stages, None, exact=exact, num_sessions=num_sessions)
        for num_outputs in (1, 2):
            marked = logits(stages, num_outputs, exact=exact, num_sessions=num_sessions)
            assert [len(rows) for rows in marked] == [num_outputs] * len(WINDOWS) * num_sessions
            for rows, all_rows in zip(marked, every, strict=True):
                assert rows.tobytes() == all_rows[-num_outputs:].tobytes()
                assert rows.tobytes() != all_rows[:num_outputs].tobytes()
