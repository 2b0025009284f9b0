"""Scenarios, and kinds of faults: their names, what each does, and which of them last."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import Self

SCENARIOS: Final = ("faults", "leave", "head", "no-room")


class FaultKind(StrEnum):
    """Kind of a fault, named as in `--kinds`; a run draws each as often as the others."""

    meaning: str
    """In words, for reports."""
    is_held: bool
    """Whether it lasts for some seconds, after which it is taken back."""

    FIRST = "first", "kill -9 of the first stage's process"
    MIDDLE = "middle", "kill -9 of a middle stage's process"
    TAIL = "tail", "kill -9 of the tail's process"
    RAYLET = "raylet", "kill -9 of a stage host's raylet"
    CUT_OFF = "cut-off", "every packet of a stage's host lost for some seconds", True
    STOP = "stop", "SIGSTOP of a stage's process for some seconds", True
    LEAVE = "leave", "SIGTERM to `mesh join` of a stage's host, which is started again"

    def __new__(cls, name: str, meaning: str, is_held: bool = False) -> Self:  # noqa: FBT001, FBT002 - a table
        """A kind by its row."""
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.meaning = meaning
        kind.is_held = is_held
        return kind


ALL_KINDS: Final = tuple(FaultKind)
# The acceptance table has a separate line for hosts that leave.
LOSSES: Final = tuple(kind for kind in FaultKind if kind is not FaultKind.LEAVE)
# For --help.
LISTED: Final = ", ".join(
    f"{kind} (kill -9 of that stage)" if kind is FaultKind.TAIL else kind for kind in FaultKind
)
