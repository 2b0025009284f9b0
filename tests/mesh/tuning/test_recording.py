"""Recordings: what a folder is of, and folders that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from mesh.tuning.recording import (
    HEADER_NAME,
    RecordedModel,
    RecordingHeader,
    conversation_path,
    conversation_paths,
    create_recording,
    read_recording_header,
    recorded_model,
    require_same,
)
from spanmesh_proto.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

MODEL = RecordedModel("aa", "llama", n_layers=30, n_embd=4, n_vocab=100, tokenizer_digest="bb")
HEADER = RecordingHeader(MODEL, (2, 15, 27))


def test_a_recording_is_made_once_and_gone_on_with(tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    create_recording(folder, HEADER)
    create_recording(folder, HEADER)
    assert read_recording_header(folder) == HEADER
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / HEADER_NAME).stat().st_mode & 0o777 == 0o600
    assert (HEADER.shape.num_layers, HEADER.shape.row_bytes) == (3, 24)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (replace(HEADER, layers=(2, 14, 27)), "records the inputs of layers 2, 15, 27, the drafter reads"),
        (replace(HEADER, model=replace(MODEL, n_embd=8)), "of another model .n embd 4, not 8."),
        (replace(HEADER, model=replace(MODEL, tokenizer_digest="cc")), "tokenizer digest bb, not cc"),
        (replace(HEADER, model=replace(MODEL, header_digest="dd")), "header digest aa, not dd"),
    ],
)
def test_a_recording_of_another_model_is_refused(tmp_path: Path, other: RecordingHeader, reason: str) -> None:
    create_recording(tmp_path / "recording", HEADER)
    with pytest.raises(ModelError, match=reason):
        create_recording(tmp_path / "recording", other)
    require_same(HEADER, HEADER, tmp_path)


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    with pytest.raises(ModelError, match=r"can be read by others.*chmod 700"):
        create_recording(tmp_path, HEADER)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("[" * 5000, "no JSON"),
        ("{", "no JSON"),
        ("[]", "version None"),
        ({"version": 2}, "version 2"),
        ({"features": "q8"}, "version 1, need 1 with features in f16"),
        ({"layers": "2"}, "does not say"),
        ({"layers": []}, "does not say"),
        ({"layers": [True]}, "names sizes or layers"),
        ({"layers": [31]}, "names sizes or layers"),
        ({"model": {"n_embd": 4}}, "does not say"),
    ],
)
def test_a_header_that_says_too_little_is_refused(
    tmp_path: Path, said: str | dict[str, Any], reason: str
) -> None:
    create_recording(tmp_path / "recording", HEADER)
    path = tmp_path / "recording" / HEADER_NAME
    if isinstance(said, dict):
        said = json.dumps(json.loads(path.read_text()) | said)
    path.write_text(said)
    with pytest.raises(ModelError, match=reason):
        read_recording_header(tmp_path / "recording")


def test_a_folder_without_header_is_no_recording(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(ModelError, match=r"recording\.json: No such file.*mesh draft record"):
        read_recording_header(tmp_path)
    with pytest.raises(ModelError, match="is no recording"):
        read_recording_header(tmp_path / "nowhere")


def test_conversations_are_found_in_order_without_unfinished_ones(tmp_path: Path) -> None:
    for number in (10, 2):
        conversation_path(tmp_path, number).touch()
    (tmp_path / ".00000003.feat.1a2b.part").touch()
    (tmp_path / HEADER_NAME).touch()
    assert [path.name for path in conversation_paths(tmp_path)] == ["00000002.feat", "00000010.feat"]


def test_a_model_is_told_by_its_header(smollm2_path: Path) -> None:
    found = recorded_model(smollm2_path)
    assert (found.architecture, found.n_layers, found.n_embd, found.n_vocab) == ("llama", 30, 576, 49_152)
    assert len(found.header_digest) == len(found.tokenizer_digest) == 64
    assert found.header_digest != found.tokenizer_digest
