"""What was brought to each host since `mesh serve` was started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from stages.weights.assembly import Transfer

if TYPE_CHECKING:
    from stages.layers import LayerRange

log = structlog.get_logger()


class Transfers:
    """Adds up, by host."""

    def __init__(self) -> None:
        self._by_host: dict[str, Transfer] = {}

    def note(self, host: str, layers: LayerRange, transfer: Transfer) -> None:
        """A stage has its weights."""
        self._by_host[host] = self.of(host) + transfer
        log.info(
            "weights_brought",
            host=host,
            layers=str(layers),
            reused_bytes=transfer.reused_bytes,
            head_bytes=transfer.head_bytes,
            hub_bytes=transfer.hub_bytes,
        )

    def of(self, host: str) -> Transfer:
        """All that was brought to a host."""
        return self._by_host.get(host, Transfer())
