"""Hidden states that leave, enter and are tapped on a GPU, and graphs that end there."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from stages.layers import LayerRange
from stages.runtime import stage_runtime as runtime_module
from stages.runtime.hidden_tap import LayerTap, StopTap
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.weights.virtual_stages import StageCache
from tests.support.float_models import write_float

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from stages.graph_boundary import GraphBoundary
    from stages.runtime.devices import Device

pytestmark = pytest.mark.gpu
# Prefill of two slots, a decode of both, one with more rows after a trim.
BATCHES = (
    [Span(0, 0, [5, 6, 7]), Span(1, 0, [8, 9, 10])],
    [Span(0, 3, [11]), Span(1, 3, [12])],
    [Span(1, 2, [13, 14])],
)
# Hidden states enter instead of embeddings, at an inlet, and at that of a blank layer.
MIDDLES = {
    "llama": LayerRange(2, 5),
    "granite": LayerRange(2, 5),
    "gemma3": LayerRange(2, 5),
    "qwen3moe": LayerRange(1, 3),
    "qwen3next": LayerRange(2, 3),
    "nemotron_h": LayerRange(1, 3),
}


def middle_of(name: str, folder: Path) -> Path:
    model = folder / f"{name}.gguf"
    write_float(name, model)
    return StageCache(folder / "stages").cut(model, MIDDLES[name]).path


def rows_of(path: Path, options: RuntimeOptions) -> list[NDArray[np.float32]]:
    noise = np.random.default_rng(3)
    found: list[NDArray[np.float32]] = []
    with closing(StageRuntime(path, options)) as runtime:
        for batch in BATCHES:
            if not runtime.info.can_trim and batch[0].start == 2:
                continue
            shapes = [(len(span.tokens), runtime.info.n_embd) for span in batch]
            hidden = [noise.normal(size=shape).astype(np.float32) for shape in shapes]
            found += runtime.decode(
                [replace(span, hidden=rows) for span, rows in zip(batch, hidden, strict=True)]
            )
    return found


def options_of(gpu: Device, count: int) -> RuntimeOptions:
    gpu_layers = ((gpu.name, count),) if count else ()
    return RuntimeOptions(num_slots=2, ctx_size=64, gpu_layers=gpu_layers)


def require_close(ours: Sequence[NDArray[np.float32]], theirs: Sequence[NDArray[np.float32]]) -> None:
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert np.abs(one - other).max() < 0.02 * np.abs(other).max()


@pytest.mark.parametrize("name", MIDDLES)
def test_hidden_states_enter_and_leave_as_on_the_processor(name: str, tmp_path: Path, gpu: Device) -> None:
    path = middle_of(name, tmp_path)
    expected = rows_of(path, options_of(gpu, 0))
    for count in range(1, len(MIDDLES[name]) + 1):
        require_close(rows_of(path, options_of(gpu, count)), expected)


@pytest.mark.parametrize("name", ["llama", "granite"])
def test_the_compiled_tap_gives_what_python_would(
    name: str, tmp_path: Path, gpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = middle_of(name, tmp_path)
    compiled = rows_of(path, options_of(gpu, len(MIDDLES[name])))
    monkeypatch.setattr(
        runtime_module,
        "make_stop_tap",
        lambda layer, boundary, _max_rows: LayerTap([layer], boundary, stop=True),
    )
    interpreted = rows_of(path, options_of(gpu, len(MIDDLES[name])))
    for ours, theirs in zip(compiled, interpreted, strict=True):
        assert np.array_equal(ours, theirs)


class CountingTap(LayerTap):
    """Notes the names of the tensors that are about to be computed."""

    def __init__(self, layer: int, boundary: GraphBoundary) -> None:
        self.asked: list[str] = []
        super().__init__([layer], boundary, stop=True)

    def _on_node(self, tensor: int, ask: bool, user_data: Any) -> bool:  # noqa: FBT001 - C calls it
        if ask:
            self.asked.append(self._get_name(tensor).decode())
        return super()._on_node(tensor, ask, user_data)


@pytest.mark.parametrize("layers", [LayerRange(0, 3), LayerRange(2, 5)])
@pytest.mark.parametrize("count", [3, 1])
def test_a_graph_ends_behind_the_last_layer(
    layers: LayerRange, count: int, tmp_path: Path, gpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither norm nor head are computed, whether all layers are on the GPU or only the last one."""
    model = write_float("llama", tmp_path / "llama.gguf")
    path = StageCache(tmp_path / "stages").cut(model, layers).path
    taps: list[CountingTap] = []

    def make(layer: int, boundary: GraphBoundary, _max_rows: int) -> CountingTap:
        taps.append(CountingTap(layer, boundary))
        return taps[-1]

    monkeypatch.setattr(runtime_module, "make_stop_tap", make)
    with closing(StageRuntime(path, options_of(gpu, count))) as runtime:
        hidden = np.ones((1, runtime.info.n_embd), np.float32)
        runtime.decode([Span(0, 0, [5], None if layers.start == 0 else hidden)])
    (tap,) = taps
    assert tap.asked[-1] == "l_out-2"
    assert not [name for name in tap.asked if name.startswith("result_")]


def test_features_of_layers_on_a_gpu_are_those_of_the_processor(tmp_path: Path, gpu: Device) -> None:
    model = write_float("glm4moe", tmp_path / "model.gguf")

    def features(count: int) -> list[NDArray[np.float32]]:
        with closing(StageRuntime(model, options_of(gpu, count))) as runtime:
            assert isinstance(runtime._tap, StopTap)
            assert runtime.tap_features((0, 2)) == (0, 2)
            runtime.decode([Span(0, 0, list(range(5, 25)), num_outputs=1)], is_tapped=True)
            found = runtime.features(0)
            return [rows for rows in found if rows is not None]

    expected = features(0)
    assert len(expected) == 2
    for count in (4, 2):
        require_close(features(count), expected)
