"""The command line before any command does its work."""

import subprocess
import sys

import pytest

from mesh.cli.main import run


def test_help_names_every_command_without_importing_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in ("serve", "join", "status", "slice", "certify"))
    code = (
        "import sys; from mesh.cli.main import run; run(['--help']); "
        "print(*(name for name in ('ray', 'grpc', 'numpy', 'llama_cpp', 'rich') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "missing.gguf"],
        ["serve", "--host", "0.0.0.0"],
        ["serve", "--draft", "missing.gguf"],
        ["join", "rubbish"],
        ["keys", "list", "--api-key-file", "missing"],
    ],
    ids=" ".join,
)
def test_what_is_refused_costs_no_server(arguments: list[str]) -> None:
    code = (
        f"import sys; from mesh.cli.main import run; print(run({arguments!r}), "
        "*(name for name in ('fastapi', 'uvicorn', 'ray', 'grpc') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["1"]


@pytest.mark.parametrize("command", ["serve", "join", "status", "slice", "certify"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    assert f"Usage: mesh {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["serve", "--nonsense"], ["serve", "a", "b"], ["status", "x"]]
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert "Error: " in capsys.readouterr().err


def test_an_error_of_ours_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["join", "rubbish"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: 'rubbish' is not a join token")
    assert error.count("\n") == 1


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mesh, version ")
