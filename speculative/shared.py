"""What the controllers of one coordinator learn together."""

from __future__ import annotations

from dataclasses import dataclass, field

from speculative.timing import Timing


@dataclass(frozen=True)
class SharedMeasures:
    """Made once per coordinator, handed to each session's controller.

    Attributes:
        timing: How long the ring takes.
    """

    timing: Timing = field(default_factory=Timing)
