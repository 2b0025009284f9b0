"""Limits of speculation, and switches that take a mechanism away to find a fault."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ControllerOptions:
    """What a controller may do.

    Attributes:
        max_width: Most proposed tokens in one window.
        max_depth: Most windows of a session under way; 1 keeps them in step.
        fixed_width: Always this many proposed tokens, or as many as there are; 0 speculates never.
        fixed_depth: Always this many windows under way, as far as there are proposals.
        p_min: Tokens that are likely to be reached with less than this are not sent; None leaves it to the
            controller.

    Raises:
        ValueError: If a value is out of range.
    """

    max_width: int = 16
    max_depth: int = 24
    fixed_width: int | None = None
    fixed_depth: int | None = None
    p_min: float | None = None

    def __post_init__(self) -> None:
        if self.max_width < 1 or self.max_depth < 1:
            raise ValueError(f"{self}: max_width and max_depth must be 1 or more")
        if (self.fixed_width or 0) < 0 or (self.fixed_depth is not None and self.fixed_depth < 1):
            raise ValueError(f"{self}: fixed_width must not be negative, fixed_depth 1 or more")
        if self.p_min is not None and not 0.0 <= self.p_min <= 1.0:
            raise ValueError(f"{self}: p_min must lie in [0, 1]")
