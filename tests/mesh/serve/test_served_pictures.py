"""Projectors of served models: tried out before a model is loaded, known to stages, counted on the head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

from mesh.api.backend import ApiContext
from mesh.options.model import AUTO, NONE, LoadRequest
from mesh.serve.options import options_of_load
from mesh.serve.preflight import check, own_capacity
from mesh.serve.served_model import backend_of, opened_model
from mesh.vision.projectors import checked_picture_bytes, projectors_beside
from spanmesh_proto.errors import InvalidModel
from stages.vision.projector import ProjectorOptions
from tests.support import tiny_projectors
from tests.support.on_demand import head_options
from tests.support.tiny_projectors import text_model

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.options.host import HeadOptions

pytestmark = pytest.mark.model


def options_for(model: Path, projector: Path | None, **changes: Any) -> HeadOptions:
    mmproj = NONE if projector is None else str(projector)
    return head_options(model=model, memory_bytes=2**31, mmproj=mmproj, **changes)


def encoders() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "mesh.vision.encoder_worker" in child.cmdline()]


@pytest.mark.parametrize(("kind", "most_at_once"), [("llava", 0), ("gemma3", 16)])
async def test_a_projector_runs_while_its_model_is_served(
    tmp_path: Path, kind: str, most_at_once: int
) -> None:
    model = text_model(tmp_path / "model.gguf", "gemma3" if kind == "gemma3" else "llama")
    projector = getattr(tiny_projectors, kind)(tmp_path / "mmproj.gguf")
    options = options_for(model, projector)
    known = check(options)
    async with opened_model("seeing", options, known) as found:
        assert found.state.status().model.projector == "mmproj.gguf"
        # Stages have room for rows that see each other, and a head that takes over knows of it.
        assert found.known.workload.most_at_once == most_at_once
        async with opened_model("blind", options_for(model, None), known) as other:
            assert other.state.status().model.projector is None
            assert (other.setup == found.setup) is (most_at_once == 0)
            assert backend_of(other, ApiContext()).pictures is None
        pictures = backend_of(found, ApiContext()).pictures
        assert pictures is not None
        assert len(encoders()) == 1
    assert encoders() == []


async def test_a_projector_of_another_model_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    model = text_model(tmp_path / "model.gguf")
    with pytest.raises(InvalidModel, match=r"model.gguf is a model \(llama\) and no projector"):
        check(options_for(model, model))
    # The width is known when it is loaded.
    wide = tiny_projectors.ColourWords.write(tmp_path / "wide.gguf", np.zeros((8, 96), np.float32))
    options = options_for(model, wide)
    with pytest.raises(InvalidModel, match=r"wide.gguf is no projector of model.gguf"):
        async with opened_model("m", options, check(options)):
            raise AssertionError
    assert encoders() == []


def test_memory_for_pictures_is_the_heads(tmp_path: Path) -> None:
    model = text_model(tmp_path / "model.gguf")
    projector = tiny_projectors.llava(tmp_path / "mmproj.gguf")
    blind, seeing = (own_capacity("head", check(options_for(model, each))) for each in (None, projector))
    taken = blind.memory_bytes - seeing.memory_bytes
    assert (
        taken
        == seeing.request_bytes - blind.request_bytes
        == checked_picture_bytes(ProjectorOptions(str(projector), str(model), 1))
    )
    assert taken > projector.stat().st_size


def test_a_file_of_the_disk_is_not_taken_by_itself(tmp_path: Path) -> None:
    tiny_projectors.llava(tmp_path / "mmproj-model.gguf")
    first = options_for(text_model(tmp_path / "model.gguf"), None)
    for mmproj in (AUTO, NONE):
        request = LoadRequest(model=str(tmp_path / "model.gguf"), mmproj=mmproj)
        assert options_of_load(request, first).projector_path is None


def test_projectors_beside_a_model_are_told_with_their_command_or_a_reason(tmp_path: Path) -> None:
    model = text_model(tmp_path / "model.gguf")
    seeing = tiny_projectors.llava(tmp_path / "mmproj-a.gguf")
    tiny_projectors.llava(tmp_path / "b-mmproj.gguf", **{"clip.has_vision_encoder": None})
    assert dict(projectors_beside(model)) == {
        "mmproj-a.gguf": "for pictures (mlp; 64.5 MiB, estimated; `mesh plan` measures it): "
        f"mesh serve {model} --mmproj {seeing}",
        "b-mmproj.gguf": "b-mmproj.gguf is a projector for something else than pictures"
        " (clip.has_vision_encoder is not true): take one for pictures; sound and video are not served",
    }
