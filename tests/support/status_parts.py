"""Parts of the status that a coordinator has from its first ring on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh.coordinator.coordinator import Coordinator
    from mesh.status import KvDiskStatus, SessionsStatus, SpeculationStatus


def sessions_of(coordinator: Coordinator) -> SessionsStatus:
    found = coordinator.status().sessions
    assert found is not None
    return found


def speculation_of(coordinator: Coordinator) -> SpeculationStatus:
    found = coordinator.status().speculation
    assert found is not None
    return found


def kv_disk_of(coordinator: Coordinator) -> KvDiskStatus:
    """Of a coordinator whose stages keep rows on disk."""
    found = coordinator.status().kv_disk
    assert found is not None
    return found
