"""Proposes, ships windows around the ring, commits verdicts. Holds no layers."""

from mesh.coordinator.coordinator import Coordinator
from mesh.coordinator.options import CoordinatorOptions
from mesh.coordinator.ring import StageAddress
from mesh.coordinator.ring_loss import RingLoss

__all__ = ["Coordinator", "CoordinatorOptions", "RingLoss", "StageAddress"]
