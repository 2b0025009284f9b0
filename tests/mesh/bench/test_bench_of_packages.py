"""`mesh bench` where the package with the acceptance tests is not installed."""

import sys

import pytest

from mesh.cli.main import run


@pytest.mark.parametrize("name", ["chaos", "fuzz", "schemas"])
def test_an_acceptance_test_says_that_it_needs_a_checkout(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in [module for module in sys.modules if f"{module}.".startswith("mesh.qualification.")]:
        monkeypatch.delitem(sys.modules, module)
    # Python's own way to say that a module is not there.
    monkeypatch.setitem(sys.modules, "mesh.qualification", None)
    assert run(["bench", name, "model.gguf", "--seed", "1"]) == 1
    assert f"mesh bench {name} needs a checkout of the source" in capsys.readouterr().err
    assert run(["bench", "--help"]) == 0
    listed = capsys.readouterr().out
    assert "Needs a checkout of the source." in listed
    assert "stress" in listed
