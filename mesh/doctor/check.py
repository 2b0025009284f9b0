"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


class Outcome(StrEnum):
    """What came of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """What was found, and what helps.

    Attributes:
        where: The host, or both ends of a link.
        what: In a word or two.
        outcome: A warning costs speed or will cost something later; a failure keeps a mesh from working.
        detail: What was found.
        fix: What to do; empty if all is well.
    """

    where: str
    what: str
    outcome: Outcome
    detail: str
    fix: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "where": self.where,
            "what": self.what,
            "outcome": str(self.outcome),
            "detail": self.detail,
            "fix": self.fix or None,
        }


def ok(where: str, what: str, detail: str) -> Check:
    """All is well."""
    return Check(where, what, Outcome.OK, detail)


def warn(where: str, what: str, detail: str, fix: str) -> Check:
    """It works, but."""
    return Check(where, what, Outcome.WARN, detail, fix)


def fail(where: str, what: str, detail: str, fix: str) -> Check:
    """It does not work."""
    return Check(where, what, Outcome.FAIL, detail, fix)


def exit_code(checks: Iterable[Check]) -> int:
    """1 if anything failed."""
    return int(any(check.outcome is Outcome.FAIL for check in checks))
