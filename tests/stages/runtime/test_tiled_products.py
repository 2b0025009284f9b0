"""llamafile's matrix products: what the build adds, and that they are off but for encoders of pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from stages.runtime.llama import init_backend
from stages.runtime.llama_libraries import has_tiled_products, loaded_kernels, tiled_products
from stages.vision.picture import Picture
from stages.vision.projector import Projector, ProjectorOptions
from tests.stages.runtime.test_attention_kernel import configured, ggml
from tests.support import tiny_projectors
from tests.support.tiny_projectors import text_model

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ggml"]  # a fixture


def test_the_build_adds_them_to_ggml_as_it_is(ggml: Path) -> None:
    said, commands = configured(ggml, "-DGGML_LLAMAFILE=OFF")
    assert said == ""
    assert commands.count("tiled_products.cpp.o -c") == commands.count("sgemm.cpp.o -c") == 1
    assert commands.count("-Dllamafile_sgemm=tiled_products") == commands.count("GGML_USE_LLAMAFILE") == 1


@pytest.mark.parametrize(
    ("file", "words", "by", "reason"),
    [
        ("ggml-cpu.c", "llamafile_sgemm(params", "multiply(params", "ggml-cpu.c lacks"),
        ("llamafile/sgemm.cpp", "bool llamafile_sgemm(", "int llamafile_sgemm(", "llamafile/sgemm.cpp lacks"),
    ],
)
def test_where_the_sources_have_moved_the_build_goes_on_without(
    ggml: Path, file: str, words: str, by: str, reason: str
) -> None:
    path = ggml / "src" / "ggml-cpu" / file
    path.write_text(path.read_text().replace(words, by))
    said, commands = configured(ggml, "-DGGML_LLAMAFILE=OFF")
    assert said.startswith(f"-- spanmesh: encoders of pictures have ggml's own matrix products: {reason}")
    assert "sgemm" not in commands
    assert "GGML_USE_LLAMAFILE" not in commands


def test_they_are_on_in_the_block_only() -> None:
    init_backend()
    kernels = loaded_kernels()
    if kernels is None or not has_tiled_products(kernels):
        pytest.skip("llama.cpp was built without them: make environment")
    with tiled_products(kernels):
        assert kernels.tiled_products_is_enabled() == 1
    assert kernels.tiled_products_is_enabled() == 0


def test_a_projector_makes_the_same_rows_but_for_rounding(tmp_path: Path) -> None:
    model, path = text_model(tmp_path / "llama.gguf"), tiny_projectors.llava(tmp_path / "mmproj.gguf")
    projector = Projector(ProjectorOptions(str(path), str(model), 2))
    try:
        if not has_tiled_products(projector._kernels):
            pytest.skip("llama.cpp was built without them: make environment")
        picture = Picture(90, 70, bytes(range(210)) * 90)
        (tiled,) = projector.encode(picture)
        projector._kernels = None
        (plain,) = projector.encode(picture)
    finally:
        projector.close()
    assert not np.array_equal(tiled, plain)
    np.testing.assert_allclose(tiled, plain, rtol=1e-3, atol=1e-3)
