"""What the controllers of one coordinator learn together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from speculative.calibration import AcceptanceTable
from speculative.crowd import Crowd
from speculative.timing import Timing

_ACCEPTANCE_MEMORY: Final = 200.0


@dataclass
class SharedMeasures:
    """Made once per coordinator, handed to each session's controller.

    Attributes:
        timing: How long the ring takes.
        acceptance: What proposers' confidences turned out to be worth.
        crowd: Whether speculating pays while several sessions run.
        plain_ms: What a plain window takes a session that runs by itself and does not speculate; None before
            the first.
        num_plain: Windows that this was measured on.
        is_in_doubt: Whether speculating lost time in the session that ended last.
    """

    timing: Timing = field(default_factory=Timing)
    acceptance: AcceptanceTable = field(default_factory=lambda: AcceptanceTable(_ACCEPTANCE_MEMORY))
    crowd: Crowd = field(default_factory=Crowd)
    plain_ms: float | None = None
    num_plain: int = 0
    is_in_doubt: bool = False
