"""Sizes of prefill chunks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from speculative.outcome import StageMeasure


# Alone, a prompt is cut so that every stage has a chunk to compute most of the time: the pipeline fills and
# drains once for each prompt, and that loss shrinks with the chunks. Among other sessions their next tokens
# wait for a chunk at each stage, so chunks are as long as the bound on that delay allows. Chunked prefill:
# Agrawal et al. 2023 (Sarathi). Chunks of one prompt for each stage: a stage then idles for at most a fifth
# of the prefill.
_CHUNKS_PER_STAGE: Final = 4
# From this many rows llama.cpp's attention on CPUs computes in tiles: half the time behind a long text.
_FEWEST_ROWS_ALONE: Final = 64
_ROWS_UNMEASURED: Final = 16
# While others decode, chunks may multiply the time of their tokens by this, compared with no prefill.
_MOST_DELAY: Final = 1.5
_MOST_IN_FLIGHT: Final = 16
_WEIGHT: Final = 0.25


class PrefillPace:
    """Prefill chunk size: shared estimate of the times of all sessions of a coordinator.

    Args:
        num_stages: Stages of the pipeline.
        max_rows: Most rows of one window.

    Attributes:
        num_decoding: Sessions past their prompt.
    """

    def __init__(self, num_stages: int, max_rows: int) -> None:
        self.num_decoding = 0
        self._num_stages = num_stages
        self._max_rows = max_rows
        self._row_ms: float | None = None
        self._window_ms: float | None = None
        self._network_ms: float | None = None

    def rows(self, num_tokens: int, *, is_replay: bool = False) -> int:
        """Rows of the next chunk.

        Args:
            num_tokens: Tokens of the whole prompt that were not cached when it began.
            is_replay: Whether an answer stands still until the replay ends. Sessions that already continue
                can wait longer than for each other's prompts: total waiting is least if all is computed soon.
        """
        if self.num_decoding and not is_replay:
            return self._rows_among_others()
        if self._num_stages == 1:
            return self._max_rows
        fine = min(_CHUNKS_PER_STAGE * self._num_stages, num_tokens // _FEWEST_ROWS_ALONE)
        num_chunks = max(1, fine, math.ceil(num_tokens / self._max_rows))
        return math.ceil(num_tokens / num_chunks)

    def num_in_flight(self, rows: int) -> int:
        """Number of chunks of this size that keep every stage busy."""
        fill = self._num_stages + 1
        if self._row_ms and self._network_ms:
            fill += math.ceil(self._network_ms / (self._row_ms * rows))
        return min(fill, _MOST_IN_FLIGHT)

    def learn_chunk(self, stages: Sequence[StageMeasure], elapsed_ms: float) -> None:
        """Record the times of a chunk.

        Args:
            stages: Time of each stage for it.
            elapsed_ms: Time from sending it to its verdict.
        """
        if stages:
            self._learn_network(stages, elapsed_ms)
            self._row_ms = _mean(self._row_ms, max(stage.compute_ms / stage.num_rows for stage in stages))

    def learn_window(self, stages: Sequence[StageMeasure], elapsed_ms: float) -> None:
        """Record the times of a decoding window; arguments as for `learn_chunk`."""
        if stages:
            network_ms = self._learn_network(stages, elapsed_ms)
            undisturbed_ms = network_ms + sum(stage.compute_ms for stage in stages)
            self._window_ms = _mean(self._window_ms, undisturbed_ms)

    def _learn_network(self, stages: Sequence[StageMeasure], elapsed_ms: float) -> float:
        network_ms = max(0.0, elapsed_ms - sum(stage.queue_ms + stage.compute_ms for stage in stages))
        self._network_ms = _mean(self._network_ms, network_ms)
        return self._network_ms

    def _rows_among_others(self) -> int:
        if not self._row_ms or not self._window_ms:
            return min(_ROWS_UNMEASURED, self._max_rows)
        hold_ms = _MOST_DELAY * self._window_ms / self._num_stages
        return max(1, min(self._max_rows, int(hold_ms / self._row_ms)))


def _mean(known: float | None, newest: float) -> float:
    return newest if known is None else known + _WEIGHT * (newest - known)
