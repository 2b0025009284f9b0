"""Chunk of an image: rows of a prompt that a projector has made of an image, or of a slice of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class ImageChunk:
    """Consecutive rows of a prompt, none of which is a token; a prompt may have several of one image."""

    first_row: int
    """Its first row in the prompt."""
    num_rows: int
    """Number of its rows."""
    columns: int = 0
    """In models with positions in several parts: rows of a line of the image. 0 if each row has the position
    behind the row before it."""
    sees_all: bool = False
    """Whether each of its rows attends to all of them, so that they are computed at once."""

    @property
    def is_fixed(self) -> bool:
        """Whether a sequence that holds it cannot go back to a row within it."""
        return self.columns > 0 or self.sees_all

    @property
    def num_positions(self) -> int:
        """Positions that it takes: those of the rows behind it begin so much later than its own."""
        return max(self.num_rows // self.columns, self.columns) if self.columns else self.num_rows

    @property
    def stop(self) -> int:
        """Its last row plus one."""
        return self.first_row + self.num_rows


def begin_of_chunk(chunks: Iterable[ImageChunk], num: int) -> int:
    """The number of first rows itself, or that of those before the chunk that it divides.

    What has computed some rows of a chunk may be unable to go on within it.
    """
    return next((chunk.first_row for chunk in chunks if chunk.first_row < num < chunk.stop), num)
