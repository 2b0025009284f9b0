"""Memory of a mesh at rest, and its growth under load."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from stages.layers import LayerRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.placement.memory_estimate import StageSizes
    from mesh.status import StageStatus
    from meshbench.lab.memory_watch import MemorySample

# Of a stage's process, for everything that is neither weights nor KV cache.
ALLOWED_OVERHEAD_BYTES: Final = 300 * 10**6
_MIB: Final = 2**20
# The first part of a run fills pools, caches and free lists, which remain filled.
WARM_UP_SHARE: Final = 0.25
# What an allocator keeps or gives back from one minute to the next without any leak.
_ALLOWED_BYTES: Final = 8 * _MIB
_ALLOWED_SHARE: Final = 0.02


@dataclass(frozen=True)
class Footprint:
    """One stage."""

    index: int
    """Its place in the pipeline."""
    host: str
    """Its host's name."""
    weight_bytes: int
    """Size of its weights."""
    cache_bytes: int
    """Its KV cache."""
    process_bytes: int
    """Most that its process took."""
    host_bytes: int
    """Most that all processes of the mesh on its host took at one look."""

    @property
    def overhead_bytes(self) -> int:
        """Memory of its process besides weights and KV cache."""
        return self.process_bytes - self.weight_bytes - self.cache_bytes

    @property
    def host_overhead_bytes(self) -> int:
        """Memory of its host, Ray and `mesh join` included, besides weights and KV cache."""
        return self.host_bytes - self.weight_bytes - self.cache_bytes

    @property
    def is_within(self) -> bool:
        """Whether that is within the bound."""
        return self.overhead_bytes <= ALLOWED_OVERHEAD_BYTES


@dataclass(frozen=True)
class Growth:
    """Memory of one process, or a group of them, after the warm-up."""

    num_samples: int
    """After the warm-up."""
    first_bytes: float
    """Median of the first half of the samples after the warm-up."""
    last_bytes: float
    """Median of the second half."""
    max_bytes: float
    """Most of all samples, those of the warm-up too."""
    slope_bytes_per_hour: float
    """Of the straight line of least squares through the samples after the warm-up."""

    @property
    def growth_bytes(self) -> float:
        """From the first half to the second."""
        return self.last_bytes - self.first_bytes

    @property
    def allowed_bytes(self) -> float:
        """The growth that still counts as none: 8 MiB, or 2 % where that is more."""
        return max(_ALLOWED_BYTES, _ALLOWED_SHARE * self.first_bytes)

    @property
    def is_flat(self) -> bool:
        """Whether the second half's median is above the first half's by no more than is allowed.

        A leak of any constant rate fails this rule once the run is long enough; a level that was reached late
        in the warm-up does not, nor does a single high sample.
        """
        return self.growth_bytes <= self.allowed_bytes


def footprints(
    stages: Sequence[StageStatus], hosts: Sequence[int], sizes: StageSizes, samples: Sequence[MemorySample]
) -> list[Footprint]:
    """Memory of every stage.

    Args:
        stages: Stages of the ring.
        hosts: Numbers of their lab hosts, in the same order; each holds one stage.
        sizes: Of any layers.
        samples: Of the whole run.
    """
    found = []
    for stage, host in zip(stages, hosts, strict=True):
        layers = LayerRange(*stage.layers)
        own = [sample for sample in samples if sample.host == host and sample.role != "other"]
        looks: dict[int, int] = defaultdict(int)
        for sample in own:
            looks[sample.look] += sample.own_bytes
        found.append(
            Footprint(
                index=stage.index,
                host=stage.host,
                weight_bytes=sizes.weight_bytes(layers),
                cache_bytes=sizes.cache_bytes(layers),
                process_bytes=max((s.own_bytes for s in own if s.role == "stage"), default=0),
                host_bytes=max(looks.values(), default=0),
            )
        )
    return found


def growth_of(times_s: Sequence[float], sizes_bytes: Sequence[float]) -> Growth | None:
    """From samples of one thing; None if fewer than four are left after the warm-up.

    Args:
        times_s: Ascending.
        sizes_bytes: Of the same length.
    """
    if not times_s:
        return None
    begin_s = times_s[0] + WARM_UP_SHARE * (times_s[-1] - times_s[0])
    warm = [(at_s, size) for at_s, size in zip(times_s, sizes_bytes, strict=True) if at_s >= begin_s]
    if len(warm) < 4:
        return None
    times, sizes = np.array(warm).T
    half = len(warm) // 2
    slope_per_s = float(np.polyfit(times - times[0], sizes, 1)[0]) if times[-1] > times[0] else 0.0
    return Growth(
        num_samples=len(warm),
        first_bytes=float(np.median(sizes[:half])),
        last_bytes=float(np.median(sizes[half:])),
        max_bytes=float(max(sizes_bytes)),
        slope_bytes_per_hour=slope_per_s * 3600,
    )
