"""Cost model of serving: latency and tokens per second of one session, from the times of stages.

A token's round: every stage computes one row, one after the other; between them, and from and to the
coordinator, the row crosses a link; and each of these steps costs some handling by the software of the stage
or the coordinator. A prompt of several chunks fills the pipeline: its first chunk passes all stages, each
further one follows as soon as the slowest stage permits. The last chunk's verdict is the first token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from mesh.placement.gpu_layers import SLOWEST_GB_PER_S
from stages.host.profile_request import StageTiming
from stages.layers import LayerRange

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mesh.placement.host_capacity import HostCapacity
    from mesh.placement.memory_estimate import StageSizes
    from mesh.placement.planner import StagePlacement

# Time of a token beyond the stages' computing and the links, for each stage and once more for the
# coordinator: queues, messages, event loops, the answer's way to the client. An estimate; `python -m
# tests.qualification.forecast_accuracy` measures it.
HANDLING_MS: Final = 0.7
# A lone row reads K and V of f16 at this share of its processor's speed, by whether spanmesh's kernel does;
# smaller types take as long. Rows of a prompt share what is read. Measured with `python -m
# tests.qualification.attention_times` on an AMD EPYC.
_READING_SHARE: Final = {True: 0.45, False: 0.15}
_PROMPT_SHARE: Final = 0.65
_F16_BYTES: Final = 2
# A stage is timed as it is if its weights are no more than some hundreds of MB. Of a larger one a part is
# timed, still larger than any processor's cache, and the rest is added in proportion to the bytes that are
# read for a row. The tail's head is unlike other layers and timed separately.
MOST_BYTES: Final = 512 * 2**20


@dataclass(frozen=True)
class StageForecast:
    """Forecast of one stage."""

    host: str
    """Host of the stage."""
    timing: StageTiming
    """Times of its windows, behind few positions."""
    position_ms: float = 0.0
    """What each position before a row adds to its time; see `position_ms`."""


@dataclass(frozen=True)
class Forecast:
    """Forecast for one session."""

    compute_ms: float
    """Computing time of a token, all stages together."""
    wire_ms: float
    """Time of a token on all links together."""
    handling_ms: float
    """Remaining time of a token."""
    ttft_ms: float
    """Time from the request to the first token."""
    prompt_tokens: int
    """Length of the prompt for `ttft_ms`."""
    position_ms: float
    """What each position before a token adds to its time."""
    most_positions: int
    """Positions of a session."""

    @property
    def token_ms(self) -> float:
        """Time between two tokens, behind few others."""
        return self.compute_ms + self.wire_ms + self.handling_ms

    @property
    def last_token_ms(self) -> float:
        """Time between two tokens at the end of the context."""
        return self.token_ms + self.position_ms * self.most_positions

    @property
    def tokens_per_s(self) -> float:
        """Decode rate."""
        return 1e3 / self.token_ms

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {
            "tokens_per_s": round(self.tokens_per_s, 2),
            "token_ms": round(self.token_ms, 3),
            "compute_ms": round(self.compute_ms, 3),
            "wire_ms": round(self.wire_ms, 3),
            "handling_ms": round(self.handling_ms, 3),
            "ttft_ms": round(self.ttft_ms, 1),
            "prompt_tokens": self.prompt_tokens,
            "position_us": round(1e3 * self.position_ms, 3),
            "last_token_ms": round(self.last_token_ms, 3),
            "most_positions": self.most_positions,
        }


@dataclass(frozen=True)
class ProfiledPart:
    """A blank stage to be timed, and the weight of its time."""

    layers: LayerRange
    """Layers of the blank stage."""
    times: float
    """Factor of its time in the stage's."""


def forecast(
    stages: Sequence[StageForecast],
    head: str,
    hop_ms: Callable[[str, str], float],
    *,
    prompt_tokens: int,
    most_positions: int,
) -> Forecast:
    """Forecast for one session on these stages.

    Args:
        stages: Stages in pipeline order, at least one.
        head: The coordinator's host.
        hop_ms: One-way time from one host to another; 0 from a host to itself.
        prompt_tokens: Length of the prompt, at least one.
        most_positions: Positions of a session.
    """
    way = [head, *(stage.host for stage in stages), head]
    wire_ms = sum(hop_ms(a, b) for a, b in pairwise(way))
    handling_ms = HANDLING_MS * (len(stages) + 1)
    return Forecast(
        compute_ms=sum(stage.timing.row_ms for stage in stages),
        wire_ms=wire_ms,
        handling_ms=handling_ms,
        ttft_ms=_prefill_ms(stages, prompt_tokens) + wire_ms + handling_ms,
        prompt_tokens=prompt_tokens,
        position_ms=sum(stage.position_ms for stage in stages),
        most_positions=most_positions,
    )


