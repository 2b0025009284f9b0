"""Reports, and the course of commands that measure, without a measurement."""

import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from meshbench.experiment import experiment, lab_experiment
from meshbench.report_tools import (
    PICTURES,
    Check,
    Line,
    Report,
    Section,
    all_hold,
    lines_section,
    list_section,
    table_section,
)
from meshbench.shared_options import json_option, logs_option, output_option
from spanmesh_proto.errors import MeshError


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def report(*, is_good: bool = True) -> Report:
    lines = [Line("rate", 2.0, 3.0), Line("time", None, None)]
    return Report(
        title="A run",
        conditions={"one_way_delay_ms": 5, "seed": 1},
        sections=[
            list_section("## Not measured", "not measured", []),
            table_section("## Rates", ("delay", "rate"), [("5 ms", "2.0"), ("20 ms", "1.0")]),
            PICTURES,
            lines_section("## Figures", lines),
            Section("## On the page alone", "words"),
        ],
        fields={"lines": lines, "most": math.inf, "by_count": {8: Check("all", holds=None, detail="few")}},
        is_good=is_good,
        samples={"samples": (1, 2)},
        pictures={"rates.png": Path.touch},
    )


def test_a_page_has_its_sections_in_their_order() -> None:
    page = report().markdown(["rates.png"])
    assert page.startswith("# A run\n\none way delay ms 5, seed 1.\n\n## Rates\n\n| delay | rate |\n")
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings == ["## Rates", "## Pictures", "## Figures", "## On the page alone"]
    assert "![rates.png](rates.png)" in page
    assert "## Pictures" not in report().markdown()


def test_a_terminal_shows_what_is_meant_for_it() -> None:
    assert report().text().splitlines() == [
        "one way delay ms 5, seed 1.",
        "",
        "delay  rate",
        "5 ms   2.0",
        "20 ms  1.0",
        "",
        "      missed    2.00    ≥ 3  rate",
        "not measured                 time",
    ]


def test_json_has_dataclasses_as_objects_and_no_infinite_numbers() -> None:
    found = json.loads(report().json(), parse_constant=pytest.fail)
    assert [line["verdict"] for line in found["lines"]] == ["missed", "not measured"]
    assert found["most"] == "inf"
    assert found["by_count"] == {"8": {"name": "all", "holds": None, "detail": "few"}}
    assert "samples" not in found
    assert json.loads(report().json(with_samples=True))["samples"] == [1, 2]


def test_a_folder_has_page_object_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshbench.report_tools.can_draw", lambda: True)
    report().write(tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"report.md", "report.json", "rates.png"}
    assert json.loads((tmp_path / "new" / "report.json").read_text())["samples"] == [1, 2]


def test_a_check_of_too_short_a_run_does_not_fail() -> None:
    assert all_hold([Check("flat", holds=None, detail=""), Check("sound", holds=True, detail="")])
    assert not all_hold([Check("sound", holds=False, detail="")])


def command(found: Report | MeshError) -> click.Command:
    @click.command()
    @output_option("somewhere")
    @json_option
    @experiment
    def measure(output: Path) -> Report:
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
        assert output == Path("there")
        if isinstance(found, MeshError):
            raise found
        return found

    return measure


@pytest.mark.parametrize("is_good", [True, False])
def test_the_exit_code_says_whether_a_report_is_good(*, is_good: bool) -> None:
    ended = CliRunner().invoke(command(report(is_good=is_good)), ["-o", "there"])
    assert ended.exit_code == (0 if is_good else 1)
    assert ended.stdout.startswith("one way delay")
    assert ended.stdout.endswith("report: there/report.md\n")


def test_json_is_alone_on_standard_output() -> None:
    ended = CliRunner().invoke(command(report()), ["-o", "there", "--json"])
    assert json.loads(ended.stdout)["most"] == "inf"
    assert "report: there/report.md" in ended.stderr


def test_a_program_of_its_own_tells_why_nothing_was_measured() -> None:
    ended = CliRunner().invoke(command(MeshError("no answer")), ["-o", "there"])
    assert (ended.exit_code, ended.stderr) == (1, "Error: no answer\n")


def test_a_command_of_a_group_leaves_errors_to_it() -> None:
    group = click.Group(commands={"measure": command(MeshError("no answer"))})
    ended = CliRunner().invoke(group, ["measure", "-o", "there"])
    assert isinstance(ended.exception, MeshError)


def test_a_lab_is_required_and_logs_have_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Any] = []

    @click.command()
    @logs_option()
    @lab_experiment
    def measure(logs: Path) -> Report:
        folders.append((logs, logs.is_dir()))
        return report()

    monkeypatch.setattr("meshbench.lab.network.lab_supported", lambda: "a lab needs root")
    ended = CliRunner().invoke(measure, [])
    assert (ended.exit_code, ended.stderr) == (1, "Error: a lab needs root\n")
    monkeypatch.setattr("meshbench.lab.network.lab_supported", lambda: None)
    assert CliRunner().invoke(measure, []).exit_code == 0
    [(folder, was_there)] = folders
    assert was_there
    assert not folder.exists()
