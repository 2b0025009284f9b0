"""What the user of `mesh serve` says about how weights travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from stages.weights.sources import HubFile


@dataclass(frozen=True)
class WeightsOptions:
    """All of it.

    Attributes:
        transfer_bytes_per_s: What hosts are sent, together; None: as much as they take.
        hub: The model's files at the hub that it came from.
        is_hub_first: Whether hosts are to ask the hub before this host.
    """

    transfer_bytes_per_s: float | None = None
    hub: tuple[HubFile, ...] = ()
    is_hub_first: bool = False


PLAIN_WEIGHTS: Final = WeightsOptions()
