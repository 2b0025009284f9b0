"""The compiled tap gives what the one in Python gives."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from spanmesh_proto.errors import UncuttableModel
from stages.graph_boundary import GraphBoundary
from stages.layers import LayerRange
from stages.runtime import hidden_tap
from stages.runtime import stage_runtime as runtime_module
from stages.runtime.hidden_tap import LayerTap, StopTap, make_stop_tap
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.weights.virtual_stages import StageCache
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

OPTIONS = RuntimeOptions(num_slots=2, ctx_size=64, exact=True)
# Prefill of two slots, a decode of both, one with fewer rows after a trim.
BATCHES = (
    [Span(0, 0, [5, 6, 7]), Span(1, 0, [8, 9, 10])],
    [Span(0, 3, [11]), Span(1, 3, [12])],
    [Span(1, 2, [13, 14])],
)


def hidden_states(path: Path) -> list[NDArray[np.float32]]:
    runtime = StageRuntime(path, OPTIONS)
    try:
        return [rows for batch in BATCHES for rows in runtime.decode(batch)]
    finally:
        runtime.close()


def test_is_compiled_where_the_tests_run() -> None:
    assert isinstance(make_stop_tap(3, GraphBoundary(8), 4), StopTap)


def test_gives_the_very_rows_that_python_would(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = StageCache(tmp_path).cut(smollm2_path, LayerRange(0, 4)).path
    compiled = hidden_states(path)
    monkeypatch.setattr(
        runtime_module,
        "make_stop_tap",
        lambda layer, handover, _max_rows: LayerTap([layer], handover, stop=True),
    )
    interpreted = hidden_states(path)
    assert len(compiled) == 5
    for ours, theirs in zip(compiled, interpreted, strict=True):
        assert np.array_equal(ours, theirs)


def entered(path: Path) -> list[NDArray[np.float32]]:
    runtime = StageRuntime(path, OPTIONS)
    noise = np.random.default_rng(3)
    try:
        return [
            rows
            for batch in BATCHES
            for rows in runtime.decode(
                [replace(span, hidden=noise.random((len(span.tokens), 64), np.float32)) for span in batch]
            )
        ]
    finally:
        runtime.close()


def test_hidden_states_enter_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyModel("granite").write(tmp_path / "granite.gguf")
    path = StageCache(tmp_path).cut(model, LayerRange(2, 4)).path
    compiled = entered(path)
    monkeypatch.setattr(
        runtime_module,
        "make_stop_tap",
        lambda layer, handover, _max_rows: LayerTap([layer], handover, stop=True),
    )
    interpreted = entered(path)
    assert len(compiled) == 5
    for ours, theirs in zip(compiled, interpreted, strict=True):
        assert np.array_equal(ours, theirs)
        assert ours.any()


def test_a_tensor_that_is_not_there_is_told(tmp_path: Path) -> None:
    model = TinyModel("granite").write(tmp_path / "granite.gguf")
    path = StageCache(tmp_path).cut(model, LayerRange(2, 4)).path
    damaged = path.with_name("damaged.gguf")
    damaged.write_bytes(path.read_bytes().replace(b"\x04\0\0\0\0\0\0\0embd", b"\x04\0\0\0\0\0\0\0embX", 1))
    with pytest.raises(UncuttableModel, match=r"no tensor 'embX' of [0-9]+ rows where hidden states enter"):
        entered(damaged)


def test_python_takes_over_where_nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_tap, "_EXTENSION", "stages._absent")
    assert isinstance(make_stop_tap(3, GraphBoundary(8), 4), LayerTap)
