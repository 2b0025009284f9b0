"""Name of this machine's processor."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Final

_CPUINFO: Final = Path("/proc/cpuinfo")
# The same elsewhere, as on macOS.
_NAME_COMMAND: Final = ("sysctl", "-n", "machdep.cpu.brand_string")


def processor_name() -> str:
    """Name of this machine's processor, or of its architecture."""
    return _listed_name() or _asked_name() or platform.machine()


def _listed_name() -> str:
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _asked_name() -> str:
    with suppress(OSError):
        done = subprocess.run(_NAME_COMMAND, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return ""
