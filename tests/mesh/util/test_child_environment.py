"""No Python that is started by this program imports from the working directory."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mesh.util.child_environment import foreign_environment, inherited_environment, relative_entries
from tests.support.hostile_modules import COMPLAINT, write_hostile_modules

PRODUCT = Path(__file__).parents[3]
# In a process of its own, since it changes its environment for good.
PARENT = """
import json, multiprocessing, os, subprocess, sys
from mesh.util.child_environment import foreign_environment, module_command, protect_children

def show(pipe):
    pipe.send(sys.path)

if __name__ == "__main__":
    protect_children()
    done = subprocess.run(module_command("site"), capture_output=True, text=True, check=True)
    subprocess.run([sys.executable, "-c", "import json"], check=True)
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    child = spawning.Process(target=show, args=(theirs,))
    child.start()
    found = {"module": done.stdout, "spawned": ours.recv()}
    child.join()
    print(json.dumps(found | {"foreign": foreign_environment().get("PYTHONPATH")}))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with modules that end whatever imports them."""
    return write_hostile_modules(tmp_path / "project")


def test_no_child_imports_from_the_working_directory(project: Path, tmp_path: Path) -> None:
    program = tmp_path / "programs" / "parent.py"
    program.parent.mkdir()
    program.write_text(PARENT)
    named = f"{PRODUCT}:{PRODUCT / 'proto'}"
    done = subprocess.run(
        [sys.executable, "-P", str(program)],
        cwd=project,
        env={**os.environ, "PYTHONPATH": named},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert f"'{project}'," not in found["module"]
    assert str(project) not in found["spawned"]
    assert str(PRODUCT) in found["spawned"]
    assert found["foreign"] == named


@pytest.mark.parametrize(
    ("command", "ending"),
    # The model is none, and more stages are wanted than it has layers: each ends where its work begins.
    [
        (["doctor"], "llama.cpp computes on"),
        (["plan", "absent.gguf"], "absent.gguf"),
        (["serve", "--stages", "99"], "not 99"),
    ],
)
def test_no_command_imports_from_the_working_directory(
    project: Path, command: Sequence[str], ending: str
) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("mesh"), *command],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert COMPLAINT not in done.stdout + done.stderr
    assert ending in done.stdout + done.stderr


def test_only_absolute_entries_of_a_path_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ":/opt/mine:.:lib:")
    environment = inherited_environment()
    assert (environment["PYTHONPATH"], environment["PYTHONSAFEPATH"]) == ("/opt/mine", "1")
    assert relative_entries() == ["", ".", "lib", ""]
    monkeypatch.setenv("PYTHONPATH", ":")
    assert "PYTHONPATH" not in inherited_environment()
    monkeypatch.delenv("PYTHONPATH")
    assert "PYTHONPATH" not in inherited_environment()
    assert relative_entries() == []


def test_what_is_not_ours_gets_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "lib")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    given = foreign_environment()
    assert given == dict(os.environ)


def test_each_python_is_started_in_the_one_way() -> None:
    """`python -m` and `-c` look into the working directory unless `-P` or `-I` stands before them."""
    spelled = re.compile(r"sys\.executable,\s*(\"-[^PIm c]\w*\",\s*)*\*?\(?\"-[mc]\"")
    found = {
        str(path.relative_to(PRODUCT))
        for folder in ("mesh", "stages", "speculative")
        for path in (PRODUCT / folder).rglob("*.py")
        if spelled.search(path.read_text(encoding="utf-8"))
    }
    assert found == set()
