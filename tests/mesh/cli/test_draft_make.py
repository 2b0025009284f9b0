"""`mesh draft make`, as a person runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mesh.cli.main import run
from mesh.text.tokenizer import Tokenizer
from stages.gguf import read_header
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return TinyModel("llama").write(tmp_path / "model.gguf")


def test_make(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "draft.gguf"
    assert run(["draft", "make", str(model), "--type", "q4_0", "-o", str(output)]) == 0
    types = {name: tensor.type.name for name, tensor in read_header(output).tensors.items()}
    assert types["blk.2.attn_q.weight"] == types["blk.2.ffn_up.weight"] == "Q4_0"
    assert types["blk.2.attn_v.weight"] == types["blk.2.attn_output.weight"] == "Q8_0"
    assert types["blk.2.ffn_down.weight"] == "Q4_1"
    assert Tokenizer(output).vocabulary().texts == Tokenizer(model).vocabulary().texts
    assert output.stat().st_size < model.stat().st_size
    assert capsys.readouterr().out.startswith(
        f"{output}: model.gguf as Q4_0, {output.stat().st_size:,} bytes, "
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft.gguf", "model.gguf"]


def test_plain(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "draft.gguf"
    assert run(["draft", "make", str(model), "--plain", "-o", str(output)]) == 0
    types = {name: tensor.type.name for name, tensor in read_header(output).tensors.items()}
    assert types["blk.2.attn_v.weight"] == types["blk.2.ffn_down.weight"] == "Q4_0"


def test_it_replaces_nothing_unasked(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "draft.gguf"
    output.write_text("precious")
    assert run(["draft", "make", str(model), "-o", str(output)]) == 1
    assert capsys.readouterr().err == (
        f"error: {output} exists: name another file, or replace it with --force\n"
    )
    assert output.read_text() == "precious"
    assert run(["draft", "make", str(model), "-o", str(output), "--force"]) == 0
    assert read_header(output).tensors
    assert run(["draft", "make", str(model), "-o", str(model), "--force"]) == 1
    assert "is the model itself: name another file" in capsys.readouterr().err
    assert read_header(model).tensors


def test_an_unknown_type(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["draft", "make", str(model), "--type", "Q9", "-o", str(tmp_path / "draft.gguf")]) == 2
    err = capsys.readouterr().err
    assert "'Q9' is not one of" in err
    assert "q4_0" in err.lower()


def test_what_is_no_model(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "draft.gguf"
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    assert run(["draft", "make", str(text), "-o", str(output)]) == 1
    assert capsys.readouterr().err == (
        f"error: {text} is not a GGUF file: it does not start with the bytes 'GGUF'\n"
    )
    absent = tmp_path / "absent.gguf"
    assert run(["draft", "make", str(absent), "-o", str(output)]) == 1
    assert "absent.gguf cannot be read" in capsys.readouterr().err
    # A header that is right, of a model that llama.cpp cannot know.
    strange = TinyModel("llama").write(tmp_path / "strange.gguf", without=frozenset({"blk.3.ffn_up.weight"}))
    data = strange.read_bytes().replace(b"llama", b"xlama")
    strange.write_bytes(data)
    assert run(["draft", "make", str(strange), "-o", str(output)]) == 1
    assert "llama.cpp cannot requantise" in capsys.readouterr().err
    assert not output.exists()
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_is_not_there(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "nowhere" / "draft.gguf"
    assert run(["draft", "make", str(model), "-o", str(output)]) == 1
    assert capsys.readouterr().err == f"error: cannot write {output}: No such file or directory\n"
