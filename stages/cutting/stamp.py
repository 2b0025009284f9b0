"""Recognising a file without reading it: its size and time of change."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from stages.gguf.file_io import write_atomically

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Stamp:
    """A file's content, and what the file looked like when that was found out."""

    sha256: str
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path, sha256: str) -> Stamp:
        """The stamp of a file as it is now."""
        status = path.stat()
        return cls(sha256, status.st_size, status.st_mtime_ns)

    def fits(self, path: Path) -> bool:
        """Whether the file looks as it did; one that is gone does not."""
        try:
            return self == Stamp.of(path, self.sha256)
        except OSError:
            return False

    def save(self, path: Path) -> None:
        """Write the stamp to a small file of its own."""
        write_atomically(path, json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Stamp | None:
        """A saved stamp; None if there is none, or none that can be understood."""
        try:
            saved = json.loads(path.read_text())
            return cls(str(saved["sha256"]), int(saved["size_bytes"]), int(saved["mtime_ns"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
