"""`mesh bench chaos` in small: one stage killed, one stopped, while streams run.

A host that is cut off is in tests/end_to_end/lab/test_multi_host.py.
"""

import json
from pathlib import Path

import pytest

from mesh.cli.main import run
from tests.support.lab_fixtures import require_lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]

PAUSES = ("pause seen by a client, median", "pause, worst")
PROBE = "faults: a new request's answer or 503, worst, s"


@pytest.fixture(autouse=True)
def _lab() -> None:
    require_lab()


def test_no_stream_fails_or_differs_whatever_is_lost(smollm2_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    faults = ["--faults", "2", "--kinds", "tail,stop", "--seed", "5", "--hang-ups", "0.3"]
    size = ["--quick", "--stages", "2", "--streams", "3", "--delay-ms", "2", "--logs", str(tmp_path / "logs")]
    code = run(["bench", "chaos", str(smollm2_path), *faults, *size, "--output", str(folder)])
    found = json.loads((folder / "report.json").read_text())
    assert found["failures"] == []
    (scenario,) = found["scenarios"]
    assert scenario["failures"] == []
    assert scenario["problems"] == []
    # The mesh was harmed, noticed it, and came back each time.
    assert {repair["kind"] for repair in scenario["repairs"]} == {"tail", "stop"}
    for repair in scenario["repairs"]:
        assert repair["problem"] == ""
        assert repair["repair_s"] > 0
        assert repair["pauses_s"]
        assert repair["newcomer"]["outcome"] in {"answer", "503"}
    lines = {line["title"]: line for line in found["lines"]}
    assert lines["2 faults: failed streams"]["measured"] == 0
    assert "clients disconnected" in lines["2 faults: failed streams"]["note"]
    assert lines["2 faults: texts different from the undisturbed run"]["measured"] == 0
    assert lines["faults: new requests with neither"]["measured"] == 0
    for title in PAUSES:
        line = lines[f"faults: {title}, s"]
        assert line["verdict"] == "met", line
    # Tests beside this one compute as well: the bound of both is held against the quickest.
    assert min(repair["newcomer"]["took_s"] for repair in scenario["repairs"]) <= lines[PROBE]["wanted"]
    missed = {title for title, line in lines.items() if line["verdict"] == "missed"}
    assert missed <= {PROBE}
    checks = {check["name"]: check["holds"] for check in found["checks"]}
    assert checks["no session left when idle, after faults"] is True
    assert checks["no process left, after faults"] is True
    assert (code, found["good"]) == (0, True)
    page = (folder / "report.md").read_text()
    assert "## Acceptance" in page
    assert "SIGSTOP of a stage's process for some seconds" in page
