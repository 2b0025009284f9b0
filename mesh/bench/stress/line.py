"""A line of the acceptance table: what was measured, what it should be. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """What was asked for, and what came out.

    Attributes:
        title: What is measured, where.
        measured: The figure, or None if it was not measured.
        wanted: Its floor, or its ceiling.
        is_ceiling: Which of the two.
        note: What the figure is made of.
    """

    title: str
    measured: float | None
    wanted: float
    is_ceiling: bool = False
    note: str = ""

    @property
    def verdict(self) -> str:
        """`met`, `missed` or `not measured`."""
        if self.measured is None:
            return "not measured"
        is_met = self.measured <= self.wanted if self.is_ceiling else self.measured >= self.wanted
        return "met" if is_met else "missed"

    @property
    def bound(self) -> str:
        """Such as `≥ 2.5`."""
        return f"{'≤' if self.is_ceiling else '≥'} {self.wanted:g}"
