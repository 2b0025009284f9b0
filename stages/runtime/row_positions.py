"""Positions of rows: where llama.cpp has the rows of a sequence that are no tokens, and those behind them.

A slot, the wire, caches and limits count rows. In most models a row's position is its number. In models with
positions in several parts (M-RoPE: Qwen2-VL, Wang et al. 2024) an image of h x w rows takes max(h, w)
positions: all its rows have the first of them in time, and differ in y and x. A text behind it begins there.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from spanmesh_proto.errors import InvalidWindow
from spanmesh_proto.row_ids import FIRST_ROW_ID, has_rows, num_alike

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from spanmesh_proto.image_chunk import ImageChunk

NEED_PARTS: Final = frozenset({"glm4", "glm4moe"})
"""Architectures whose rows that are no tokens need positions in parts, else llama.cpp ends the process."""

# Positions are int32 in llama.cpp.
_MOST_ROWS: Final = 2**31 - 1


@dataclass(frozen=True)
class RowPositions:
    """Positions of the rows of one sequence.

    Raises:
        InvalidWindow: If chunks overlap, are out of order, or have no rows or no whole lines.
    """

    chunks: tuple[ImageChunk, ...] = ()
    """Chunks of images, in order."""

    def __post_init__(self) -> None:
        for chunk in self.chunks:
            if chunk.num_rows < 1 or chunk.num_rows % (chunk.columns or 1):
                raise InvalidWindow(
                    f"the image at row {chunk.first_row} has {chunk.num_rows} rows and {chunk.columns} "
                    "columns: they do not fit"
                )
        for one, two in pairwise(self.chunks):
            if two.first_row < one.stop:
                raise InvalidWindow(f"the image at row {two.first_row} begins before row {one.stop}")
        if self.chunks and self.chunks[-1].stop > _MOST_ROWS:
            raise InvalidWindow(f"an image ends at row {self.chunks[-1].stop}, past the last position")

    def __bool__(self) -> bool:
        """Whether any row is no token."""
        return bool(self.chunks)

    @property
    def has_parts(self) -> bool:
        """Whether any row has a position in several parts."""
        return any(chunk.columns for chunk in self.chunks)

    def within(self, row: int) -> ImageChunk | None:
        """The chunk that begins before a row and ends behind it; None if a sequence can go back to there."""
        chunk = self._before(row)
        return chunk if chunk is not None and row < chunk.stop and chunk.is_fixed else None

    def is_whole(self, start: int) -> bool:
        """Whether the rows from `start` on are a chunk that is computed at once."""
        chunk = self._at(start) if self.chunks else None
        return chunk is not None and chunk.sees_all

    def has_whole(self, start: int) -> bool:
        """Whether a chunk that is computed at once begins at a row or behind it."""
        return any(chunk.sees_all and chunk.first_row >= start for chunk in self.chunks)

    def end_of(self, num_rows: int) -> int:
        """The first position behind all of the first rows."""
        index = bisect_left(self._firsts, num_rows)
        chunk = self.chunks[index - 1] if index else None
        if chunk is None or num_rows >= chunk.stop:
            return num_rows - self._shifts[index]
        base = chunk.first_row - self._shifts[index - 1]
        return base + (chunk.num_positions if chunk.columns else num_rows - chunk.first_row)

    def parts(self, start: int, num_rows: int) -> NDArray[np.int32]:
        """Positions of consecutive rows that are no tokens, in parts.

        Args:
            start: The first row.
            num_rows: Number of rows, all of one chunk.

        Returns:
            int32 (4, num_rows): time, y, x, and zeros.
        """
        parts = np.zeros((4, num_rows), np.int32)
        chunk = self._at(start)
        if chunk is None or not chunk.columns:
            parts[:3] = self.end_of(start) + np.arange(num_rows)
        else:
            parts[:3] = self.end_of(chunk.first_row)
            parts[1:3] += np.divmod(np.arange(num_rows) + start - chunk.first_row, chunk.columns)
        return parts

    def num_alike(self, other: RowPositions) -> int:
        """Number of first rows that have the same positions in both, whatever is behind them."""
        index = next(
            (index for index, (one, two) in enumerate(zip(self.chunks, other.chunks)) if one != two),  # noqa: B905
            min(len(self.chunks), len(other.chunks)),
        )
        rest = (*self.chunks[index : index + 1], *other.chunks[index : index + 1])
        return min((chunk.first_row for chunk in rest), default=_MOST_ROWS)

    def check(self, start: int, ids: Sequence[int]) -> None:
        """Check that a window brings tokens, or rows that are none, where the sequence has them.

        Args:
            start: Its first row.
            ids: Ids of its rows.

        Raises:
            InvalidWindow: If it does not, or divides a chunk that is computed at once.
        """
        if not self.chunks:
            if has_rows(ids):
                raise InvalidWindow(f"a window at {start} has rows that are no tokens; its session has none")
            return
        stop = start + len(ids)
        chunk, next_chunk = self._at(start), self._before(stop)
        is_token = bool(ids) and ids[0] < FIRST_ROW_ID
        begins_within = next_chunk is not None and next_chunk.first_row > start
        if num_alike(ids) < len(ids) or is_token != (chunk is None) or (is_token and begins_within):
            raise InvalidWindow(
                f"a window from {start} to {stop} has tokens where its session has an image, or the opposite"
            )
        if chunk is not None and (
            stop > chunk.stop or (chunk.sees_all and (start, stop) != (chunk.first_row, chunk.stop))
        ):
            raise InvalidWindow(
                f"a window from {start} to {stop} divides the image of rows {chunk.first_row} to {chunk.stop}"
            )

    def check_prefix(self, ids: Sequence[int]) -> None:
        """Check that the first rows of the sequence are tokens, or none, where it has them.

        Args:
            ids: Their ids.

        Raises:
            InvalidWindow: Naming the first that is not.
        """
        if not self.chunks and not has_rows(ids):
            return
        is_row = np.asarray(ids, np.int64) >= FIRST_ROW_ID
        expected = np.zeros(len(ids), bool)
        for chunk in self.chunks:
            expected[chunk.first_row : chunk.stop] = True
        differs = np.flatnonzero(is_row != expected)
        if differs.size:
            kind = "a token" if expected[differs[0]] else "no token"
            raise InvalidWindow(f"row {differs[0]} of a session is {kind}, unlike its images say")

    def _at(self, row: int) -> ImageChunk | None:
        """The chunk with a row."""
        chunk = self._before(row + 1)
        return chunk if chunk is not None and row < chunk.stop else None

    def _before(self, row: int) -> ImageChunk | None:
        """The last chunk that begins before a row."""
        index = bisect_left(self._firsts, row)
        return self.chunks[index - 1] if index else None

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        return tuple(chunk.first_row for chunk in self.chunks)

    @cached_property
    def _shifts(self) -> tuple[int, ...]:
        """How many rows more than positions there are before each chunk, and behind the last."""
        return tuple(accumulate((chunk.num_rows - chunk.num_positions for chunk in self.chunks), initial=0))


TOKENS_ONLY: Final = RowPositions()
"""Those of a sequence of tokens."""
