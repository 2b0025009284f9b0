"""A projector on a host that has no weights of its model: the same rows, of the same identity."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from stages.vision.picture import Picture
from stages.vision.projector import Projector, ProjectorOptions
from stages.weights.fetch import FetchSource, fetch_stage
from stages.weights.virtual_stages import StageCache
from tests.support import tiny_projectors
from tests.support.tiny_projectors import text_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.model

PICTURE = Picture(90, 70, bytes(range(210)) * 90)


@pytest.mark.parametrize(
    ("kind", "architecture"), [("idefics3", "llama"), ("gemma3", "gemma3"), ("qwen2vl", "qwen2vl")]
)
async def test_rows_need_no_weights_of_the_model(tmp_path: Path, kind: str, architecture: str) -> None:
    model = text_model(tmp_path / "model.gguf", architecture)
    path = getattr(tiny_projectors, kind)(tmp_path / "mmproj.gguf")
    head = StageCache(tmp_path / "head")
    hollow, whole = head.describe_hollow(model), head.describe_whole(path, n_layers=2)
    assert hollow.weight_bytes == 0
    there = StageCache(tmp_path / "host").store
    found = []
    for recipe in (hollow, whole):
        there.keep(recipe)
        source = FetchSource("127.0.0.1:1", b"", "", head.known_files(recipe.sha256))
        found.append((await fetch_stage(there, recipe.sha256, source)).path)
    # A hole in a file takes no room on the disk.
    assert found[0].stat().st_size >= model.stat().st_size - 4096
    assert found[0].stat().st_blocks * 512 < model.stat().st_size // 2
    options = ProjectorOptions(str(path), str(model), 1)
    with_model = Projector(options)
    without = Projector(replace(options, path=str(found[1]), model=str(found[0])))
    try:
        assert without.facts == with_model.facts
        assert all(map(np.array_equal, without.encode(PICTURE), with_model.encode(PICTURE)))
    finally:
        without.close()
        with_model.close()
