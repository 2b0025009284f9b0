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
from stages.slicing.source_model import read_source
from tests.qualification.own_models import OWN_MODELS
from tests.support.tiny_models import N_VOCAB
from tests.support.tiny_vision import write_vision

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

WINDOWS = (63, 3, 4, 5)


def cut(model: Path, cuts: Sequence[int], folder: Path) -> list[Path]:
    """Files of a model's stages, cut at these layers."""
    stages = []
    for start, stop in itertools.pairwise((0, *cuts, read_source(model).n_layers)):
        stages.append(folder / f"{start}-{stop}.gguf")
        cut_stage(model, LayerRange(start, stop), stages[-1])
    return stages


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
    stages = cut(model, cuts, tmp_path)
    for num_sessions in (1, 2):
        every = logits(stages, None, exact=exact, num_sessions=num_sessions)
        for num_outputs in (1, 2):
            marked = logits(stages, num_outputs, exact=exact, num_sessions=num_sessions)
            assert [len(rows) for rows in marked] == [num_outputs] * len(WINDOWS) * num_sessions
            for rows, all_rows in zip(marked, every, strict=True):
                assert rows.tobytes() == all_rows[-num_outputs:].tobytes()
                assert rows.tobytes() != all_rows[:num_outputs].tobytes()


@pytest.mark.parametrize("cuts", [(), (1,)])
def test_barred_tokens_are_barred_in_each_row(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    """Chameleon's for pictures: llama.cpp bars them in the first row of a batch only."""
    model = OWN_MODELS["chameleon-dense"](1).write(tmp_path / "model.gguf")
    stages = cut(model, cuts, tmp_path)
    alone, together = (logits(stages, None, exact=True, num_sessions=count) for count in (1, 2))
    lowest = np.finfo(np.float32).min
    for rows in (*alone, *together):
        assert (rows[:, 4:8196] == lowest).all()
        assert (rows[:, :4] > lowest).all()
        assert (rows[:, 8196:] > lowest).all()
    assert [rows.tobytes() for rows in alone for _ in range(2)] == [rows.tobytes() for rows in together]
