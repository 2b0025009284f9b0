"""Features of a coordinator: the one place that names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh.coordinator.disk_plug import DiskPlug
from mesh.coordinator.feature_plug import FeaturePlug

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mesh.coordinator.options import CoordinatorOptions
    from mesh.coordinator.plugs import Plug


def plugs_of(options: CoordinatorOptions, clock_ms: Callable[[], float]) -> Iterator[Plug]:
    """The plugs of a coordinator.

    Args:
        options: What it is asked for.
        clock_ms: Monotonic clock, milliseconds.
    """
    yield DiskPlug(options, clock_ms)
    if options.feature_needs is not None:
        yield FeaturePlug(options.feature_needs)
