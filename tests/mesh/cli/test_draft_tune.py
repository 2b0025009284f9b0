"""`mesh draft tune` and `mesh draft report`, as a person runs them."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any

import pytest

from mesh.cli.main import run
from mesh.tuning.answers import index_answers, split_by_prompt
from mesh.tuning.conversation_file import write_conversation
from mesh.tuning.drafter_file import head_rows
from mesh.tuning.recording import conversation_paths, read_recording_header
from stages.gguf import read_header
from tests.support.recordings import foreseeable, random_conversation, write_recording
from tests.support.tiny_eagle3 import TinyEagle3
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed: make environment")


class Files:
    """A model, its drafter and a recording, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.model = TinyModel("llama", is_float=True).write(folder / "model.gguf")
        self.drafter = TinyEagle3(num_own_tokens=300).write(self.model, folder / "eagle3.gguf")
        self.head = head_rows(read_header(self.model)).rows()
        conversations = [foreseeable(number, self.head) for number in range(40)]
        self.recording = write_recording(folder / "recording", self.model, conversations)
        self.output = folder / "tuned.gguf"

    def tune(self, *options: str, recording: Path | None = None) -> int:
        """The exit code of the command."""
        folder = str(recording or self.recording)
        return run(["draft", "tune", folder, "--for", str(self.model), "-o", str(self.output), *options])

    def report(self, *options: str) -> int:
        """Likewise."""
        return run(["draft", "report", str(self.recording), "--for", str(self.model), *options])


@pytest.fixture(name="files")
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "models"
    folder.mkdir()
    return Files(folder)


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error; what took seconds may have told of its progress before."""
    *told, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert not any("error" in each or "Traceback" in each for each in told)
    return line


@needs_torch
def test_a_drafter_is_tuned_and_reported(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learning = ("--passes", "8", "--rate", "2e-2", "--ttt", "1")
    # It begins with the drafter beside the model.
    assert files.tune(*learning, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["file"], found["is_rejected"]) == (str(files.output), False)
    assert (found["stopped_by"], found["vocabulary"]) == ("passes", 300)
    before, after = found["sections"][0]["rows"]
    assert after["acceptance"]["unconditional"][0]["value"] > 0.4
    assert after["gain"]["first"]["low"] > 0.1
    assert before["acceptance"]["num_prompts"] == 6
    assert not files.output.with_name("tuned.gguf.run").exists()
    tuned = read_header(files.output)
    assert tuned.integer("spanmesh.tuned.tokens") == found["learned_tokens"]
    assert len(tuned.integers("spanmesh.tuned.prompts") or ()) == 34
    # Prompts from which one has learned are left out.
    drafters = ("--drafter", str(files.drafter), "--drafter", str(files.output))
    assert files.report(*drafters, "-o", str(tmp_path / "report")) == 0
    out = capsys.readouterr().out
    assert "34 answers to prompts that a drafter has learned are left out." in out
    assert (tmp_path / "report" / "report.md").read_text() + "\n" == out
    (section,) = json.loads((tmp_path / "report" / "report.json").read_text())
    rows = section["rows"]
    assert [row["name"] for row in rows] == ["eagle3.gguf", "tuned.gguf"]
    assert rows[1]["acceptance"]["unconditional"] == after["acceptance"]["unconditional"]
    assert [advice["delay_ms"] for advice in rows[1]["advice"]] == [0.1, 5.0, 20.0]
    assert files.tune("--from", str(files.output), "--force") == 1
    assert "is what the new drafter is made of" in refusal(capsys)


@needs_torch
@pytest.mark.sweep
def test_a_drafter_that_got_worse_is_kept_under_another_name(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    # It learns another language than that which is held out.
    index = index_answers([files.recording], read_recording_header(files.recording))
    held = {answer.path for answer in split_by_prompt(index.answers, ()).held}
    for number, path in enumerate(conversation_paths(files.recording)):
        if path not in held:
            write_conversation(path, random_conversation(number, 40))
    assert files.tune("--passes", "1", "--rate", "1e-1", "--minutes", "5") == 1
    rejected = files.output.with_name("tuned.rejected.gguf")
    captured = capsys.readouterr()
    assert f"is kept as {rejected}" in captured.err
    assert "tuned.gguf, tuned" in captured.out
    assert rejected.exists()
    assert not files.output.exists()


def test_what_does_not_fit_is_refused_in_one_line(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files.output.touch()
    assert files.tune() == 1
    assert "exists: name another file, or replace it with --force" in refusal(capsys)
    files.output.unlink()
    other = TinyEagle3(seed=2).write(files.model, tmp_path / "models" / "other.gguf")
    assert files.tune() == 1
    assert "2 EAGLE-3 drafters beside model.gguf: eagle3.gguf, other.gguf" in refusal(capsys)
    other.unlink()
    files.output.mkdir()
    assert files.tune("--force") == 2
    assert "is a directory" in capsys.readouterr().err
    files.output.rmdir()
    assert files.tune("--vocabulary", "some") == 2
    assert "'some' is neither a number of tokens nor `keep`" in capsys.readouterr().err
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    assert files.tune() == 1
    assert "pip install 'spanmesh[tune]'" in refusal(capsys)
    assert files.report("--drafter", str(files.drafter)) == 1
    assert "pip install 'spanmesh[tune]'" in refusal(capsys)


@needs_torch
def test_what_the_process_refuses_is_one_line(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    for path in conversation_paths(files.recording)[8:]:
        path.unlink()
    assert files.tune("--device", "cuda:9") == 1
    assert "has 8 prompts, need 10: record more" in refusal(capsys)
