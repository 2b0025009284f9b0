"""What `mesh draft tune` takes: recordings, and prompts that are recorded beside the drafter first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mesh.cli.draft_sources import sources_of
from mesh.tuning.prompts import OwnPrompts
from spanmesh_proto.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path


def test_folders_are_recordings_and_the_rest_are_prompts(tmp_path: Path) -> None:
    recording, prompts, beside = tmp_path / "recorded", tmp_path / "sql.jsonl", tmp_path / "made"
    recording.mkdir()
    prompts.write_text('{"prompt": "Count."}')
    found = sources_of([str(recording), "own:3"], [str(prompts)], beside)
    assert [source.folder for source in found] == [recording, beside / "own", beside / "sql"]
    assert found[0].prompts is None
    assert found[1].prompts == OwnPrompts(3)
    assert not isinstance(found[2].prompts, OwnPrompts)
    assert found[2].prompts is not None
    assert [prompt.turns for prompt in found[2].prompts] == [("Count.",)]
    assert not beside.exists()


def test_what_is_learned_is_not_measured_as_something_else(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sql.jsonl").write_text('{"prompt": "Count."}')
    with pytest.raises(ModelError, match="two recordings would be called sql: rename one"):
        sources_of([str(tmp_path / "a" / "sql.jsonl")], [str(tmp_path / "b" / "sql.jsonl")], tmp_path)
    with pytest.raises(ModelError, match="name a file of prompts, or own:N"):
        sources_of([str(tmp_path / "missing")], [], tmp_path)
