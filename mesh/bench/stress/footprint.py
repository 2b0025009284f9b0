"""What a stage takes of its host, beside what it has to. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from stages.layers import LayerRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.lab.memory_watch import MemorySample
    from mesh.placement.stage_sizes import StageSizes

# Of a stage's process, for everything that is neither weights nor KV cache.
ALLOWED_OVERHEAD_BYTES: Final = 300 * 10**6


@dataclass(frozen=True)
class Footprint:
    """One stage.

    Attributes:
        index: Its place in the pipeline.
        host: Its host's name.
        weight_bytes: What it loads.
        cache_bytes: Its KV cache.
        process_bytes: Most that its process took.
        host_bytes: Most that all processes of the mesh on its host took at one look.
    """

    index: int
    host: str
    weight_bytes: int
    cache_bytes: int
    process_bytes: int
    host_bytes: int

    @property
    def overhead_bytes(self) -> int:
        """What its process took beside weights and KV cache."""
        return self.process_bytes - self.weight_bytes - self.cache_bytes

    @property
    def host_overhead_bytes(self) -> int:
        """What its host took for it all, Ray and `mesh join` too, beside weights and KV cache."""
        return self.host_bytes - self.weight_bytes - self.cache_bytes

    @property
    def is_within(self) -> bool:
        """Whether that is no more than is allowed."""
        return self.overhead_bytes <= ALLOWED_OVERHEAD_BYTES


def footprints(
    stages: Sequence[dict[str, Any]], hosts: Sequence[int], sizes: StageSizes, samples: Sequence[MemorySample]
) -> list[Footprint]:
    """Of every stage.

    Args:
        stages: What `/mesh/status` says of them.
        hosts: Numbers of their lab hosts, in the same order; each holds one stage.
        sizes: Of any layers.
        samples: Of the whole run.
    """
    found = []
    for stage, host in zip(stages, hosts, strict=True):
        layers = LayerRange(*stage["layers"])
        own = [sample for sample in samples if sample.host == host and sample.role != "other"]
        looks: dict[int, int] = defaultdict(int)
        for sample in own:
            looks[sample.look] += sample.own_bytes
        found.append(
            Footprint(
                index=stage["index"],
                host=stage["host"],
                weight_bytes=sizes.weight_bytes(layers),
                cache_bytes=sizes.cache_bytes(layers),
                process_bytes=max((s.own_bytes for s in own if s.role == "stage"), default=0),
                host_bytes=max(looks.values(), default=0),
            )
        )
    return found
