"""`mesh draft check`, as a person runs it."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from mesh.cli.main import run
from mesh.draft.drafter import loadable_file, own_head
from speculative.proposer import DrafterKind
from stages.gguf import read_header
from stages.slicing.model_facts import read_model_facts
from tests.mesh.cli.test_readme import told
from tests.qualification.own_models import OWN_MODELS
from tests.support.assistant_files import write_assistant
from tests.support.block_drafters import BlockDrafter
from tests.support.eagle3 import DRAFTER
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.model
def test_the_documented_command(smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").symlink_to(smollm2_path)
    (tmp_path / "eagle3.gguf").symlink_to(DRAFTER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = told("mesh draft check", document="docs/speculation.md")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()[1:]]
    found = dict(lines)
    assert done.stdout.startswith("eagle3.gguf: an EAGLE-3 drafter that fits model.gguf\n")
    assert found["reads"] == "hidden states after layers 2, 14, 27: 3.4 KiB a token in f16"
    assert found["vocabulary"] == "49,152 tokens, the model's; it drafts 16,384 of them"
    assert "with token_embd.weight of the model" in found["file"]
    assert "for 4 sessions of 4,096 positions" in found["memory"]
    assert float(found["speed"].split()[0]) > 0


def test_a_models_own_head_and_a_small_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = TINY_FAMILIES["glm4moe"].with_prediction_layer().write(tmp_path / "model.gguf")
    assert run(["draft", "check", str(model), "--for", str(model), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    n_layers = found["n_target_layers"]
    assert (found["kind"], found["n_layers"], found["read_layers"]) == ("mtp", 1, [n_layers])
    assert found["loaded_bytes"] < found["file_bytes"] == read_header(model).file_bytes
    assert run(["draft", "check", str(model), "--for", str(model)]) == 0
    assert "the head state: 128 B a token" in capsys.readouterr().out
    small = TinyModel("llama").write(tmp_path / "small.gguf")
    assert run(["draft", "check", str(small), "--for", str(small), "--parallel", "2"]) == 0
    assert "a draft model that fits small.gguf" in (out := capsys.readouterr().out)
    assert "for 2 sessions" in out


def test_the_model_beside_a_drafter_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "models"
    folder.mkdir()
    model = TINY_FAMILIES["glm4moe"].with_prediction_layer().write(folder / "model.gguf")
    head = own_head(read_model_facts(model))
    assert head is not None
    drafter = folder / "head.gguf"
    drafter.write_bytes(loadable_file(head, model, tmp_path).read_bytes())
    TinyModel("llama").write(folder / "other.gguf")
    command = f"mesh serve {model} --draft {drafter}"
    assert run(["draft", "check", str(drafter)]) == 0
    out = capsys.readouterr().out
    assert "a head for multi-token prediction that fits model.gguf\n" in out
    assert f"  command    {command}\n" in out
    assert run(["draft", "check", str(drafter), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"] == command
    # What it says when it is taken for a model, by whichever command, and what a doctor does.
    refusal = "error: head.gguf is a head for multi-token prediction and drafts for another model: "
    for verb in ("serve", "load"):
        assert run([verb, str(drafter)]) == 1
        assert capsys.readouterr().err == f"{refusal}{command}\n"
    assert run(["certify", str(drafter)]) == 1
    assert capsys.readouterr().err == (
        f"{refusal}`mesh draft check head.gguf` looks for that model beside it, and names the command that "
        "serves both\n"
    )
    assert run(["doctor", str(drafter), "--advertise", "127.0.0.1"]) == 1
    assert f"to do: {command}\n" in capsys.readouterr().out
    assert run(["doctor", str(model), "--advertise", "127.0.0.1"]) in {0, 1}
    assert f"ok   drafter head.gguf: a head for multi-token prediction for it: {command}\n" in (
        capsys.readouterr().out
    )
    TINY_FAMILIES["glm4moe"].with_prediction_layer().write(folder / "same.gguf")
    assert run(["draft", "check", str(drafter)]) == 1
    assert "2 models beside" in (err := capsys.readouterr().err)
    assert "could draft for: model.gguf, same.gguf; name one with --for" in err
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(drafter.read_bytes())
    assert run(["draft", "check", str(alone)]) == 1
    assert "no model beside" in capsys.readouterr().err
    assert run(["serve", str(alone)]) == 1
    assert capsys.readouterr().err.endswith(f" drafts for another model: mesh serve MODEL --draft {alone}\n")


@pytest.mark.parametrize(
    ("kind", "label", "most_drafted"),
    [
        (DrafterKind.DFLASH, "a DFlash drafter", 15),
        (DrafterKind.DSPARK, "a DSpark drafter", 16),
        (DrafterKind.DFLASH2, "a DFlash2 drafter", 15),
    ],
)
def test_a_drafter_of_blocks(
    kind: DrafterKind,
    label: str,
    most_drafted: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = TinyModel("qwen3").write(tmp_path / "model.gguf")
    shape = BlockDrafter(kind, block_size=16, is_complete=False)
    path = shape.write(model, tmp_path / "drafter.gguf")
    assert run(["draft", "check", str(path), "--for", str(model), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["n_layers"], found["read_layers"]) == (kind.value, 2, [0, 2, 4])
    assert (found["most_drafted"], found["block_tokens"]) == (most_drafted, 8)
    assert found["draft_ms_per_token"] > 0
    assert run(["draft", "check", str(path), "--for", str(model)]) == 0
    out = capsys.readouterr().out
    assert f"drafter.gguf: {label} that fits model.gguf" in out
    assert "with token_embd.weight, output.weight of the model" in out
    assert f"block      {most_drafted} tokens in one pass at most, " in out
    assert " ms for 8 on this host" in out
    other = TinyModel("qwen3", n_embd=96).write(tmp_path / "other.gguf")
    assert run(["draft", "check", str(path), "--for", str(other)]) == 1
    refusal = capsys.readouterr().err
    assert "drafter.gguf reads hidden states of 64 values, Tiny qwen3 has 96: it was made for" in refusal


def test_what_does_not_fit_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = TinyModel("llama").write(tmp_path / "model.gguf")
    assert run(["draft", "check", str(DRAFTER), "--for", str(model)]) == 1
    assert (
        "reads hidden states of 576 values, Tiny llama has 64: it was made for another model"
        in capsys.readouterr().err
    )
    headless = TINY_FAMILIES["glm4moe"].write(tmp_path / "headless.gguf", {"nextn_predict_layers": 1})
    assert run(["draft", "check", str(headless), "--for", str(headless)]) == 1
    assert "headless.gguf" in capsys.readouterr().err


def test_an_assistant_says_where_its_memory_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "models"
    folder.mkdir()
    OWN_MODELS["gemma4-dense"](1).write(folder / "model.gguf")
    assistant = write_assistant(folder / "assistant.gguf")
    assert run(["draft", "check", str(assistant)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("assistant.gguf: an assistant of Gemma 4 that fits model.gguf\n")
    assert "beside the last stage for 4 sessions of 4,096 positions" in out
    assert f"mesh serve {folder / 'model.gguf'} --draft {assistant}" in out
