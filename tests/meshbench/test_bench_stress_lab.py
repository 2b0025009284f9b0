"""`mesh bench stress --quick`, from the lab to the report."""

import json
from pathlib import Path

import pytest

from mesh.cli.main import run
from meshbench.lab.network import Lab
from meshbench.lab.systems import COMMAND, MeshSystem
from tests.support.lab_fixtures import require_lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]


@pytest.fixture(autouse=True)
def _lab() -> None:
    require_lab()


def test_every_answer_of_a_quick_load_is_checked(smollm2_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    size = ["--hosts", "2", "--chats", "3", "--concurrency", "3", "--requests", "6"]
    arguments = ["--quick", "--exact", *size, "--output", str(folder)]
    assert run(["bench", "stress", str(smollm2_path), *arguments]) == 0
    found = json.loads((folder / "report.json").read_text())
    assert found["good"]
    assert found["failures"] == []
    (step,) = found["steps"]
    assert (step["concurrency"], step["figures"]["completed"], step["figures"]["failed"]) == (3, 6, 0)
    assert step["figures"]["max_concurrency"] == 3
    # All were asked alone before, and exact means equal.
    assert step["judgement"]["num_compared"] == 6
    assert step["judgement"]["num_forks"] == 0
    assert step["judgement"]["problems"] == []
    # A chat's later turn begins with what the stages still hold of it.
    assert step["figures"]["total_cached_tokens"] > 0
    # A token goes round three hosts, 5 ms each.
    assert step["figures"]["itl_ms"]["median"] > 15

    checks = {check["name"]: check["holds"] for check in found["checks"]}
    assert checks["no session left when idle"] is True
    assert [stage["open_sessions"] for stage in found["stages"]] == [0, 0]
    assert all(stage["rows"] >= stage["decodes"] > 0 for stage in found["stages"])
    assert len(found["footprints"]) == 2
    for footprint in found["footprints"]:
        assert footprint["process_bytes"] > footprint["weight_bytes"]
        assert footprint["host_bytes"] > footprint["process_bytes"]
    roles = {(each["host"], each["role"]) for each in found["memory"]}
    assert {(0, "coordinator"), (1, "stage"), (2, "stage"), (1, "join"), (2, "join"), (1, "ray")} <= roles
    page = (folder / "report.md").read_text()
    assert "## Checks" in page
    assert "## Memory, MiB" in page


@pytest.mark.sweep
def test_clients_with_keys_hang_up_and_nothing_is_left_of_them(smollm2_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    size = ["--hosts", "1", "--delay-ms", "1", "--chats", "3", "--concurrency", "4", "--requests", "16"]
    arguments = ["--keys", "2", "--hang-ups", "0.4", "--exact", *size, "--output", str(folder)]
    assert run(["bench", "stress", str(smollm2_path), *arguments]) == 0
    found = json.loads((folder / "report.json").read_text())
    counts = found["clients"]
    assert counts["num_requests"] == 16
    assert counts["num_failed"] == counts["num_unlike"] == 0
    num_hung_up = counts["num_hung_up_early"] + counts["num_hung_up_late"]
    assert 0 < num_hung_up == 16 - counts["num_finished"] < 16
    assert counts["num_cached_tokens"] > 0
    (step,) = found["steps"]
    assert step["judgement"]["num_compared"] == counts["num_finished"] + counts["num_hung_up_late"]
    assert (step["figures"]["completed"], step["figures"]["failed"]) == (counts["num_finished"], 0)
    checks = {check["name"]: check["holds"] for check in found["checks"]}
    assert checks["no session left when idle"] is True


@pytest.mark.sweep
def test_a_mesh_that_was_joined_by_hand_is_measured_from_outside(smollm2_path: Path, tmp_path: Path) -> None:
    load = ["--quick", "--chats", "2", "--concurrency", "2", "--requests", "4"]
    with Lab(4, shared=[tmp_path]) as lab:
        options = ["--ctx-size", "1024", "--parallel", "4", "--exact"]
        mesh = MeshSystem(lab, smollm2_path, tmp_path, options=options)
        try:
            mesh.start()
            lab.set_delay_ms(5.0)
            where = ["--url", mesh.url, "--output", str(tmp_path / "report"), "--json"]
            done = lab.exec(0, [COMMAND, "bench", "stress", *where, *load], timeout_s=300)
            mesh.stop()
        finally:
            mesh.kill()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (step,) = found["steps"]
    assert (step["figures"]["completed"], step["judgement"]["num_compared"]) == (4, 4)
    assert (step["judgement"]["num_forks"], step["judgement"]["problems"]) == (0, [])
    # A token goes round four hosts, 5 ms each, and the links say so too.
    assert step["figures"]["itl_ms"]["median"] > 20
    assert len(found["links"]["links"]) == 12
    assert all(link["hop_ms"] >= 5 and link["bytes_per_s"] > 1e5 for link in found["links"]["links"])
    assert [link["source"] for link in found["ring_links"]] == [
        "head",
        *(stage["host"] for stage in found["stages"]),
    ]
    assert sum(link["wire_ms"] for link in found["ring_links"]) >= 20
    assert not any(words.startswith(("links", "bandwidths")) for words in found["not_measured_from_outside"])
    assert "## Links between the hosts" in (tmp_path / "report" / "report.md").read_text()
