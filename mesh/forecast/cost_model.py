"""Cost model of serving: times of stages to latency and tokens per second of one session.

A token's round: every stage computes one row, one after the other; between them, and from and to the
coordinator, the row crosses a link; and each of these visits costs some handling, by the stage's and the
coordinator's own software. A prompt of several chunks fills the pipeline: its first chunk goes all the way,
each further one follows as soon as the slowest stage lets it. The last chunk's verdict is the first token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from stages.host.profile_request import StageTiming
from stages.layers import LayerRange

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mesh.placement.stage_sizes import StageSizes


# What a token takes beyond what stages report as computing and links were measured to take, for each stage
# and once more for the coordinator: queues, messages, event loops, the answer's way to the client. An
# estimate; `python -m mesh.qualification.forecast_accuracy` measures it.
HANDLING_MS: Final = 0.7


@dataclass(frozen=True)
class StageForecast:
    """One stage.

    Attributes:
        host: Its host.
        timing: How long its windows take.
    """

    host: str
    timing: StageTiming


@dataclass(frozen=True)
class Forecast:
    """What one session may expect.

    Attributes:
        compute_ms: Of a token, all stages together.
        wire_ms: Of a token, all links together.
        handling_ms: Of a token, all the rest.
        ttft_ms: From the request to the first token.
        prompt_tokens: Of the prompt that `ttft_ms` is for.
    """

    compute_ms: float
    wire_ms: float
    handling_ms: float
    ttft_ms: float
    prompt_tokens: int

    @property
    def token_ms(self) -> float:
        """From one token to the next."""
        return self.compute_ms + self.wire_ms + self.handling_ms

    @property
    def tokens_per_s(self) -> float:
        """Decode rate."""
        return 1e3 / self.token_ms

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "tokens_per_s": round(self.tokens_per_s, 2),
            "token_ms": round(self.token_ms, 3),
            "compute_ms": round(self.compute_ms, 3),
            "wire_ms": round(self.wire_ms, 3),
            "handling_ms": round(self.handling_ms, 3),
            "ttft_ms": round(self.ttft_ms, 1),
            "prompt_tokens": self.prompt_tokens,
        }


def forecast(
    stages: Sequence[StageForecast],
    head: str,
    hop_ms: Callable[[str, str], float],
    *,
    prompt_tokens: int,
) -> Forecast:
    """What one session may expect of these stages.

    Args:
        stages: In pipeline order, at least one.
        head: The coordinator's host.
        hop_ms: One way from one host to another; 0 from a host to itself.
        prompt_tokens: Of the prompt, at least one.
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
    )


def _prefill_ms(stages: Sequence[StageForecast], num_rows: int) -> float:
    """Until the tail has computed the prompt's last row; chunks are as even as can be."""
    most_rows = min(stage.timing.chunk_rows for stage in stages)
    num_chunks = ceil(num_rows / most_rows)
    chunk_ms = [rows_ms(stage.timing, num_rows / num_chunks) for stage in stages]
    return sum(chunk_ms) + (num_chunks - 1) * max(chunk_ms)


def rows_ms(timing: StageTiming, num_rows: float) -> float:
    """A window of some rows, on the line between one row and a full window."""
    if timing.chunk_rows <= 1:
        return timing.row_ms
    per_row_ms = (timing.chunk_ms - timing.row_ms) / (timing.chunk_rows - 1)
    return timing.row_ms + per_row_ms * (min(num_rows, timing.chunk_rows) - 1)


# A stage is timed as it is where its weights are no more than some hundreds of MB. Of a larger one a part is
# timed, which is still larger than any processor's cache, and what is missing is added in proportion to the
# bytes that are read for a row. The tail's head is a layer like no other, so that it is timed apart.
MOST_BYTES: Final = 512 * 2**20


@dataclass(frozen=True)
class ProfiledPart:
    """A blank stage that is timed, and what its time is worth.

    Attributes:
        layers: Of the blank stage.
        times: How often its time goes into the stage's.
    """

    layers: LayerRange
    times: float


def parts_to_profile(
    sizes: StageSizes, layers: LayerRange, most_bytes: int = MOST_BYTES
) -> tuple[ProfiledPart, ...]:
    """What to time for a stage of these layers.

    Args:
        sizes: Of the model's stages.
        layers: Of the stage.
        most_bytes: Weights of one blank stage, unless the model cannot be cut so small.
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
    """As many layers from the first on as are allowed, standing for all."""
    fitting = [
        LayerRange(layers.start, edge)
        for edge in edges[1:]
        if sizes.read_bytes(LayerRange(layers.start, edge)) <= most_bytes
    ]
    part = fitting[-1] if fitting else LayerRange(layers.start, edges[1])
    return ProfiledPart(part, sizes.read_bytes(layers) / sizes.read_bytes(part))


def stage_timing(parts: tuple[ProfiledPart, ...], timings: Mapping[LayerRange, StageTiming]) -> StageTiming:
    """How long the stage takes.

    Args:
        parts: What `parts_to_profile` named.
        timings: Of each of them.
    """
    return StageTiming(
        row_ms=sum(part.times * timings[part.layers].row_ms for part in parts),
        chunk_ms=sum(part.times * timings[part.layers].chunk_ms for part in parts),
        chunk_rows=min(timings[part.layers].chunk_rows for part in parts),
    )
