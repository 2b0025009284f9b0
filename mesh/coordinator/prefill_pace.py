"""How large the chunks of a prompt are, and how many of them are under way. Pure.

Alone, a prompt is cut so that every stage has a chunk to compute most of the time: the pipeline fills and
drains once for each prompt, and what that wastes shrinks with the chunks. Among others a chunk is also what
their next tokens wait for, at each stage, so there it lasts no longer than a few of their own windows.
Chunked prefill: Agrawal et al. 2023 (Sarathi).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from speculative.moment import StageMeasure

# Chunks of one prompt for each stage: a stage then idles for at most a fifth of the prefill.
_CHUNKS_PER_STAGE: Final = 4
# From so many rows on llama.cpp's attention on CPUs works in tiles: behind a long text that halves the time.
_FEWEST_ROWS_ALONE: Final = 64
_FEWEST_ROWS_AMONG_OTHERS: Final = 4
_ROWS_UNMEASURED: Final = 16
_FEWEST_ROWS_MEASURED: Final = 8
# How long a chunk may hold a stage while others wait: at least this, or so many of their windows.
_HOLD_MS: Final = 15.0
_HOLD_WINDOWS: Final = 2.0
_MOST_IN_FLIGHT: Final = 16
# Batches of at most so many rows tell what a window without proposals takes.
_PLAIN_ROWS: Final = 2
_WEIGHT: Final = 0.25


class PrefillPace:
    """What the sessions of a coordinator learn together about chunks.

    Args:
        num_stages: Stages of the pipeline.
        max_rows: Most rows of one window.

    Attributes:
        num_sessions: Sessions that run.
    """

    def __init__(self, num_stages: int, max_rows: int) -> None:
        self.num_sessions = 1
        self._num_stages = num_stages
        self._max_rows = max_rows
        self._row_ms: float | None = None
        self._plain_ms = 0.0
        self._network_ms = 0.0

    def rows(self, num_tokens: int) -> int:
        """Rows of the next chunk.

        Args:
            num_tokens: Tokens of the whole prompt that were not cached when it began.
        """
        if self.num_sessions > 1:
            return self._rows_among_others()
        if self._num_stages == 1:
            return self._max_rows
        fine = min(_CHUNKS_PER_STAGE * self._num_stages, num_tokens // _FEWEST_ROWS_ALONE)
        num_chunks = max(1, fine, math.ceil(num_tokens / self._max_rows))
        return math.ceil(num_tokens / num_chunks)

    def num_in_flight(self, rows: int) -> int:
        """How many chunks of so many rows keep every stage busy."""
        fill = self._num_stages + 1
        if self._row_ms:
            fill += math.ceil(self._network_ms / (self._row_ms * rows))
        return min(fill, _MOST_IN_FLIGHT)

    def learn(self, stages: Sequence[StageMeasure], elapsed_ms: float) -> None:
        """Take the times of a window.

        Args:
            stages: What each stage took for it.
            elapsed_ms: From sending it to its verdict.
        """
        if not stages:
            return
        slowest = max(stages, key=lambda stage: stage.compute_ms)
        spent_ms = sum(stage.queue_ms + stage.compute_ms for stage in stages)
        self._network_ms += _WEIGHT * (max(0.0, elapsed_ms - spent_ms) - self._network_ms)
        if slowest.num_rows <= _PLAIN_ROWS:
            self._plain_ms += _WEIGHT * (slowest.compute_ms - self._plain_ms)
        elif slowest.num_rows >= _FEWEST_ROWS_MEASURED:
            row_ms = slowest.compute_ms / slowest.num_rows
            self._row_ms = (
                row_ms if self._row_ms is None else self._row_ms + _WEIGHT * (row_ms - self._row_ms)
            )

    def _rows_among_others(self) -> int:
        if not self._row_ms:
            return min(_ROWS_UNMEASURED, self._max_rows)
        hold_ms = max(_HOLD_MS, _HOLD_WINDOWS * self._plain_ms)
        return max(_FEWEST_ROWS_AMONG_OTHERS, min(self._max_rows, int(hold_ms / self._row_ms)))
