"""The report folder, from results that were made up."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshbench.speculation_acceptance import WITH_DRAFT
from meshbench.speculation_report import speculation_report
from meshbench.speculation_results import LLAMA_RPC, ConcurrentRequests, DraftCounts, Results, RunConditions
from meshbench.under_test.links import KnownLinks
from tests.support.spec_bench_samples import sample

COUNTS = DraftCounts(
    num_windows=6,
    num_drafts=5,
    num_drafted=9,
    num_accepted=6,
    drafted_per_position=(5, 4),
    accepted_per_position=(4, 2),
)


@pytest.fixture
def results() -> Results:
    found = Results(
        RunConditions(
            command="mesh bench spec m.gguf --tokens 11",
            model="m.gguf",
            draft_model="d.gguf",
            num_stages=3,
            num_threads=1,
            num_tokens=11,
            numeric_mode="fast",
            seed=1,
            processor="a processor",
            num_cores=2,
            software="spanmesh 0",
        )
    )
    found.servers = {
        WITH_DRAFT: ("--speculate", "auto", "--draft", "d.gguf"),
        "exact": ("--speculate", "auto", "--exact"),
    }
    found.hops_ms = {5.0: 5.1}
    found.samples = [
        sample(0, "off", 10),
        sample(0, "auto", 25, counts=COUNTS),
        sample(0, "draft/8", 12, system=LLAMA_RPC, server="draft/8"),
        sample(1, "off", 10),
        sample(1, "replay", 50),
        sample(2, "off", 10, is_raw=True, workload="built-in-raw"),
        sample(2, "auto", 77, is_raw=True, workload="built-in-raw", text="and so on " * 9),
        sample(3, "off", 10, server="exact"),
        sample(3, "auto", 10, server="exact", text="It was a bright and sunny day."),
    ]
    found.groups = [ConcurrentRequests(4, 5.0, "auto", 50.0, 55.0, 1)]
    found.peer_rates = {"off": 8.0, "draft/8": 12.0, "ngram-mod": "it exited with code 1"}
    found.peer_delay_ms = 20.0
    found.failures = ["stage 2 went away"]
    return found


def section(page: str, title: str) -> str:
    return page.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_page_says_what_was_found(results: Results, tmp_path: Path) -> None:
    report = speculation_report(results, categories={"writing"}, preset="acceptance")
    report.write(tmp_path / "new" / "folder")
    page = (tmp_path / "new" / "folder" / "report.md").read_text()
    assert "5.10 for 5" in page
    assert "```sh\nmesh bench spec m.gguf --tokens 11\n```" in page.partition("\n## ")[0]
    warnings = section(page, "Warnings")
    assert "stage 2 went away" in warnings
    assert "in exact mode the text differs: auto on writing 81" in warnings
    assert "degenerate, repeating answers among: built-in-raw" in warnings
    assert "| writing | 25% |" not in page
    assert f"| 5 | writing | {WITH_DRAFT} | 50% |" in section(page, "How close `auto` comes to `replay`")
    assert "| writing | 2.50 | 5.00 | 1.00 |" in section(page, "Chat: times faster than off")
    assert "| 5 | writing | auto (auto with draft) | 0.80 (5) | 0.50 (4) |" in page
    assert "| 4 | 5 | auto | 50.0 | 55.0 | 1.10 | 1 |" in section(page, "Requests at once")
    peer = section(page, "llama.cpp RPC: its settings")
    assert "| draft/8 | 12.0 | 1.50 |" in peer
    assert "it exited with code 1" in peer
    assert "mesh serve MODEL --speculate auto --draft d.gguf" in section(page, "Recommended for production")


def test_a_page_of_a_running_mesh_names_where_it_is(results: Results, tmp_path: Path) -> None:
    results.conditions = replace(
        results.conditions, url="http://there:8000", placement=("attic [0, 30)",), num_threads=None
    )
    results.omitted = ["`replay`"]
    results.links = KnownLinks({"links": [], "round": None}, "measured before the load")
    speculation_report(results, categories=(), preset="sweep").write(tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert "m.gguf as served at http://there:8000, 3 stages: attic [0, 30). 11 tokens per answer" in page
    assert "2 cores for the client" in page
    assert section(page, "Not measured from outside").strip() == "- `replay`"
    assert "no other host has joined" in section(page, "Links between the hosts")
    figures = json.loads((tmp_path / "report.json").read_text())
    assert figures["links"]["links"] == []
    assert figures["circumstances"]["url"] == "http://there:8000"


def test_raw_figures_are_apart_from_chat(results: Results, tmp_path: Path) -> None:
    speculation_report(results, categories=(), preset="sweep").write(tmp_path)
    page = (tmp_path / "report.md").read_text()
    raw = section(page, "Raw completions, without a chat template: not comparable with chat")
    assert "7.70" in raw
    assert "7.70" not in page.replace(raw, "")
    assert "Acceptance table" not in page


def test_degenerate_answers_are_marked_and_left_out_of_a_second_mean(
    results: Results, tmp_path: Path
) -> None:
    where = {"workload": "writing", "server": WITH_DRAFT}
    loop = "and so on " * 9
    other = {**where, "workload": "coding"}
    results.samples = [
        sample(0, "off", 10, **where),
        sample(0, "auto", 20, **where),
        sample(1, "off", 10, text=loop, **other),
        sample(1, "auto", 60, text=loop, **other),
    ]
    speculation_report(results, categories=(), preset="sweep").write(tmp_path)
    speed_ups = section((tmp_path / "report.md").read_text(), "Chat: times faster than off")
    assert "| coding | 6.00* |" in speed_ups
    assert "| **mean** | **4.00** |" in speed_ups
    assert "| **mean without degenerate answers** | **2.00** |" in speed_ups


def test_the_figures_can_be_read_by_programs(results: Results, tmp_path: Path) -> None:
    speculation_report(results, categories={"writing"}, preset="acceptance").write(tmp_path)
    figures = json.loads((tmp_path / "report.json").read_text())
    assert len(figures["samples"]) == len(results.samples)
    assert figures["recommendation"]["chosen"]["setting"] == "auto"
    assert {line["verdict"] for line in figures["acceptance"]} <= {"reached", "missed", "not measured"}
    assert figures["crowds"][0]["ratio"] == pytest.approx(1.1)


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="the extra `bench` is not installed"
)
def test_pictures_are_in_the_folder_and_on_the_page(results: Results, tmp_path: Path) -> None:
    speculation_report(results, categories=(), preset="sweep").write(tmp_path)
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == ["acceptance-by-position.png", "speed-up-by-delay.png", "speed-up-by-workload.png"]
    page = (tmp_path / "report.md").read_text()
    assert all(f"![{name}]({name})" in page for name in pictures)


def test_without_matplotlib_there_is_a_page_all_the_same(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    speculation_report(results, categories=(), preset="sweep").write(tmp_path)
    assert not list(tmp_path.glob("*.png"))
    assert "## Pictures" not in (tmp_path / "report.md").read_text()


def test_a_run_without_any_sample_makes_a_page_too(results: Results, tmp_path: Path) -> None:
    empty = Results(results.conditions, failures=["phase: no answer"])
    speculation_report(empty, categories=(), preset="acceptance").write(tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert "not measured: phase: no answer" in page
    assert "No setting was measured" in page


def test_the_table_on_the_terminal_names_figure_and_floor(results: Results) -> None:
    report = speculation_report(results, categories={"writing"}, preset="acceptance")
    text = report.text()
    assert "      missed    5.00    ≥ 6  replay over off, mean of all workloads, 5 ms" in text
    assert "not measured" in text
