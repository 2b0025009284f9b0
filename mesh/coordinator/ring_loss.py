"""What is known of a ring that broke."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RingLoss:
    """Why a ring is broken, and where to look first.

    Attributes:
        reason: One line for a person.
        suspects: Indices of stages that may be gone, in order: those whose streams ended, those that did not
            answer, and those to which the stage before them lost its link. One of them may live and be
            unreachable from there only; a stage that is not among them answered a moment ago.
        is_crash: Whether a stage's own streams ended, as they do when its process dies. A stage that merely
            fell silent is frozen or cut off.
        silent: Those of the suspects that have left every question unanswered until the time-out.
    """

    reason: str
    suspects: tuple[int, ...]
    is_crash: bool = False
    silent: tuple[int, ...] = ()
