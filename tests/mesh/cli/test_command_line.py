"""The command line in a report."""

import shlex
from pathlib import Path

import click
import pytest

from mesh.cli.shared_options import command_line
from meshbench.cli import spec


def told(arguments: list[str], *, default_map: dict[str, object] | None = None) -> str:
    with spec.make_context("mesh bench spec", list(arguments), default_map=default_map) as context:
        return command_line(context, without={"output", "logs"})


def test_what_is_left_to_defaults_is_left_out() -> None:
    assert told([]) == "mesh bench spec"
    assert told(["--output", "elsewhere", "--logs", "elsewhere"]) == "mesh bench spec"


def test_folders_are_left_out(tmp_path: Path) -> None:
    model = tmp_path / "a model.gguf"
    model.touch()
    assert (
        told([str(model), "--draft", str(model)]) == "mesh bench spec 'a model.gguf' --draft 'a model.gguf'"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--quick", "--no-rpc", "--workloads", "built-in,tool-call"],
        ["--proposers", "ngram,auto", "--draft-max", "4,16", "--delay-ms", "0.1,5", "--rpc"],
        ["--preset", "sweep", "--tokens", "16", "--exact", "--seed", "0", "--draft-type", "none"],
    ],
)
def test_the_same_values_are_read_from_it(arguments: list[str]) -> None:
    words = shlex.split(told(arguments))[3:]
    assert sorted(words) == sorted(arguments)
    with spec.make_context("spec", words) as again, spec.make_context("spec", list(arguments)) as first:
        assert again.params == first.params


def test_what_a_file_says_counts_too() -> None:
    assert told([], default_map={"num_tokens": 12}) == "mesh bench spec --tokens 12"


def test_a_flag_that_denies_is_named_as_it_is() -> None:
    @click.command()
    @click.option("--no-wait", "waits", flag_value=False, default=True, type=bool)
    def command(*, waits: bool) -> None: ...

    with command.make_context("it", ["--no-wait"]) as context:
        assert command_line(context) == "it --no-wait"
