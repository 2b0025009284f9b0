"""What `make test` makes of tests that fail: which are tried twice, and when that does not help."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.tiny_suites import ROOT, run_pytest

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = ("--dist", "loadgroup", "--no-loadscope-reorder", "--max-worker-restart", "1")
# Each test notes that it ran, and fails as often as is told here.
SUITE = """
import os, signal
from pathlib import Path
import pytest

def attempt(name, num_failures):
    with Path(name).open("a") as file:
        file.write("x")
    assert len(Path(name).read_text()) > num_failures

def test_good(): attempt("good", 0)
"""
TESTS = {
    "lab": "@pytest.mark.lab\ndef test_lab(): attempt('lab', 1)",
    "cluster": "@pytest.mark.cluster\ndef test_cluster(): attempt('cluster', 1)",
    "quiet": (
        "@pytest.mark.quiet\n@pytest.mark.parametrize('x', ['a b::c'])\n"
        "def test_quiet(x): attempt('quiet', 1)"
    ),
    "twice": "@pytest.mark.lab\ndef test_twice(): attempt('twice', 2)",
    "fixture": (
        "@pytest.fixture\ndef host(): attempt('fixture', 1)\n@pytest.mark.lab\ndef test_fixture(host): pass"
    ),
    "skips": (
        "@pytest.mark.lab\ndef test_skips():\n    if Path('skips').exists(): pytest.skip('not now')\n"
        "    attempt('skips', 1)"
    ),
    "plain": "def test_plain(): attempt('plain', 1)",
    "crash": "def test_crash(): os.kill(os.getpid(), signal.SIGSEGV)",
}


def make_test(folder: Path, *names: str, workers: int = 0) -> tuple[int, str]:
    """Exit code and output of the two lines of the Makefile, with some of the tests."""
    (folder / "test_it.py").write_text("\n\n".join([SUITE, *(TESTS[name] for name in names)]))
    first = run_pytest(folder, "-n", str(workers), *OPTIONS)
    if first.returncode != 1:
        return first.returncode, first.stdout
    second = run_pytest(folder, "--second-try")
    return second.returncode, second.stdout + second.stderr


def num_runs(folder: Path, name: str) -> int:
    return len((folder / name).read_text())


@pytest.mark.parametrize("target", ["test", "test-programs"])
def test_these_are_the_two_lines_of_the_makefile(target: str) -> None:
    # Where tests run below make, it would name the folder at the end.
    command = ["make", "--no-print-directory", "-n", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    recipe = " ".join(done.stdout.replace("\\\n", " ").split())
    first, second = recipe[recipe.index("/pytest -n ") :].split(" || ")
    assert f" {' '.join(OPTIONS)} " in first
    assert re.fullmatch(r"\{ test \$\? -eq 1 && \S+/pytest --second-try; \}", second)


def test_what_is_marked_is_tried_again_alone_and_named(tmp_path: Path) -> None:
    code, output = make_test(tmp_path, "fixture", "quiet")
    assert code == 0, output
    end = output.partition("tried twice: 2, at most 2 may be")[2]
    assert "passed test_it.py::test_quiet[a b::c]\n" in end
    assert "passed test_it.py::test_fixture\n" in end
    assert [num_runs(tmp_path, name) for name in ("good", "quiet", "fixture")] == [1, 2, 2]


def test_more_than_two_are_a_failure(tmp_path: Path) -> None:
    code, output = make_test(tmp_path, "lab", "cluster", "quiet")
    assert code not in {0, 5}
    assert "3 tests failed, and at most 2 may need a second try" in output
    assert "test_it.py::test_cluster" in output
    assert num_runs(tmp_path, "lab") == 1


def test_what_fails_again_is_a_failure(tmp_path: Path) -> None:
    code, output = make_test(tmp_path, "lab", "twice")
    assert code == 1
    assert "FAILED test_it.py::test_twice" in output.partition("tried twice")[2]
    assert (num_runs(tmp_path, "lab"), num_runs(tmp_path, "twice")) == (2, 2)


@pytest.mark.parametrize("other", ["plain", "crash"])
def test_everything_else_fails_at_once(other: str, tmp_path: Path) -> None:
    code, output = make_test(tmp_path, "lab", other, workers=2)
    assert code not in {0, 5}
    assert f"these failed, and are tried once only:\ntest_it.py::test_{other}" in output
    assert num_runs(tmp_path, "lab") == 1


def test_a_module_that_cannot_be_read_fails_at_once(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import no_such_module")
    code, output = make_test(tmp_path, "lab", workers=2)
    assert code not in {0, 5}
    assert "these failed, and are tried once only:\ntest_broken.py" in output
    assert num_runs(tmp_path, "lab") == 1


def test_what_is_skipped_the_second_time_has_not_passed(tmp_path: Path) -> None:
    code, output = make_test(tmp_path, "skips")
    assert code == 1
    assert "FAILED test_it.py::test_skips" in output.partition("tried twice")[2]
