"""The proof that each host holds its share only, on a model that is made in a moment."""

import json
import subprocess
import sys

import pytest

from meshbench.stress.memory import Footprint
from tests.qualification.memory_shares import shares_table
from tests.support.lab_fixtures import require_lab


def test_a_host_that_holds_too_much_stands_out() -> None:
    fair = Footprint(0, "host1", 200 * 10**6, 50 * 10**6, 500 * 10**6, 600 * 10**6)
    greedy = Footprint(1, "host2", 200 * 10**6, 50 * 10**6, 551 * 10**6, 600 * 10**6)
    lines = shares_table([fair, greedy], ["[0, 11)", "[11, 22)"]).splitlines()
    assert lines[2].split(" | ")[3:] == ["200", "50", "500", "250", "yes |"]
    assert lines[3].split(" | ")[3:] == ["200", "50", "551", "301", "NO |"]


@pytest.mark.lab
@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_three_hosts_hold_their_shares_of_a_model_made_on_the_spot() -> None:
    require_lab()
    argv = [
        sys.executable,
        "-m",
        "tests.qualification.memory_shares",
        "--shape",
        "tiny",
        "--tokens",
        "4",
        "--json",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["within"] is True
    assert found["num_tokens"] == 8
    assert found["layers"] == ["[0, 2)", "[2, 4)", "[4, 6)"]
    assert all(each["process_bytes"] > 50 * 10**6 for each in found["footprints"])
