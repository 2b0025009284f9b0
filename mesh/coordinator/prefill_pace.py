"""Sizes of prefill chunks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from speculative.cost_model import moved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from speculative.acceptance import StageMeasure


# Alone, a prompt is cut so that every stage has a chunk to compute most of the time: the pipeline fills and
# drains once for each prompt, and that loss shrinks with the chunks. Among other sessions their next tokens
# wait for a chunk at each stage, so chunks are as long as the bound on that delay allows. Chunked prefill:
# Agrawal et al. 2023 (Sarathi). Chunks of one prompt for each stage: a stage then idles for at most a fifth
# of the prefill.
_CHUNKS_PER_STAGE: Final = 4
# From this many rows llama.cpp's attention on CPUs computes in tiles: half the time behind a long text.
_FEWEST_ROWS_ALONE: Final = 64
_ROWS_UNMEASURED: Final = 16
# llama.cpp's processor kernels for repacked weights compute so many rows at once, and what remains one by
# one; with AVX-512 they are a few percent faster still for multiples of the second.
_TILE: Final = 4
_LARGE_TILE: Final = 16
# While others decode, chunks may add this to the time of their tokens, as a multiple of it without prefill.
_MOST_DELAY: Final = 1.5
# Likewise chunks of a prompt with rows that are no tokens: what makes the rows has taken others' time before,
# and its own answer waits for more than its chunks.
_MOST_DELAY_OF_ROWS: Final = 0.75
_MOST_IN_FLIGHT: Final = 16
_WEIGHT: Final = 0.25
# Behind the last chunk so many windows at least, and two of each session, may still have met one.
_FEWEST_SINCE_CHUNK: Final = 8
# A window that chunks delayed too long lowers the load, each other one raises it: so all but a few keep to
# the bound, not their mean. Below a sixteenth a prompt would pay for what other processes do.
_LOWERED: Final = 0.85
_RAISED: Final = 1.01
_LEAST_SHARE: Final = 1 / 16


class PrefillPace:
    """Prefill chunk size: shared estimate of the times of all sessions of a coordinator.

    Among other sessions, chunks are sized by the times that were measured of stages. What others then wait
    may be longer, as where stages share processors. So their round trips beside chunks are held against those
    without, and the load is lowered until they keep to the bound: first the number of chunks in flight, then
    their size.

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
        # Round trips of windows without a chunk beside them, by the size of the number of sessions.
        self._alone_ms: dict[int, float] = {}
        self._num_since_chunk = 0
        # Load among others, as a share of what keeps every stage busy.
        self._share = 1.0
        self._network_ms: float | None = None

    def rows(self, num_tokens: int, *, has_rows: bool = False, is_replay: bool = False) -> int:
        """Rows of the next chunk.

        Args:
            num_tokens: Tokens of the whole prompt that were not cached when it began.
            has_rows: Whether some of them are rows that are no tokens.
            is_replay: Whether an answer stands still until the replay ends. Sessions that already continue
                can wait longer than for each other's prompts: total waiting is least if all is computed soon.
        """
        if self.num_decoding and not is_replay:
            return self._rows_among_others(_MOST_DELAY_OF_ROWS if has_rows else _MOST_DELAY)
        if self._num_stages == 1:
            return self._max_rows
        fine = min(_CHUNKS_PER_STAGE * self._num_stages, num_tokens // _FEWEST_ROWS_ALONE)
        num_chunks = max(1, fine, math.ceil(num_tokens / self._max_rows))
        if num_chunks == 1:
            return num_tokens
        return min(self._max_rows, _whole_tiles(math.ceil(num_tokens / num_chunks)))

    def num_in_flight(self, rows: int, *, is_replay: bool = False) -> int:
        """Number of chunks to keep in flight: as many as keep every stage busy, or others can bear.

        Args:
            rows: Rows of each.
            is_replay: See `rows`.
        """
        fill = self._num_stages + 1
        if self._row_ms and self._network_ms:
            fill += math.ceil(self._network_ms / (self._row_ms * rows))
        fill = min(fill, _MOST_IN_FLIGHT)
        if self.num_decoding and not is_replay:
            return max(1, round(fill * self._share))
        return fill

    def learn_chunk(
        self, stages: Sequence[StageMeasure], elapsed_ms: float, *, is_typical: bool = True
    ) -> None:
        """Record the times of a chunk.

        Args:
            stages: Time of each stage for it.
            elapsed_ms: Time from sending it to its verdict.
            is_typical: Whether its rows cost what those of other chunks do. Otherwise it only counts as one
                that windows of others were beside.
        """
        self._num_since_chunk = 0
        if stages and is_typical:
            self._learn_network(stages, elapsed_ms)
            slowest_ms = max(stage.compute_ms / stage.num_rows for stage in stages)
            self._row_ms = moved(self._row_ms, slowest_ms, _WEIGHT)

    def learn_window(self, stages: Sequence[StageMeasure], elapsed_ms: float, *, num_ahead: int = 0) -> None:
        """Record the times of a decoding window.

        Args:
            stages: See `learn_chunk`.
            elapsed_ms: Likewise.
            num_ahead: Windows of its session, chunks included, that were in flight when it was sent.
        """
        if stages:
            network_ms = self._learn_network(stages, elapsed_ms)
            undisturbed_ms = network_ms + sum(stage.compute_ms for stage in stages)
            self._window_ms = moved(self._window_ms, undisturbed_ms, _WEIGHT)
            # One that was sent behind its own prompt, or another window, waited for that: no delay by others.
            if not num_ahead:
                self._learn_delay(elapsed_ms)

    @property
    def _expected_ms(self) -> float | None:
        return self._alone_ms.get(self.num_decoding.bit_length())

    def _learn_delay(self, elapsed_ms: float) -> None:
        self._num_since_chunk += 1
        expected_ms = self._expected_ms
        if self._num_since_chunk > max(_FEWEST_SINCE_CHUNK, 2 * self.num_decoding):
            self._alone_ms[self.num_decoding.bit_length()] = moved(expected_ms, elapsed_ms, _WEIGHT)
        elif expected_ms is None:
            self._share = 1.0
        elif elapsed_ms > (1 + _MOST_DELAY) * expected_ms:
            self._share = max(_LEAST_SHARE, self._share * _LOWERED)
        else:
            self._share = min(1.0, self._share * _RAISED)

    def _learn_network(self, stages: Sequence[StageMeasure], elapsed_ms: float) -> float:
        network_ms = max(0.0, elapsed_ms - sum(stage.queue_ms + stage.compute_ms for stage in stages))
        self._network_ms = moved(self._network_ms, network_ms, _WEIGHT)
        return self._network_ms

    def _rows_among_others(self, most_delay: float) -> int:
        if not self._row_ms or not self._window_ms:
            return min(_ROWS_UNMEASURED, self._max_rows)
        window_ms = min(self._window_ms, self._expected_ms or self._window_ms)
        # Below one chunk in flight, the chunk shrinks.
        size = min(1.0, (self._num_stages + 1) * self._share)
        hold_ms = size * most_delay * window_ms / self._num_stages
        rows = max(1, min(self._max_rows, int(hold_ms / self._row_ms)))
        return rows if rows < _TILE else rows - rows % _TILE


def _whole_tiles(rows: int) -> int:
    """A number of rows near the given one that kernels compute fast."""
    if rows < _FEWEST_ROWS_ALONE:
        return -(-rows // _TILE) * _TILE
    return (rows + _LARGE_TILE // 2 - 1) // _LARGE_TILE * _LARGE_TILE
