"""`mesh bench spec`, a quick look and a drafter of blocks, from the lab to the report."""

import json
from pathlib import Path

import pytest

from mesh.cli.main import run
from meshbench.speculation_blocks import PAIRED
from speculative.proposer import DrafterKind
from tests.support.block_drafters import BlockDrafter
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


def test_a_drafter_of_blocks_is_measured_as_it_is_and_as_a_good_one(
    smollm2_path: Path, tmp_path: Path
) -> None:
    drafter = BlockDrafter(DrafterKind.DSPARK, is_complete=False).write(smollm2_path, tmp_path / "d.gguf")
    questions = tmp_path / "question.jsonl"
    questions.write_text(
        "\n".join(
            json.dumps({"question_id": number, "category": "writing", "turns": [turn]})
            for number, turn in enumerate(("Describe a river.", "Describe a street at night."))
        )
    )
    folder = tmp_path / "report"
    arguments = ["--preset", "features", "--draft", str(drafter), "--spec-bench", str(questions)]
    arguments += ["--delay-ms", "5", "--tokens", "24", "--replay-rates", "1,1,1,1", "--exact", "--no-rpc"]
    assert run(["bench", "spec", str(smollm2_path), *arguments, "--output", str(folder)]) == 0
    figures = json.loads((folder / "report.json").read_text())
    assert figures["failures"] == []
    samples = figures["samples"]
    assert {sample["workload"] for sample in samples} == {PAIRED}
    by_setting = {sample["setting"]: sample for sample in samples}
    assert set(by_setting) == {"off", "off again", "auto", "draft", "replay"}
    assert len({(sample["question"], sample["text"]) for sample in samples}) == 2
    replayed, real = by_setting["replay"]["counts"], by_setting["draft"]["counts"]
    # In the exact mode the answer is the recorded one.
    assert replayed["num_drafted"] == replayed["num_accepted"] > 4
    # Random weights are hardly ever right, so the controller lets them rest.
    assert real["num_drafted"] < replayed["num_drafted"]
    for counts in (replayed, real):
        assert 1 < counts["draft_tokens_per_pass"] <= 8
        assert counts["draft_ms_per_token"] > 0
    for setting in ("replay", "draft"):
        # A drafter that rests before the last question gets none for that.
        counted = [sample["counts"]["features"] for sample in samples if sample["setting"] == setting]
        assert sum(features["num_received"] for features in counted) > 0
    assert 1 < len(replayed["by_depth"]["proposed"]) <= 4
    lines = {line["title"]: line for line in figures["acceptance"]}
    assert lines["drafts of given acceptance over off, 5 ms"]["verdict"] == "reached"
    assert lines["drafter alone over off, 5 ms"]["target"] <= 1.0
    assert "## Drafting: what it costs and brings" in (folder / "report.md").read_text()
