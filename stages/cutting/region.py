"""Where a tensor's bytes lie in a model: in a row, or, if a stage needs a part of each of its rows, apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Region(NamedTuple):
    """A stretch of a model's file, or many of the same length at the same distance.

    Attributes:
        file: Which of the model's files has it, from 0.
        start: Its first byte there.
        num_bytes: How many bytes belong to it.
        row_bytes: How many lie in a row; 0 if all do.
        stride_bytes: From the start of one row to the next.
    """

    file: int
    start: int
    num_bytes: int
    row_bytes: int = 0
    stride_bytes: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether its bytes lie in a row."""
        return not self.row_bytes

    def stretches(self, offset: int, count: int) -> Iterator[tuple[int, int]]:
        """Where `count` of its bytes, from the one at `offset` on, lie in the file: first byte and number."""
        if self.is_whole:
            yield self.start + offset, count
            return
        while count > 0:
            row, skipped = divmod(offset, self.row_bytes)
            length = min(count, self.row_bytes - skipped)
            yield self.start + row * self.stride_bytes + skipped, length
            offset += length
            count -= length

    def read(self, read_at: Callable[[int, int], bytes], offset: int, count: int) -> bytes:
        """Read some of its bytes.

        Args:
            read_at: Reads up to so many bytes (second) of the file from a place on (first).
            offset: The first one's place among the region's bytes.
            count: How many.

        Returns:
            The bytes; fewer if the file ends before, or if `read_at` gives fewer.
        """
        parts = []
        for start, length in self.stretches(offset, count):
            part = read_at(start, length)
            parts.append(part)
            if len(part) < length:
                break
        return b"".join(parts)


Place = tuple[Region, int]
"""A byte of a region, by its number among them."""
