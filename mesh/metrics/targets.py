"""What Prometheus' HTTP service discovery is told. Pure."""

from __future__ import annotations

from typing import Any


def targets(host: str, scheme: str, model: str) -> list[dict[str, Any]]:
    """One target: the coordinator, which tells of every host of its mesh.

    Args:
        host: Name and port by which it was asked, so that whoever asked reaches it; none if it did not say.
        scheme: `http` or `https`.
        model: The id that clients see.
    """
    if not host:
        return []
    labels = {"__metrics_path__": "/metrics", "__scheme__": scheme, "job": "spanmesh", "mesh_model": model}
    return [{"targets": [host], "labels": labels}]
