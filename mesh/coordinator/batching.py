"""Sizes of prefill chunks and of groups of sessions.

If every session that waits at a stage joins its batch, all sessions end up in one batch that walks from stage
to stage, while the other stages are idle. In groups the sessions follow one another through the pipeline,
like the micro-batches of GPipe (Huang et al. 2019). Larger groups make better batches, where a stage computes
several rows in the time of one; more groups keep more stages, and the wires between them, busy. Measured
times decide.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from speculative.cost_model import BatchTimeModel, smoothed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from speculative.outcome import StageMeasure


# A batch costs messages and wake-ups that no stage's clock sees: of nearly equal groups the larger wins.
_NEARLY: Final = 0.95
# Windows between two decisions.
_LOOK_EVERY: Final = 32


class Grouping:
    """Group size: shared estimate of the batch and network times of all sessions of a coordinator.

    Args:
        num_stages: Stages of the pipeline.
    """

    def __init__(self, num_stages: int) -> None:
        self._tables = [BatchTimeModel() for _ in range(num_stages)]
        self._network_ms = 0.0
        self._rows_per_window = 1.0
        self._num_learned = 0
        self._num_sessions = 1
        self._most_together = 1

    @property
    def most_together(self) -> int:
        """Windows that may share a batch."""
        return self._most_together

    def set_num_sessions(self, num_sessions: int) -> None:
        """Set the number of running sessions."""
        self._num_sessions = max(1, num_sessions)
        self._look()

    def learn(self, num_rows: int, stages: Sequence[StageMeasure], elapsed_ms: float) -> None:
        """Record the times of a decoding window.

        Args:
            num_rows: Rows of the window.
            stages: Time of each stage for the batch that the window was in.
            elapsed_ms: Time from sending the window to its verdict.
        """
        spent_ms = 0.0
        for table, stage in zip(self._tables, stages, strict=False):
            table.add(stage.num_rows, stage.compute_ms)
            spent_ms += stage.queue_ms + stage.compute_ms
        self._network_ms = smoothed(self._network_ms or elapsed_ms, max(0.0, elapsed_ms - spent_ms))
        self._rows_per_window += (num_rows - self._rows_per_window) / 32
        self._num_learned += 1
        if self._num_learned % _LOOK_EVERY == 0:
            self._look()

    def _look(self) -> None:
        rates = [self._windows_per_ms(together) for together in range(1, self._num_sessions + 1)]
        enough = _NEARLY * max(rates)
        self._most_together = max(number for number, rate in enumerate(rates, 1) if rate >= enough)

    def _windows_per_ms(self, together: int) -> float:
        """Throughput with groups of that size: bound by the slowest stage or by the round trip."""
        num_rows = max(1, round(together * self._rows_per_window))
        times_ms = [table.ms(num_rows) for table in self._tables]
        known_ms = [each_ms for each_ms in times_ms if each_ms]
        if len(known_ms) < len(times_ms):
            # Without measurements: as many groups as stages.
            return float(together <= max(1, -(-self._num_sessions // len(self._tables))))
        return min(together / max(known_ms), self._num_sessions / (sum(known_ms) + self._network_ms))


# Alone, a prompt is cut so that every stage has a chunk to compute most of the time: the pipeline fills and #
# drains once for each prompt, and that loss shrinks with the chunks. Among other sessions their next tokens
# wait # for a chunk at each stage, so chunks are as long as the bound on that delay allows. Chunked prefill:
# Agrawal # et al. 2023 (Sarathi).
# Chunks of one prompt for each stage: a stage then idles for at most a fifth of the prefill.
_CHUNKS_PER_STAGE: Final = 4
# From this many rows llama.cpp's attention on CPUs computes in tiles: half the time behind a long text.
_FEWEST_ROWS_ALONE: Final = 64
_ROWS_UNMEASURED: Final = 16
# While others decode, chunks may multiply the time of their tokens by this, compared with no prefill.
_MOST_DELAY: Final = 2.0
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
