"""`mesh bench spec --quick`, from the lab to the report."""

import json
from pathlib import Path

import pytest

from mesh.cli.main import run
from tests.support.lab_fixtures import require_lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]


@pytest.fixture(autouse=True)
def _lab() -> None:
    require_lab()


def test_a_quick_look_ends_in_a_report(smollm2_path: Path, tmp_path: Path) -> None:
    folder, logs = tmp_path / "report", tmp_path / "logs"
    names = {"built-in", "built-in-raw"}
    arguments = ["--quick", "--seed", "7", "--tokens", "16", "--draft-type", "none"]
    arguments += ["--workloads", ",".join(names)]
    where = ["--output", str(folder), "--logs", str(logs)]
    assert run(["bench", "spec", str(smollm2_path), *arguments, *where]) == 0
    figures = json.loads((folder / "report.json").read_text())
    assert figures["failures"] == []
    assert figures["circumstances"]["seed"] == 7
    # The wire's delay, and what the kernel and the router add to it.
    assert 5.0 <= figures["hops_ms"]["5.0"] < 8.0

    samples = figures["samples"]
    asked = {(sample["workload"], sample["setting"]) for sample in samples}
    assert asked == {(name, setting) for name in names for setting in ("off", "ngram", "auto", "replay")}
    assert all(sample["num_tokens"] == 16 for sample in samples)
    # Four hops of 5 ms and three stages' computing: nobody decodes a token at a time faster than that.
    off = [sample["tokens_per_s"] for sample in samples if sample["setting"] == "off"]
    assert max(off) < 50
    assert all(sample["counts"]["num_drafted"] == 0 for sample in samples if sample["setting"] == "off")

    said = {sample["turn"]: sample["text"] for sample in samples if sample["setting"] == "off"}
    for sample in samples:
        # The fast mode may choose another token in a wider window; then the answer is another one.
        if sample["setting"] == "replay" and sample["text"] == said[sample["turn"]]:
            assert sample["counts"]["num_drafted"] == sample["counts"]["num_accepted"] == 15

    rows = [row for row in figures["rows"] if row["place"]["setting"] != "off"]
    assert all(row["speed_up"] > 0 for row in rows)
    assert figures["crowds"][0]["num_at_once"] == 4
    page = (folder / "report.md").read_text()
    assert "## Recommended for production" in page
    assert "## Raw completions" in page
