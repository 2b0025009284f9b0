"""`mesh bench` of an installed package, which comes without the acceptance tests."""

from pathlib import Path

import pytest

from mesh.cli.main import run


@pytest.mark.parametrize("name", ["fuzz", "schemas"])
def test_an_acceptance_test_says_that_it_needs_a_checkout(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("meshbench.cli._CHECKOUT", tmp_path)
    assert run(["bench", name, "model.gguf", "--seed", "1"]) == 1
    assert f"mesh bench {name} needs a checkout of the source" in capsys.readouterr().err
    assert run(["bench", "--help"]) == 0
    listed = capsys.readouterr().out
    assert "Needs a checkout of the source." in listed
    assert "stress" in listed
