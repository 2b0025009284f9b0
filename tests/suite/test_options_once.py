"""An option is declared in its model only; a field is all that it takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

import click
import pytest
from click.testing import CliRunner
from pydantic import Field

from mesh.cli.config_file import keys_of
from mesh.cli.options import OptionsCommand, made
from mesh.options.host import HeadOptions, JoinOptions
from mesh.options.model import LoadRequest, ModelOptions
from mesh.options.option import Option, Options, option_fields

ROOT: Final = Path(__file__).parents[2]
MODELS: Final = (HeadOptions, JoinOptions, LoadRequest)
# Its declaration, and messages that name it as a remedy.
MOST_FILES: Final = 3
# Remedies of many errors, with how many files name them; a row only ever becomes smaller.
IN_MANY_REMEDIES: Final = {
    "--ctx-size": 16,
    "--api-key-file": 9,
    "--advertise": 9,
    "--parallel": 7,
    "--port-range": 5,
    "--exact": 6,
    "--mmproj": 7,
    "--name": 6,
    "--wire": 6,
    "--kv-type": 5,
    "--port": 5,
    "--token-file": 5,
    "--record": 5,
    "--stages": 4,
    "--max-waiting": 4,
    "--library": 4,
    "--split": 4,
    "--wait-for": 4,
}


def files_by_flag() -> dict[str, set[str]]:
    flags = {field.flag for model in MODELS for field in option_fields(model)}
    found: dict[str, set[str]] = {flag: set() for flag in flags}
    for path in (path for room in ("mesh", "stages", "speculative") for path in (ROOT / room).rglob("*.py")):
        for flag in set(re.findall(r"--[a-z][a-z-]*[a-z]", path.read_text())) & flags:
            found[flag].add(str(path.relative_to(ROOT)))
    return found


def test_few_files_name_an_option() -> None:
    many = {flag: len(files) for flag, files in files_by_flag().items() if len(files) > MOST_FILES}
    assert many == IN_MANY_REMEDIES


@pytest.mark.parametrize("model", MODELS)
def test_each_option_is_declared_once(model: type[Options]) -> None:
    fields = list(option_fields(model))
    assert len({field.flag for field in fields}) == len(fields)
    inherited = [name for name in ModelOptions.model_fields if name in model.__annotations__]
    assert inherited == []


class Added(Options):
    """Options with one that no other file knows."""

    num_cups: Annotated[
        int, Field(ge=1, le=9), Option(section="Kitchen", metavar="N", help="Cups on the table.")
    ] = 2
    is_hot: Annotated[bool, Option(section="Kitchen", is_rare=True, help="Warm them.")] = False


def test_a_field_is_all_that_an_option_takes() -> None:
    seen: list[Added] = []

    @click.command(cls=OptionsCommand, options=Added, sections={"Kitchen": ()})
    def command(**values: object) -> None:
        seen.append(made(Added, dict(values)))

    run = CliRunner().invoke
    assert "--num-cups N  Cups on the table.  [default: 2; 1<=x<=9]" in run(command, ["--help"]).output
    assert run(command, ["--num-cups", "3", "--set", "is-hot=true"]).exit_code == 0
    assert run(command, [], default_map={"num_cups": 4}).exit_code == 0
    assert seen == [Added(num_cups=3, is_hot=True), Added(num_cups=4)]
    assert set(keys_of(command)) == {"num-cups", "is-hot"}
    assert "10 is not in the range 1<=x<=9" in run(command, ["--num-cups", "10"]).output
