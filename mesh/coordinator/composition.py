"""Features of a coordinator: the one place that names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh.coordinator.checkpoint_plan import CheckpointPlan
from mesh.coordinator.disk_plug import DiskPlug
from mesh.coordinator.feature_plug import FeaturePlug
from mesh.coordinator.generation import Rollback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mesh.coordinator.options import CoordinatorOptions
    from mesh.coordinator.plugs import Plug
    from mesh.coordinator.prefix_cache import PrefixMatch


def rollback_of(options: CoordinatorOptions, prefix_match: PrefixMatch) -> Rollback:
    """How the stages of a new session go back."""
    if options.num_checkpoints:
        return CheckpointPlan(options.num_checkpoints, prefix_match.checkpoints)
    return Rollback()


def plugs_of(options: CoordinatorOptions, clock_ms: Callable[[], float]) -> Iterator[Plug]:
    """The plugs of a coordinator.

    Args:
        options: What it is asked for.
        clock_ms: Monotonic clock, milliseconds.
    """
    yield DiskPlug(options, clock_ms)
    if options.feature_needs is not None:
        yield FeaturePlug(options.feature_needs)
