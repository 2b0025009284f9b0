"""Files that draft for another model are told from models, and never served as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spanmesh_proto.errors import InvalidModel, UncuttableModel
from stages.gguf import read_header
from stages.slicing.drafter_files import drafter_label
from stages.slicing.source_model import read_source
from tests.support.drafter_files import write_header
from tests.support.eagle3 import DRAFTER
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("architecture", "n_prediction_layers", "label"),
    [
        ("dflash", 0, "a block drafter of the DFlash family"),
        ("gemma4-assistant", 1, "an assistant of Gemma 4"),
        ("eagle3", 0, "an EAGLE-3 drafter"),
    ],
)
def test_drafters_by_architecture(
    architecture: str, n_prediction_layers: int, label: str, tmp_path: Path
) -> None:
    path = write_header(tmp_path / "d.gguf", architecture, n_prediction_layers=n_prediction_layers)
    assert drafter_label(read_header(path)) == label
    with pytest.raises(UncuttableModel) as refusal:
        read_source(path)
    assert refusal.value.message == (
        f"d.gguf is {label} and drafts for another model: `mesh draft check d.gguf` looks for that model "
        "beside it, and names the command that serves both"
    )


def test_a_drafter_that_brings_its_own_embedding_is_still_none(tmp_path: Path) -> None:
    assert drafter_label(read_header(DRAFTER)) == "an EAGLE-3 drafter"
    with pytest.raises(UncuttableModel, match="drafts for another model"):
        read_source(DRAFTER)
    # Metadata that cannot be are told of as before.
    path = write_header(tmp_path / "model.gguf", "glm4moe", n_prediction_layers=1)
    assert not drafter_label(read_header(path))
    with pytest.raises(InvalidModel, match="nextn_predict_layers is 1 of 1 layers"):
        read_source(path)


def test_models_are_no_drafters(tmp_path: Path) -> None:
    for model in (
        TinyModel("llama").write(tmp_path / "llama.gguf"),
        TINY_FAMILIES["glm4moe"].with_prediction_layer().write(tmp_path / "head.gguf"),
    ):
        assert not drafter_label(read_header(model))
        read_source(model)
