"""`mesh bench stress --url` and `mesh bench spec --url` against a real mesh that runs in this process."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh.cli.main import run
from meshbench.http_client import parse_url
from meshbench.stress.checks import prefix_mismatches
from meshbench.under_test.mesh import reach_mesh
from meshbench.under_test.options import RemoteTarget
from tests.support import mesh_in_process
from tests.support.api_harness import KEY, MODEL
from tests.support.mesh_in_process import CLIENT_WORKLOAD, NUM_STAGES

pytestmark = pytest.mark.model

mesh_url = mesh_in_process.mesh_url


@pytest.fixture(autouse=True)
def _command(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The key comes from the environment; commands change what a signal does."""
    monkeypatch.setenv("MESH_API_KEY", KEY)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def report_of(bench: str, url: str, folder: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    assert run(["bench", bench, *arguments, "--url", url, "-o", str(folder)]) == code
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def test_a_running_mesh_is_loaded_and_every_answer_checked(
    mesh_url: str, smollm2_path: Path, tmp_path: Path
) -> None:
    load = ("--quick", "--chats", "2", "--concurrency", "1,2", "--requests", "3", "--goodput", "e2el:600000")
    found = report_of("stress", mesh_url, tmp_path, str(smollm2_path), *load)
    assert found["good"]
    assert [(step["concurrency"], step["figures"]["completed"]) for step in found["steps"]] == [
        (1, 3),
        (2, 3),
    ]
    for step in found["steps"]:
        # All were asked alone before, and the mesh says that it is exact.
        assert (step["judgement"]["num_compared"], step["judgement"]["num_forks"]) == (3, 0)
        assert step["judgement"]["problems"] == []
        assert step["figures"]["good_share"] == 1.0
        assert step["figures"]["ttft_ms"]["median"] > 0
    assert any("byte-equal to alone" in check["name"] for check in found["checks"])
    checks = {check["name"]: check["holds"] for check in found["checks"]}
    assert checks["no session left when idle"] is True
    assert [stage["open_sessions"] for stage in found["stages"]] == [0] * NUM_STAGES
    assert all(stage["rows"] >= stage["decodes"] > 0 for stage in found["stages"])
    assert all(link["num_windows"] > 0 for link in found["ring_links"])
    told = found["circumstances"]
    assert (told["url"], told["numeric_mode"], told["stages"]) == (mesh_url, "exact", NUM_STAGES)
    assert (told["slots"], told["ctx_size"]) == (CLIENT_WORKLOAD.num_slots, CLIENT_WORKLOAD.ctx_size)
    assert found["memory"] == found["footprints"] == []
    hidden = " ".join(found["not_measured_from_outside"])
    for words in ("memory of processes", "llama.cpp RPC", "links: there are no hosts here"):
        assert words in hidden
    assert KEY not in (tmp_path / "report.md").read_text() + json.dumps(found)


def test_proposers_that_the_mesh_has_are_measured(mesh_url: str, tmp_path: Path) -> None:
    load = ("--quick", "--tokens", "6", "--workloads", "built-in", "--proposers", "ngram,draft,replay")
    found = report_of("spec", mesh_url, tmp_path, *load)
    assert found["failures"] == []
    assert [(sample["workload"], sample["setting"]) for sample in found["samples"]] == [
        ("built-in", "off"),
        ("built-in", "ngram"),
    ]
    off, ngram = found["samples"]
    # Exact mode: proposers change the time only.
    assert (off["num_tokens"], off["text"]) == (6, ngram["text"])
    assert off["counts"]["num_drafted"] == 0
    assert found["servers"] == {"as served": ["--speculate", "ngram", "--exact"]}
    hidden = found["not_measured_from_outside"]
    assert "draft: the mesh is served with --speculate ngram" in hidden
    assert any("`replay`" in words for words in hidden)
    assert "random prompts: name the model's file as MODEL" in hidden


def test_a_proposer_that_the_mesh_lacks_is_named(
    mesh_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--url", mesh_url, "--proposers", "draft", "-o", str(tmp_path)]
    assert run(["bench", "spec", *arguments]) == 1
    assert (
        "has none of these proposers: draft; it is served with --speculate ngram" in capsys.readouterr().err
    )


def test_a_wrong_key_and_an_unknown_model_are_refused(
    mesh_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "stress", "--url", mesh_url, "-o", str(tmp_path)]
    assert run([*arguments, "--model", "other"]) == 1
    assert f"no model 'other'; there are {MODEL}" in capsys.readouterr().err
    monkeypatch.setenv("MESH_API_KEY", "sk-of-nobody")
    assert run(arguments) == 1
    assert "needs another API key" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_counters_of_a_running_mesh_are_read(mesh_url: str) -> None:
    mesh, served = reach_mesh(RemoteTarget(parse_url(mesh_url), KEY))
    assert served.num_places(has_key=True) == CLIENT_WORKLOAD.num_slots - 1
    assert prefix_mismatches(mesh.metrics()) == 0


@pytest.mark.sweep
def test_clients_of_a_running_mesh_hang_up_and_leave_nothing(mesh_url: str, tmp_path: Path) -> None:
    load = ("--hang-ups", "0.5", "--chats", "4", "--concurrency", "1", "--requests", "16")
    found = report_of("stress", mesh_url, tmp_path, *load)
    counts = found["clients"]
    num_hung_up = counts["num_hung_up_early"] + counts["num_hung_up_late"]
    assert 0 < num_hung_up == 16 - counts["num_finished"] < 16
    assert counts["num_failed"] == counts["num_unlike"] == counts["num_begun_anew"] == 0
    checks = {check["name"]: check["holds"] for check in found["checks"]}
    assert checks["no session left when idle"] is True


def test_tokens_behind_long_prompts_are_measured(mesh_url: str, tmp_path: Path) -> None:
    options = ("--preset", "acceptance", "--lines", "context", "--contexts", "8,2000", "--rounds", "1")
    found = report_of("stress", mesh_url, tmp_path, *options)
    # The mesh's context does not hold 2,000 words.
    assert [line["title"] for line in found["lines"]] == [
        f"{what} {count} behind 8 words each, mesh as users run it"
        for count in (1, 2)
        for what in ("prefill tokens/s of", "tokens/s of", "time to first token of a second turn, ms,")
    ]
    assert all(line["measured"] > 0 for line in found["lines"])
    assert found["failures"] == []


@pytest.mark.sweep
def test_lines_of_the_acceptance_table_are_measured_from_outside(mesh_url: str, tmp_path: Path) -> None:
    found = report_of("stress", mesh_url, tmp_path, "--preset", "acceptance", "--rounds", "1")
    titles = [line["title"] for line in found["lines"]]
    assert [title.partition(",")[0] for title in titles] == [
        "total tokens/s at 2 concurrent",
        "total tokens/s at 2 concurrent",
        "rate of the slowest request at 2 concurrent",
        "rows a batch at 2 concurrent",
        "total tokens/s at 2 concurrent",
        "prefill tokens/s",
        # As many words as fit into this mesh's context.
        "second turn of a 691-word chat",
        "ITL p99 of a decoding session while a 792-word prefill runs",
        "prefill tokens/s of 1 behind 200 words each",
        "tokens/s of 1 behind 200 words each",
        "time to first token of a second turn",
        "prefill tokens/s of 2 behind 200 words each",
        "tokens/s of 2 behind 200 words each",
        "time to first token of a second turn",
    ]
    assert all(line["measured"] > 0 for line in found["lines"])
    assert found["failures"] == []
    assert "the line `memory` of the acceptance table" in found["not_measured_from_outside"]
