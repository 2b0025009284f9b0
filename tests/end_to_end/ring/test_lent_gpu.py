"""Layers really go to another device, also where there is no GPU: llama.cpp lends the processor as one."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshbench.lab.llama_cpp_build import unpacked_source
from stages.runtime.devices import layer_devices
from tests.support.lent_gpu import SOURCE


@pytest.mark.model
@pytest.mark.sweep
@pytest.mark.skipif(
    bool(layer_devices()),
    reason="this machine has a GPU: tests/gpu/test_gpu_parity.py runs there",
)
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_all_that_needs_a_gpu_works_with_a_lent_one() -> None:
    source = os.environ.get(SOURCE) or unpacked_source()
    if source is None:
        pytest.skip(
            f"llama.cpp's source is not here: set {SOURCE}, or run python -m meshbench.lab.llama_cpp_build"
        )
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.lent_gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*argv, "-m", "gpu", "tests/gpu/test_gpu_parity.py"],
        env={**os.environ, SOURCE: str(source)},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert re.search(r"^\d+ passed", done.stdout.splitlines()[-1])
