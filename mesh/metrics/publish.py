"""Statistics in Prometheus' format, under the names that vLLM's users know with `mesh_` in front."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from mesh.metrics.mesh_samples import add_mesh, add_model
from mesh.metrics.request_samples import add_requests
from mesh.metrics.ring_samples import add_ring
from mesh.metrics.sheet import Sheet
from mesh.metrics.speculation_samples import add_speculation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh.metrics.request_statistics import RequestStatistics

PREFIX: Final = "mesh_"


@dataclass(frozen=True)
class ModelFigures:
    """What is known of one model.

    Attributes:
        name: The id that clients see.
        statistics: Of requests.
        status: What `/mesh/status` would answer if it were the first, what the stages count included. Parts
            of it that are not there yet are left out.
    """

    name: str
    statistics: RequestStatistics
    status: Mapping[str, Any]


def exposition(models: Sequence[ModelFigures], accept: str = "") -> tuple[bytes, str]:
    """One scrape.

    Args:
        models: At least one. What is of the mesh as a whole comes with the first one's name.
        accept: The request's header; OpenMetrics is spoken to those who ask for it.

    Returns:
        Body and content type.
    """
    sheet = Sheet(models[0].name)
    for model in models:
        status = model.status
        sheet.of(model.name)
        add_requests(sheet, model.statistics, status.get("sessions"))
        add_speculation(sheet, status.get("speculation"))
        add_ring(sheet, status.get("stages", ()), status.get("round_trips"))
        add_model(sheet, status)
    sheet.of(models[0].name)
    add_mesh(sheet, models[0].status)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(sheet)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
