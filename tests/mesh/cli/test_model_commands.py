"""`mesh certify` and `mesh slice`, as a person runs them."""

import json
from pathlib import Path

import pytest

from mesh.cli.main import run
from stages.certification.certify import certify
from stages.gguf import read_header
from stages.slicing.architectures import cutting_rules
from tests.support.eagle3 import DRAFTER
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_models import TinyModel


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(TinyModel("llama").write(tmp_path / "model.gguf"))


def test_slice(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "stage.gguf"
    assert run(["slice", model, "--layers", "2:5", "-o", str(output)]) == 0
    assert read_header(output).integer("llama.block_count") == 3
    assert capsys.readouterr().out == (
        f"{output}: layers [2, 5) of model.gguf, {output.stat().st_size:,} bytes\n"
    )


@pytest.mark.parametrize("layers", ["5:2", "2", "a:b", "-1:3", "3:3", "1:2:3"])
def test_slice_of_no_range(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], layers: str
) -> None:
    assert run(["slice", model, f"--layers={layers}", "-o", str(tmp_path / "stage.gguf")]) == 2
    assert f"'{layers}' is not a layer range; write A:B" in capsys.readouterr().err
    assert not (tmp_path / "stage.gguf").exists()


def test_slice_of_layers_that_are_not_there(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["slice", model, "--layers", "4:9", "-o", str(tmp_path / "stage.gguf")]) == 1
    assert capsys.readouterr().err == "error: model.gguf has 6 layers; [4, 9) is not among them\n"


def test_certify_prints_a_table(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["certify", model, "--cuts", "1,4"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("family: llama\nrules: the generic ones are enough\nallowed cuts: 1-5\n")
    assert "model.gguf: llama, 6 layers, exact mode" in out
    assert out.endswith("bit-equal at every cut tried (2)\n")


def test_certify_prints_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["certify", model, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["model"], printed["architecture"], printed["n_layers"]) == ("model.gguf", "llama", 6)
    assert printed["is_exact"] is True
    assert [cut["cut"] for cut in printed["cuts"]] == [1, 2, 3, 4, 5]
    assert printed["cuts"][0]["phases"]["decode"] == {
        "n_rows": 24,
        "n_tokens": 24,
        "n_equal_tokens": 24,
        "max_logit_diff": 0.0,
        "max_hidden_diff": 0.0,
        "is_bit_equal": True,
    }


def test_certify_tells_rules_and_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama4 = TINY_FAMILIES["llama4"].write(tmp_path / "llama4.gguf")
    assert run(["certify", str(llama4)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "family: llama4\nrules: every n-th layer, windows\nallowed cuts: 4\nnot at 1-3, 5-7: "
    )
    assert "cuts are multiples of 4" in out
    assert out.endswith("bit-equal at every cut tried (1)\n")


def test_certify_of_a_model_that_stays_in_one_piece(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = TinyModel("gemma3", n_layers=62, n_embd=128).write(tmp_path / "27b.gguf")
    assert run(["certify", str(wide)]) == 0
    out = capsys.readouterr().out
    assert "allowed cuts: none\nnot at 1-61: llama.cpp scales attention by 1/sqrt(32)" in out
    assert out.endswith("bit-equal in one piece\n")


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_certify_exits_with_1_on_a_mismatch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # In this process, where its family can lose its rules.
    monkeypatch.setattr("mesh.cli.certify.certify_isolated", certify)
    monkeypatch.delitem(cutting_rules.FAMILIES, "granite")
    granite = TinyModel("granite").write(tmp_path / "granite.gguf")
    assert run(["certify", str(granite), "--cuts", "3", *flags]) == 1
    out = capsys.readouterr().out
    if flags:
        assert json.loads(out)["is_exact"] is False
    else:
        assert out.endswith("not bit-equal at 1 of 1 cuts: 3\n")


def test_certify_of_bad_input(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["certify", model, "--cuts", "6"]) == 1
    assert capsys.readouterr().err == (
        "error: model.gguf cannot be cut at 6: it has 6 layers, so cuts are 1 to 5\n"
    )
    assert run(["certify", model, "--cuts", "some"]) == 2
    assert "'some' is not 'all' or layers such as 5,11" in capsys.readouterr().err
    absent = tmp_path / "absent.gguf"
    assert run(["certify", str(absent)]) == 1
    assert capsys.readouterr().err == f"error: {absent} cannot be read: No such file or directory\n"


def test_prediction_layers_are_named_by_the_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "spanmesh" / "models" / "org" / "repo" / ("a" * 40)
    folder.mkdir(parents=True)
    glm = TINY_FAMILIES["glm4moe"].with_prediction_layer().write(folder / "glm.gguf")
    assert run(["plan", str(glm), "--host-spec", "a:8G", "--host-spec", "b:8G", "--no-timing"]) == 0
    assert "(glm4moe), 4 layers and 1 for multi-token prediction, " in capsys.readouterr().out
    assert run(["models", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["models"]
    assert [model["what"] for model in listed] == ["glm4moe, 4 layers and 1 for multi-token prediction"]
    (folder / "eagle3.gguf").symlink_to(DRAFTER)
    assert run(["models", "list", "--json"]) == 0
    drafter, model = json.loads(capsys.readouterr().out)["models"]
    assert (drafter["kind"], drafter["what"]) == ("drafter", "an EAGLE-3 drafter")
    assert model["kind"] == "model"
    assert run(["certify", str(glm), "--cuts", "2"]) == 0
    assert "glm.gguf: glm4moe, 4 layers, exact mode" in capsys.readouterr().out
