"""Rows of pictures that a GPU computes, in the process of a projector, against those of the processor."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mesh.vision.encoder import EncoderProcess
from stages.vision.picture import Picture
from stages.vision.projector import ProjectorOptions
from tests.support import tiny_projectors
from tests.support.tiny_projectors import text_model

if TYPE_CHECKING:
    from pathlib import Path

    from stages.runtime.devices import Device

pytestmark = pytest.mark.gpu


async def rows_of(options: ProjectorOptions, picture: Picture) -> np.ndarray:
    encoder = EncoderProcess(options)
    try:
        parts = await encoder.parts(picture.width, picture.height)
        return np.concatenate((await encoder.encode(picture, parts)).chunks)
    finally:
        encoder.close()


@pytest.mark.parametrize("kind", ["llava", "idefics3", "gemma3", "qwen2vl"])
async def test_a_gpu_computes_about_the_same_rows(tmp_path: Path, gpu: Device, kind: str) -> None:
    model = text_model(tmp_path / "model.gguf", "qwen2vl" if kind == "qwen2vl" else "llama")
    path = getattr(tiny_projectors, kind)(tmp_path / "mmproj.gguf")
    options = ProjectorOptions(str(path), str(model), num_threads=1)
    picture = Picture(300, 200, np.random.default_rng(1).bytes(300 * 200 * 3))
    on_processor = await rows_of(options, picture)
    on_gpu = await rows_of(replace(options, device=gpu.name), picture)
    again = await rows_of(replace(options, device=gpu.name), picture)
    # A session whose rows were dropped gets them from there once more.
    assert np.array_equal(on_gpu, again)
    differences = np.abs(on_gpu - on_processor)
    assert differences.max() < 0.05 * np.abs(on_processor).max(), differences.max()
