"""Models whose parts are links to files of other names: llama.cpp finds parts by the first one's name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mesh.cli.load import _whole
from mesh.cli.serve import _on_this_host
from mesh.options.host import HeadOptions
from mesh.serve.on_demand.library import Library
from stages.gguf import part_paths
from stages.serving.actor import StageActor
from tests.mesh.serve.test_replaced_model import ALL_LAYERS, MODEL, RING, expected, serving
from tests.support.linked_parts import linked_parts
from tests.support.on_demand import Clock

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return linked_parts(part_paths(MODEL.write(tmp_path / "model.gguf", tensors_per_file=20)))


async def test_such_a_model_is_loaded_whole_and_cut(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Named by a relative path, as `mesh serve` was started beside it; stages run in another folder.
    monkeypatch.chdir(model.parent)
    async with serving(model.relative_to(model.parent)) as mesh:
        config = mesh.stage("attic", ALL_LAYERS).config
        assert config.whole == str(model)
        actor = StageActor(config)
        try:
            await actor.load()
        finally:
            await actor.stop()
        assert await mesh.brought(*RING[1]) == expected(model, RING[1][1])


def test_links_keep_their_names_on_the_way_to_a_head(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    assert _whole(model.relative_to(model.parent)) == model


def test_a_library_lists_and_names_the_link(model: Path) -> None:
    folder = model.parent.with_name("linked")
    folder.symlink_to(model.parent)
    options = HeadOptions(model=model, library=(folder,), advertise="127.0.0.1")
    (named,) = _on_this_host(options, model).library
    assert named == folder
    assert [entry.path for entry in Library([named], Clock()).search().values()] == [folder / model.name]
