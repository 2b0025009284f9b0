"""Small suites of tests, run by pytest in a process of its own as this project's tests are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_pytest(folder: Path, *arguments: str, is_ci: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the tests of a folder with this project's settings and hooks.

    Args:
        folder: Where they are, and what they leave.
        arguments: More of pytest's.
        is_ci: Whether it is told that this is CI.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CI", "PYTEST"))}
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)),
            *("-o", f"cache_dir={folder / 'cache'}", "-o", "testpaths=.", "-p", "tests.conftest"),
            *arguments,
        ],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT), **({"CI": "true"} if is_ci else {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
