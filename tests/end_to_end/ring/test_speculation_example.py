"""The report in examples/ is what `mesh bench spec` prints today, of what it measured then."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from mesh.bench.cli import spec
from mesh.bench.speculation_report import as_markdown, work_out
from mesh.bench.speculation_results import DraftCounts, Results, RunConditions, Sample

FOLDER = Path(__file__).parents[3] / "examples" / "speculation_report"
PAGE = (FOLDER / "report.md").read_text()
FIGURES: dict[str, Any] = json.loads((FOLDER / "report.json").read_text())
PICTURES = re.findall(r"^!\[[^]]+\]\(([^)]+)\)$", PAGE, re.MULTILINE)


def sample(figures: dict[str, Any]) -> Sample:
    counts = {name: as_it_was(value) for name, value in figures["counts"].items()}
    given = {name: as_it_was(figures[name]) for name in Sample.__dataclass_fields__}
    given["counts"] = DraftCounts(**counts)
    return Sample(**given)


def as_it_was(value: Any) -> Any:
    """JSON has no tuples."""
    return tuple(value) if isinstance(value, list) else value


def results() -> Results:
    return Results(
        RunConditions(**FIGURES["circumstances"]),
        samples=[sample(figures) for figures in FIGURES["samples"]],
        servers={name: tuple(options) for name, options in FIGURES["servers"].items()},
        hops_ms={float(asked): found for asked, found in FIGURES["hops_ms"].items()},
        failures=FIGURES["failures"],
        took_s=FIGURES["took_s"],
    )


def test_its_samples_give_this_very_page() -> None:
    report = work_out(results(), categories=(), preset="sweep")
    assert as_markdown(report, PICTURES) == PAGE


def test_its_command_line_measures_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command, *words = shlex.split(FIGURES["circumstances"]["command"])[2:]
    assert command == "spec"
    for word in words:
        if word.endswith((".jsonl", ".gguf")):
            Path(word).touch()
    with spec.make_context("spec", words) as context:
        asked = context.params
    assert {figures["num_tokens"] for figures in FIGURES["samples"]} == {asked["num_tokens"]}
    assert {figures["workload"] for figures in FIGURES["samples"]} == set(asked["workloads"].split(","))


def test_all_of_it_is_there() -> None:
    assert FIGURES["failures"] == []
    assert [name for name in PICTURES if not (FOLDER / name).is_file()] == []
    assert "## Recommended for production" in PAGE


def test_it_names_no_folder_of_the_machine() -> None:
    said = [option for server in FIGURES["servers"].values() for option in server]
    said += [str(value) for value in FIGURES["circumstances"].values()]
    assert [text for text in said if text.startswith("/")] == []
