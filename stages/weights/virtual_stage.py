"""A stage file that nobody has written, read all the same: straight out of the model that it is of."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from spanmesh_proto.errors import InvalidModel
from stages.gguf.file_io import ModelFile
from stages.weights.file_stamp import stamps_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stages.weights.file_stamp import FileStamp
    from stages.weights.recipe import Recipe


class VirtualStage:
    """Reads like the file that the recipe describes. Any thread may.

    Args:
        recipe: What is in it.
        paths: The model's files.
        stamps: What they looked like when they were hashed.

    Raises:
        InvalidModel: If they were changed since, or cannot be read.
    """

    def __init__(self, recipe: Recipe, paths: Sequence[Path], stamps: Sequence[FileStamp]) -> None:
        if stamps_of(paths) != tuple(stamps):
            raise InvalidModel(
                f"{paths[0]} was changed since its layers were hashed; start `mesh serve` again"
            )
        self.size_bytes = recipe.size_bytes
        self._header = recipe.header
        self._pieces = recipe.pieces
        self._starts = [piece.at for piece in recipe.pieces]
        self._files = ModelFile(*paths)

    def close(self) -> None:
        """Close the model's files."""
        self._files.close()

    def read(self, at: int, count: int) -> bytes:
        """Up to `count` bytes from `at` on, none at the end; fewer where a piece ends.

        Raises:
            InvalidModel: If the model cannot be read, or has become shorter.
        """
        count = min(count, self.size_bytes - at)
        if count <= 0:
            return b""
        if at < len(self._header):
            return self._header[at : at + count]
        index = bisect_right(self._starts, at) - 1
        if index >= 0 and at < self._pieces[index].at + self._pieces[index].num_bytes:
            piece = self._pieces[index]
            offset = at - piece.at
            file = piece.region.file
            data = piece.region.read(
                lambda start, length: self._files.read_at(start, length, file),
                piece.tensor_offset + offset,
                min(count, piece.num_bytes - offset),
            )
            if not data:
                raise InvalidModel(f"{self._files.paths[file]} has become shorter; fetch it again")
            return data
        following = self._starts[index + 1] if index + 1 < len(self._starts) else self.size_bytes
        return bytes(min(count, following - at))
