"""Which blank stages tell how long a stage takes, and what they tell. Pure.

A stage is timed as it is where its weights are no more than some hundreds of MB. Of a larger one a part is
timed, which is still larger than any processor's cache, and what is missing is added in proportion to the
bytes that are read for a row. The tail's head is a layer like no other, so that it is timed apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stages.host.profile_request import StageTiming
from stages.layers import LayerRange

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.placement.stage_sizes import StageSizes

MOST_BYTES: Final = 512 * 2**20


@dataclass(frozen=True)
class RehearsedPart:
    """A blank stage that is timed, and what its time is worth.

    Attributes:
        layers: Of the blank stage.
        times: How often its time goes into the stage's.
    """

    layers: LayerRange
    times: float


def parts_to_rehearse(
    sizes: StageSizes, layers: LayerRange, most_bytes: int = MOST_BYTES
) -> tuple[RehearsedPart, ...]:
    """What to time for a stage of these layers.

    Args:
        sizes: Of the model's stages.
        layers: Of the stage.
        most_bytes: Weights of one blank stage, unless the model cannot be cut so small.
    """
    if sizes.read_bytes(layers) <= most_bytes:
        return (RehearsedPart(layers, 1.0),)
    edges = [edge for edge in sizes.edges if layers.start <= edge <= layers.stop]
    if layers.stop != sizes.whole.stop or len(edges) < 3:
        return (_scaled(sizes, layers, edges, most_bytes),)
    body = LayerRange(layers.start, edges[-2])
    tail = LayerRange(edges[-2], layers.stop)
    return (_scaled(sizes, body, edges[:-1], most_bytes), RehearsedPart(tail, 1.0))


def _scaled(sizes: StageSizes, layers: LayerRange, edges: list[int], most_bytes: int) -> RehearsedPart:
    """As many layers from the first on as are allowed, standing for all."""
    fitting = [
        LayerRange(layers.start, edge)
        for edge in edges[1:]
        if sizes.read_bytes(LayerRange(layers.start, edge)) <= most_bytes
    ]
    part = fitting[-1] if fitting else LayerRange(layers.start, edges[1])
    return RehearsedPart(part, sizes.read_bytes(layers) / sizes.read_bytes(part))


def stage_timing(parts: tuple[RehearsedPart, ...], timings: Mapping[LayerRange, StageTiming]) -> StageTiming:
    """How long the stage takes.

    Args:
        parts: What `parts_to_rehearse` named.
        timings: Of each of them.
    """
    return StageTiming(
        row_ms=sum(part.times * timings[part.layers].row_ms for part in parts),
        chunk_ms=sum(part.times * timings[part.layers].chunk_ms for part in parts),
        chunk_rows=min(timings[part.layers].chunk_rows for part in parts),
    )