def _prefill_ms(stages: Sequence[StageForecast], num_rows: int) -> float:
    """Time until the tail has computed the prompt's last row; chunks are as even as possible."""
    most_rows = min(stage.timing.chunk_rows for stage in stages)
    num_chunks = ceil(num_rows / most_rows)
    mean_positions = (num_rows - 1) / 2
    chunk_ms = [
        rows_ms(stage.timing, num_rows / num_chunks)
        + _PROMPT_SHARE * stage.position_ms * mean_positions * num_rows / num_chunks
        for stage in stages
    ]
    return sum(chunk_ms) + (num_chunks - 1) * max(chunk_ms)


def rows_ms(timing: StageTiming, num_rows: float) -> float:
    """Time of a window, on the line between one row and a full window."""
    if timing.chunk_rows <= 1:
        return timing.row_ms
    per_row_ms = (timing.chunk_ms - timing.row_ms) / (timing.chunk_rows - 1)
    return timing.row_ms + per_row_ms * (min(num_rows, timing.chunk_rows) - 1)


def position_ms(sizes: StageSizes, stage: StagePlacement, host: HostCapacity) -> float:
    """Time that each position before a row adds to it at a stage, an estimate.

    Layers on GPUs are left out, for which there is no measurement, and sliding windows are not regarded.

    Args:
        sizes: Sizes of the plan's model.
        stage: Stage of a plan.
        host: Its host.
    """
    on_gpus = sum(share.num_layers for share in stage.memory.gpus)
    share = 1 - on_gpus / (stage.layers.stop - stage.layers.start)
    speed = host.speed_gb_per_s * _READING_SHARE[host.attention_version > 0]
    return share * sizes.position_values(stage.layers) * _F16_BYTES / max(speed, SLOWEST_GB_PER_S) / 1e6


def parts_to_profile(
    sizes: StageSizes, layers: LayerRange, most_bytes: int = MOST_BYTES
) -> tuple[ProfiledPart, ...]:
    """Blank stages to be timed for a stage of these layers.

    Args:
        sizes: Sizes of the model's stages.
        layers: Layers of the stage.
        most_bytes: Most weights of one blank stage, unless the model cannot be cut so small.
    """
    if sizes.read_bytes(layers) <= most_bytes:
        return (ProfiledPart(layers, 1.0),)
    edges = [edge for edge in sizes.edges if layers.start <= edge <= layers.stop]
    if layers.stop != sizes.whole.stop or len(edges) < 3:
        return (_scaled(sizes, layers, edges, most_bytes),)
    body = LayerRange(layers.start, edges[-2])
    tail = LayerRange(edges[-2], layers.stop)
    return (_scaled(sizes, body, edges[:-1], most_bytes), ProfiledPart(tail, 1.0))


def _scaled(sizes: StageSizes, layers: LayerRange, edges: list[int], most_bytes: int) -> ProfiledPart:
    """As many layers from the first on as the bound permits, standing for all."""
    fitting = [
        LayerRange(layers.start, edge)
        for edge in edges[1:]
        if sizes.read_bytes(LayerRange(layers.start, edge)) <= most_bytes
    ]
    part = fitting[-1] if fitting else LayerRange(layers.start, edges[1])
    return ProfiledPart(part, sizes.read_bytes(layers) / sizes.read_bytes(part))


def stage_timing(parts: tuple[ProfiledPart, ...], timings: Mapping[LayerRange, StageTiming]) -> StageTiming:
    """Times of the stage.

    Args:
        parts: Result of `parts_to_profile`.
        timings: Times of each part.
    """
    return StageTiming(
        row_ms=sum(part.times * timings[part.layers].row_ms for part in parts),
        chunk_ms=sum(part.times * timings[part.layers].chunk_ms for part in parts),
        chunk_rows=min(timings[part.layers].chunk_rows for part in parts),
    )
