"""Proposes, ships windows around the ring, commits verdicts. Holds no layers."""

from mesh.coordinator.coordinator import Coordinator, CoordinatorOptions
from mesh.coordinator.ring import StageAddress

__all__ = ["Coordinator", "CoordinatorOptions", "StageAddress"]
