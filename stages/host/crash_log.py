"""Crash log: the end of the stderr of a crashed stage process, read on its host."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import Final

# What a crash leaves behind: llama.cpp's own words say most, then those about the signal.
_TELLING: Final = (
    re.compile(r"GGML_ASSERT|GGML_ABORT|ggml_abort|CUDA error|out of memory|bad_alloc|terminate called"),
    re.compile(r"Fatal Python error: .+"),
    re.compile(r"\*\*\* SIG\w+ received"),
)
_TAIL_BYTES: Final = 64 * 1024
_MOST_CHARS: Final = 200
_STDERR: Final = 2
_LINK: Final = Path(f"/proc/self/fd/{_STDERR}")
# macOS: fcntl(2) fills a buffer of this size with the path of an open file.
_MAX_PATH_BYTES: Final = 1024


class CrashLogReader:
    """A Ray actor that reads them, on the host where they are."""

    def crash_message(self, pid: int) -> str | None:
        """Reason why the process with this id crashed, by its own words; None if it left none."""
        # This process's own standard error lies beside the other's.
        folder = _stderr_folder()
        if folder is None:
            return None
        for path in folder.glob(f"worker-*-{pid}.err"):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                return crash_line(file.read().decode(errors="replace"))
        return None


def crash_line(text: str) -> str | None:
    """The line of a crashed process's standard error that says why; None if none does."""
    lines = [line.strip() for line in text.splitlines()]
    for pattern in _TELLING:
        for line in reversed(lines):
            if pattern.search(line):
                return line[:_MOST_CHARS]
    return None


def _stderr_folder() -> Path | None:
    """Folder of the file that is this process's standard error; None where the system does not tell."""
    try:
        return _LINK.readlink().parent
    except OSError:
        get_path = getattr(fcntl, "F_GETPATH", None)
    if get_path is None:
        return None
    try:
        name = fcntl.fcntl(_STDERR, get_path, bytes(_MAX_PATH_BYTES))
    except OSError:
        return None
    return Path(os.fsdecode(name.rstrip(b"\0"))).parent
