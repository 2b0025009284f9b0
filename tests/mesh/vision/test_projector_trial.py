"""Trials of projectors: measured once on a host, and known from then on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from mesh.vision.encoder import EncoderProcess
from mesh.vision.projector_trial import known_trial, tried_out
from mesh.vision.projectors import checked_picture_bytes, encoder_sizes
from spanmesh_proto.errors import InvalidModel
from stages.vision.projector import ProjectorOptions
from tests.support import tiny_projectors
from tests.support.tiny_projectors import text_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.model

MIB = 2**20


async def test_memory_is_measured_once_with_the_most_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = text_model(tmp_path / "model.gguf", "qwen2vl")
    path = tiny_projectors.qwen2vl(tmp_path / "mmproj.gguf")
    few = ProjectorOptions(str(path), str(model), 1, most_tokens=64)
    many = replace(few, most_tokens=1500)
    assert known_trial(few) is None
    assert not encoder_sizes(few).is_measured
    small, large = await tried_out(few), await tried_out(many)
    assert small.memory.device_bytes == large.memory.device_bytes == 0
    # What is computed of 1500 rows, four patches each, takes memory that 64 do not.
    assert large.memory.host_bytes > small.memory.host_bytes + 4 * MIB > 32 * MIB
    sizes = encoder_sizes(many)
    assert sizes.is_measured
    assert sizes.head_bytes >= large.memory.host_bytes
    assert checked_picture_bytes(many) >= checked_picture_bytes(few)

    def none(*_arguments: object, **_more: object) -> None:
        raise AssertionError("it was tried out before")

    monkeypatch.setattr(EncoderProcess, "__init__", none)
    # Threads change nothing.
    assert await tried_out(replace(many, num_threads=7)) == large


async def test_another_file_has_a_trial_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = ProjectorOptions(
        str(tiny_projectors.gemma3(tmp_path / "mmproj.gguf")),
        str(text_model(tmp_path / "model.gguf", "gemma3")),
        1,
    )
    assert (await tried_out(options)).most_at_once == 16
    tiny_projectors.gemma3(tmp_path / "mmproj.gguf")
    assert known_trial(options) is None
    assert (await tried_out(options)).most_at_once == 16
    for record in (tmp_path / "cache" / "spanmesh" / "projectors").iterdir():
        record.write_text("{")
    # A damaged record is none.
    assert known_trial(options) is None


async def test_what_is_no_projector_leaves_no_record(tmp_path: Path) -> None:
    model = text_model(tmp_path / "model.gguf")
    with pytest.raises(InvalidModel, match="is a model"):
        await tried_out(ProjectorOptions(str(model), str(model), 1), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
