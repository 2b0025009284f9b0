"""Wheels of this checkout in a clean environment: nothing is compiled there, and the demo answers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.cluster,
    pytest.mark.model,
    # llama.cpp is compiled for a dozen processors.
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not (ROOT / ".venv" / ".made").exists(), reason="this environment was not made by make"
    ),
    pytest.mark.skipif(shutil.which("make") is None, reason="make is missing"),
]


@pytest.mark.parametrize("cpu", ["all", "baseline"])
def test_the_demo_answers_where_nothing_can_be_compiled(cpu: str, tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    made = subprocess.run(
        ["make", "wheels", f"WHEELS={folder}", f"CPU={cpu}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        # `make sweep` has started this: its own settings are not for another make.
        env={name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MAKELEVEL"}},
    )
    assert made.returncode == 0, made.stdout + made.stderr
    print((folder / "README.txt").read_text())
    kernels = "libggml-cpu-haswell.so" if cpu == "all" else "libggml-cpu.so"
    (llama,) = folder.glob("llama_cpp_python-*.whl")
    listed = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", llama], capture_output=True, text=True, check=True
    )
    if os.uname().machine == "x86_64":
        assert f"llama_cpp/lib/{kernels}" in listed.stdout
    done = subprocess.run(
        [sys.executable, "-m", "tests.qualification.packages.clean_venv", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "with no index and no compiler" in done.stdout
    assert "fail " not in done.stdout
