"""The reports in examples/ are what `mesh bench spec` prints today, of what it measured then."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mesh.engine import FeatureCounts
from meshbench.cli import spec
from meshbench.speculation_report import speculation_report
from meshbench.speculation_results import ConcurrentRequests, DraftCounts, Results, RunConditions, Sample
from speculative.acceptance import DepthStatistics

if TYPE_CHECKING:
    from meshbench.speculation_plan import Preset

EXAMPLES = Path(__file__).parents[3] / "examples"
# All others are categories of Spec-Bench.
OUR_WORKLOADS = {"random-token", "repository-edit", "tool-call", "warm-repeat"}


@dataclass(frozen=True)
class Example:
    """A report in examples/."""

    folder: Path
    preset: Preset

    @property
    def page(self) -> str:
        return (self.folder / "report.md").read_text()

    @property
    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        return figures

    @property
    def pictures(self) -> list[str]:
        return re.findall(r"^!\[[^]]+\]\(([^)]+)\)$", self.page, re.MULTILINE)


@pytest.fixture(
    params=[("speculation_report", "acceptance"), ("drafter_report", "features")],
    ids=lambda param: str(param[0]),
)
def example(request: pytest.FixtureRequest) -> Example:
    name, preset = request.param
    return Example(EXAMPLES / name, preset)


def sample(figures: dict[str, Any]) -> Sample:
    counts = {name: as_it_was(value) for name, value in figures["counts"].items()}
    if "by_depth" in counts:
        by_depth = {name: as_it_was(value) for name, value in counts["by_depth"].items()}
        counts["by_depth"] = DepthStatistics(**by_depth)
    if counts.get("features") is not None:
        counts["features"] = FeatureCounts(**counts["features"])
    given = {name: as_it_was(figures[name]) for name in Sample.__dataclass_fields__}
    given["counts"] = DraftCounts(**counts)
    return Sample(**given)


def as_it_was(value: Any) -> Any:
    """JSON has no tuples."""
    return tuple(value) if isinstance(value, list) else value


def group(figures: dict[str, Any]) -> ConcurrentRequests:
    return ConcurrentRequests(**{each.name: figures[each.name] for each in fields(ConcurrentRequests)})


def results(figures: dict[str, Any]) -> Results:
    peer = figures["llama_cpp_rpc"]
    return Results(
        RunConditions(**figures["circumstances"]),
        samples=[sample(found) for found in figures["samples"]],
        groups=[group(found) for found in figures["crowds"]],
        peer_rates=peer["tokens_per_s"],
        peer_delay_ms=peer["delay_ms"],
        servers={name: tuple(options) for name, options in figures["servers"].items()},
        hops_ms={float(asked): found for asked, found in figures["hops_ms"].items()},
        failures=figures["failures"],
        took_s=figures["took_s"],
    )


def test_its_samples_give_this_very_page(example: Example) -> None:
    found = results(example.figures)
    categories = {each.workload for each in found.samples if not each.is_raw} - OUR_WORKLOADS
    report = speculation_report(found, categories=categories, preset=example.preset)
    assert report.markdown(example.pictures) == example.page


def test_its_command_line_measures_what_it_shows(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    figures = example.figures
    command, *words = shlex.split(figures["circumstances"]["command"])[2:]
    assert command == "spec"
    for word in words:
        if word.endswith((".jsonl", ".gguf")):
            Path(word).touch()
    with spec.make_context("spec", words) as context:
        asked = context.params
    assert asked["preset"] == example.preset
    assert {found["num_tokens"] for found in figures["samples"]} == {asked["num_tokens"]}
    if asked["workloads"] is not None:
        assert {found["workload"] for found in figures["samples"]} == set(asked["workloads"].split(","))


def test_all_of_it_is_there(example: Example) -> None:
    assert example.figures["failures"] == []
    assert [name for name in example.pictures if not (example.folder / name).is_file()] == []
    assert "## Recommended for production" in example.page


def test_chat_stands_beside_raw_completions() -> None:
    page = Example(EXAMPLES / "drafter_report", "features").page
    assert "## Chat beside raw completions, each over its own off" in page
    assert "## Acceptance by distance from the drafter's last feature" in page


def test_it_names_no_folder_of_the_machine(example: Example) -> None:
    figures = example.figures
    said = [option for server in figures["servers"].values() for option in server]
    said += [str(value) for value in figures["circumstances"].values()]
    assert [text for text in said if text.startswith("/")] == []
