"""Where tests run in several processes: those with hosts follow one another in one, which is not held up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.tiny_suites import run_pytest

if TYPE_CHECKING:
    from pathlib import Path

# Each test notes in which process it ran, and how it stood back.
SUITE = """
import os, time
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.{mark}
def test_it(number):
    time.sleep(0.5)
    with Path("{name}").open("a") as file:
        file.write(f"{{os.getpid()}} {{os.getpriority(os.PRIO_PROCESS, 0)}}\\n")
"""


def test_hosts_share_one_process_and_the_others_stand_back(tmp_path: Path) -> None:
    marks = {"first": "lab", "second": "cluster", "plain": "model"}
    for name, mark in marks.items():
        (tmp_path / f"test_{name}.py").write_text(SUITE.format(name=name, mark=mark))
    run = run_pytest(tmp_path, "-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder")
    assert run.returncode == 0, run.stdout
    ran = {name: [line.split() for line in (tmp_path / name).read_text().splitlines()] for name in marks}
    hosts, others = [*ran["first"], *ran["second"]], ran["plain"]
    assert len({process for process, _ in hosts}) == 1
    assert len(hosts) == 4
    (of_hosts,) = {int(level) for _, level in hosts}
    (of_others,) = {int(level) for _, level in others}
    assert of_others == min(19, of_hosts + 10)
