"""Wire types: formats of hidden states, proposed from measured links.

In a full pipeline a row of hidden states is on the link while the stages compute the next: as long as that
takes no longer than computing a row, the link delays nothing, and exact float32 costs nothing. Batches and
chunks lengthen both alike, so one row decides. The round trip does not matter here: it is the same for every
type.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from mesh.placement.gpu_layers import SLOWEST_GB_PER_S
from stages.transport.hidden_codec import HiddenType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mesh.placement.links import Links
    from mesh.placement.memory_estimate import StageSizes
    from mesh.placement.planner import Plan

# Hidden states travel as float32 unless the operator chooses otherwise.
HIDDEN_VALUE_BYTES: Final = 4


@dataclass(frozen=True)
class WireChoice:
    """Proposed wire type of one link between stages."""

    source: str
    """Host of the stage that sends."""
    target: str
    """Host of the stage that receives."""
    transfer_ms: float
    """Time of a float32 row on the link."""
    compute_ms: float
    """Time of a row at the slowest stage."""
    proposed: HiddenType
    """The most exact type with which the link delays nothing; the smallest if none does."""

    @property
    def is_bottleneck(self) -> bool:
        """Whether float32 makes the link the slowest part of the pipeline."""
        return self.proposed is not HiddenType.F32

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {
            "from": self.source,
            "to": self.target,
            "row_transfer_ms": self.transfer_ms,
            "row_compute_ms": self.compute_ms,
            "proposed": str(self.proposed),
        }


def wire_choices(
    hosts: Sequence[str],
    compute_ms: Sequence[float],
    n_embd: int,
    bytes_per_s: Callable[[str, str], float | None],
) -> tuple[WireChoice | None, ...]:
    """Proposed wire types of the links between stages.

    Args:
        hosts: Hosts of the stages, in pipeline order.
        compute_ms: Time of a row at each stage.
        n_embd: Number of values of a row of hidden states.
        bytes_per_s: Bandwidth from one host to another; None if it is not known.

    Returns:
        One for each stage; None for the tail, between stages of one host, and where the bandwidth is unknown.
    """
    slowest_ms = max(compute_ms)
    choices: list[WireChoice | None] = []
    for source, target in pairwise(hosts):
        rate = None if source == target else bytes_per_s(source, target)
        choices.append(None if not rate else _choice(source, target, slowest_ms, n_embd, rate))
    return (*choices, None)


def transfer_ms(hidden_type: HiddenType, n_embd: int, bytes_per_s: float) -> float:
    """Time of one row on a link, without the delay of the link."""
    return hidden_type.row_bytes(n_embd) / bytes_per_s * 1e3


def _choice(source: str, target: str, compute_ms: float, n_embd: int, rate: float) -> WireChoice:
    fitting = (wire for wire in HiddenType if transfer_ms(wire, n_embd, rate) <= compute_ms)
    return WireChoice(
        source,
        target,
        transfer_ms(HiddenType.F32, n_embd, rate),
        compute_ms,
        next(fitting, min(HiddenType, key=lambda wire: wire.row_bytes(n_embd))),
    )


def planned_wires(
    plan: Plan, sizes: StageSizes, speeds_gb_per_s: Mapping[str, float], links: Links
) -> tuple[WireChoice | None, ...]:
    """Proposed wire types of the links between the stages of a plan.

    A row at a stage counts as long as its host needs to read the stage's weights, which is the time of a
    token alone; in a batch rows take less, so a link that is just fast enough here may still delay a full
    pipeline.

    Args:
        plan: Placement of the stages.
        sizes: Sizes of the plan's model.
        speeds_gb_per_s: Speeds at which hosts read weights.
        links: Links with their bandwidths.

    Returns:
        One for each stage; None for the tail, between stages of one host, and where nothing was measured.
    """
    compute_ms = [
        sizes.read_bytes(stage.layers) / max(speeds_gb_per_s.get(stage.host, 0.0), SLOWEST_GB_PER_S) / 1e6
        for stage in plan.stages
    ]
    rates = {(link.source, link.target): link.bytes_per_s for link in links.links}
    return wire_choices(
        [stage.host for stage in plan.stages],
        compute_ms,
        sizes.model.hidden_width,
        lambda source, target: rates.get((source, target)),
    )
