"""What the controllers of one coordinator learn together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from speculative.calibration import AcceptanceTable
from speculative.crowd import Crowd
from speculative.plain_time import PlainTime
from speculative.timing import Timing

if TYPE_CHECKING:
    from speculative.account import Standing
    from speculative.moment import Outcome

_ACCEPTANCE_MEMORY: Final = 200.0


@dataclass
class SharedMeasures:
    """Made once per coordinator, handed to each session's controller.

    Attributes:
        timing: How long the ring takes.
        acceptance: What proposers' confidences turned out to be worth.
        crowd: Whether speculating pays while several sessions run.
        plain_time: What a plain window takes a session that runs by itself and does not speculate.
        standings: How speculating came out in the sessions before, by who proposed.
    """

    timing: Timing = field(default_factory=Timing)
    acceptance: AcceptanceTable = field(default_factory=lambda: AcceptanceTable(_ACCEPTANCE_MEMORY))
    crowd: Crowd = field(default_factory=Crowd)
    plain_time: PlainTime = field(default_factory=PlainTime)
    standings: dict[str, Standing] = field(default_factory=dict)

    def forget_ring(self) -> None:
        """Forget all times: the ring was made anew. What proposers are worth does not depend on it."""
        self.timing.forget_ring()
        self.crowd = Crowd()
        self.plain_time = PlainTime()

    def add_plain(self, outcome: Outcome) -> None:
        """Learn from a plain window that had the ring to itself."""
        self.timing.add(outcome, is_alone=True)
        self.add_plain_time(outcome)

    def add_plain_time(self, outcome: Outcome) -> None:
        """Learn from it how long plain windows take, and nothing of the stages."""
        computed_ms = sum(stage.compute_ms for stage in outcome.stages)
        self.plain_time.add(outcome.position, outcome.arrived_ms - outcome.sent_ms, computed_ms)
