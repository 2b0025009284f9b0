"""Features of cut stages are bit for bit those of the whole model, and change nothing else."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import llama_cpp
import numpy as np
import pytest

from stages.layers import ranges_from_cuts
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.weights.virtual_stages import StageCache
from tests.qualification.own_models import step35
from tests.support.tiny_families import TINY_FAMILIES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

OPTIONS = RuntimeOptions(num_slots=2, ctx_size=64, exact=True)
# A chunk of a prompt, two slots at once, a window with proposals after a trim.
BATCHES = (
    [Span(0, 0, [5, 6, 7, 8, 9])],
    [Span(0, 5, [11], num_outputs=1), Span(1, 0, [12, 13, 14], num_outputs=1)],
    [Span(1, 2, [15, 16, 17], num_outputs=3)],
)


class Pipeline:
    """Stages in one process, with features."""

    def __init__(self, paths: Sequence[Path], layers: Sequence[int]) -> None:
        self.runtimes = [StageRuntime(path, OPTIONS) for path in paths]
        self.taps = [runtime.tap_features(layers) for runtime in self.runtimes]

    def run(self, *, is_tapped: bool) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
        """Logits of each span, and its features: rows of all taps side by side."""
        logits, features = [], []
        for batch in BATCHES:
            spans = list(batch)
            parts: list[list[NDArray[np.float32]]] = [[] for _ in batch]
            for runtime in self.runtimes:
                outputs = runtime.decode(spans, is_tapped=is_tapped)
                for part, span in zip(parts, batch, strict=True):
                    for rows in runtime.features(span.slot):
                        assert rows is not None
                        part.append(rows[: len(span.tokens)])
                spans = [replace(span, hidden=rows) for span, rows in zip(spans, outputs, strict=True)]
            logits += outputs
            features += [np.concatenate(part, axis=1) for part in parts if part]
        return logits, features

    def close(self) -> None:
        for runtime in self.runtimes:
            runtime.close()


def run(paths: Sequence[Path], layers: Sequence[int]) -> tuple[Any, Any, list[tuple[int, ...]]]:
    pipeline = Pipeline(paths, layers)
    try:
        plain, none = pipeline.run(is_tapped=False)
        assert not none
        logits, features = pipeline.run(is_tapped=True)
    finally:
        pipeline.close()
    assert all(np.array_equal(one, other) for one, other in zip(plain, logits, strict=True))
    return logits, features, pipeline.taps


@pytest.mark.model
def test_features_of_three_stages_are_those_of_the_whole_model(smollm2_path: Path, tmp_path: Path) -> None:
    cache = StageCache(tmp_path)
    paths = [cache.cut(smollm2_path, layers).path for layers in ranges_from_cuts((10, 20), 30)]
    logits, features, taps = run(paths, (2, 14, 27))
    assert taps == [(2,), (14,), (27,)]
    whole_logits, whole_features, whole_taps = run([smollm2_path], (27, 2, 14))
    assert whole_taps == [(2, 14, 27)]
    assert [rows.shape for rows in features] == [(5, 3 * 576), (1, 3 * 576), (3, 3 * 576), (3, 3 * 576)]
    for ours, theirs in zip((*logits, *features), (*whole_logits, *whole_features), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.model
def test_features_are_what_llama_cpp_itself_would_give(smollm2_path: Path) -> None:
    library = llama_cpp.llama_cpp._lib
    switch = library["_Z30llama_set_embeddings_layer_inpP13llama_contextjb"]
    switch.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool)
    rows_of = library["_Z30llama_get_embeddings_layer_inpP13llama_contextj"]
    rows_of.argtypes, rows_of.restype = (ctypes.c_void_p, ctypes.c_uint32), ctypes.POINTER(ctypes.c_float)
    runtime = StageRuntime(smollm2_path, OPTIONS)
    try:
        runtime.tap_features((14,))
        switch(runtime._context, 15, True)  # noqa: FBT003 - the layer that reads what layer 14 gives
        runtime.decode(BATCHES[0], is_tapped=True)
        ours = runtime.features(0)[0]
        theirs = np.ctypeslib.as_array(rows_of(runtime._context, 15), (runtime.max_rows, 576))
        assert ours is not None
        assert np.array_equal(ours[:5], theirs[:5])
    finally:
        runtime.close()


def test_features_that_are_named_as_the_next_layer_s_input(tmp_path: Path) -> None:
    family = step35(2)
    model = family.write(tmp_path / "model.gguf")
    cache = StageCache(tmp_path / "stages")

    def features(*cuts: int) -> list[NDArray[np.float32]]:
        paths = [cache.cut(model, layers).path for layers in ranges_from_cuts(cuts, family.n_layers)]
        _, rows, _ = run(paths, (0, 1, 2))
        return cast("list[NDArray[np.float32]]", rows)

    whole = features()
    assert [rows.shape for rows in whole] == [(5, 192), (1, 192), (3, 192), (3, 192)]
    assert len(np.unique(whole[0])) > 900
    for cuts in ((1,), (2,), (1, 2, 3)):
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(features(*cuts), whole, strict=True))


@pytest.mark.parametrize("name", ["glm4moe", "deepseek2"])
def test_the_head_state_of_the_tail_is_that_of_the_whole_model(name: str, tmp_path: Path) -> None:
    family = TINY_FAMILIES[name].with_prediction_layer()
    model = family.write(tmp_path / "model.gguf")
    n_layers = family.n_layers - 1
    cache = StageCache(tmp_path / "stages")
    paths = [cache.cut(model, layers).path for layers in ranges_from_cuts((2,), n_layers)]
    _, features, taps = run(paths, (n_layers,))
    assert taps == [(), (n_layers,)]
    _, whole, _ = run([model], (n_layers,))
    assert [rows.shape for rows in features] == [(5, 64), (1, 64), (3, 64), (3, 64)]
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(features, whole, strict=True))


def test_layers_of_other_stages_and_the_last_are_not_tapped(tmp_path: Path) -> None:
    model = TINY_FAMILIES["glm4moe"].write(tmp_path / "model.gguf")
    runtime = StageRuntime(model, OPTIONS)
    try:
        assert runtime.tap_features((0, 2, 3, 9)) == (0, 2)
        assert runtime.tap_features(()) == ()
        runtime.decode(BATCHES[0], is_tapped=True)
        assert runtime.features(0) == ()
    finally:
        runtime.close()
