"""What Ray says of an actor that is gone, in one line for a person."""

from __future__ import annotations

import re
from typing import Final

_PID: Final = re.compile(r"^\s*pid: (\d+)", re.MULTILINE)
_DETAIL: Final = re.compile(r"exit detail: (.+?)(?= Some common causes| \(1\)|\n|$)", re.DOTALL)
_CONNECTION_LOST: Final = "connection error code 2"


def exit_detail(text: str) -> str:
    """Why an actor's process is gone.

    Args:
        text: Of Ray's `RayActorError`, several lines with advice.

    Returns:
        One line. Where Ray has only seen the process's socket close, it says what that can mean.
    """
    if "node has died" in text or "node was terminated" in text:
        return "its host's Ray node ended"
    found = _DETAIL.search(text)
    if found is None:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[0] if lines else "no reason is known"
    if _CONNECTION_LOST in found[1]:
        return "its process ended without a word: it was killed, ran out of memory, or crashed"
    return " ".join(found[1].split()).rstrip(".")


def exited_pid(text: str) -> int | None:
    """The process that a `RayActorError` names."""
    found = _PID.search(text)
    return int(found[1]) if found else None
