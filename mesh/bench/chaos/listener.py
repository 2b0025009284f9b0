"""Which process serves at a port of a lab host."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_LISTENS = "0A"


def listener(pids: Iterable[int], port: int) -> int | None:
    """The one of these processes that listens on that TCP port of its own network; None if none does."""
    for pid in pids:
        with suppress(OSError):
            if _inodes_listening(pid, port) & _sockets(pid):
                return pid
    return None


def _inodes_listening(pid: int, port: int) -> set[str]:
    """Sockets that listen there, in this process's network; see proc(5), /proc/net/tcp."""
    found = set()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            cells = row.split()
            if cells[1].endswith(f":{port:04X}") and cells[3] == _LISTENS:
                found.add(cells[9])
    return found


def _sockets(pid: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:["):
                found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found
