"""Statistics in Prometheus' format, under the names that vLLM's users know with `mesh_` in front."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from mesh.metrics.mesh_samples import add_mesh
from mesh.metrics.request_samples import add_requests
from mesh.metrics.ring_samples import add_ring
from mesh.metrics.sheet import Sheet
from mesh.metrics.speculation_samples import add_speculation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.metrics.request_statistics import RequestStatistics

PREFIX: Final = "mesh_"


def exposition(
    model: str, statistics: RequestStatistics, status: Mapping[str, Any], accept: str = ""
) -> tuple[bytes, str]:
    """One scrape.

    Args:
        model: The id that clients see.
        statistics: Of requests.
        status: What `/mesh/status` answers, what the stages count included. Parts of it that are not there
            yet are left out.
        accept: The request's header; OpenMetrics is spoken to those who ask for it.

    Returns:
        Body and content type.
    """
    sheet = Sheet(model)
    add_requests(sheet, statistics, status.get("sessions"))
    add_speculation(sheet, status.get("speculation"))
    add_ring(sheet, status.get("stages", ()), status.get("round_trips"))
    add_mesh(sheet, status)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(sheet)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
