"""Assembly: a stage file filled from pieces in any order, with transfer counts.

A second file beside it records the pieces that are in it, one byte each. A killed process leaves both; the
next one checks the recorded pieces and continues.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from spanmesh_proto.errors import InvalidModel
from stages.files import write_all
from stages.weights.hashing import in_threads, piece_sha256, zeros_sha256

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from stages.weights.recipe import Piece, Recipe

_HERE: Final = b"\x01"


class Assembly:
    """Context manager for one stage file; its user must hold the lock of the file.

    Args:
        recipe: Recipe of the stage.
        path: Path of the file; pieces of an earlier try are kept.
    """

    def __init__(self, recipe: Recipe, path: Path) -> None:
        self.recipe = recipe
        self._path = path
        self._file = -1
        self._note = -1
        self._opened = ExitStack()
        self._here: set[int] = set()

    def __enter__(self) -> Self:
        """Open both files.

        Raises:
            OSError: If they cannot be written.
        """
        with ExitStack() as opened:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            opened.callback(os.close, self._file)
            self._note = os.open(note_path(self._path), os.O_RDWR | os.O_CREAT, 0o644)
            opened.callback(os.close, self._note)
            os.ftruncate(self._file, self.recipe.size_bytes)
            write_all(self._file, self.recipe.header, 0)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._opened.close()

    @property
    def descriptor(self) -> int:
        """Descriptor for writing pieces."""
        return self._file

    @property
    def done_bytes(self) -> int:
        """Size of the present pieces."""
        return sum(self.recipe.pieces[index].num_bytes for index in self._here)

    @property
    def missing(self) -> list[int]:
        """Indices of missing pieces, in order."""
        return [index for index in range(len(self.recipe.pieces)) if index not in self._here]

    def resume(self) -> int:
        """Check the pieces of an earlier try, and those of zeros; to be called first.

        Returns:
            Number of recorded pieces with a wrong hash.

        Raises:
            OSError: If the file cannot be read.
        """
        pieces = self.recipe.pieces
        note = os.pread(self._note, len(pieces), 0)
        claimed = {index for index, flag in enumerate(note) if flag}
        num_wrong = 0
        with closing(in_threads(self._found_sha256, sorted(claimed))) as found:
            for index, sha256 in found:
                if sha256 == pieces[index].sha256:
                    self._here.add(index)
                else:
                    num_wrong += 1
                    os.pwrite(self._note, b"\0", index)
        for index, piece in enumerate(pieces):
            # A new file is all zeros; the place of a wrong piece is not.
            if index not in claimed and piece.sha256 == zeros_sha256(piece.num_bytes):
                self.check(index)
        return num_wrong

    def check(self, index: int) -> bool:
        """Check a piece that was written, and record it if its hash is right."""
        is_right = self._found_sha256(index) == self.recipe.pieces[index].sha256
        if is_right:
            self.claim(index)
        return is_right

    def claim(self, index: int) -> None:
        """Record a piece whose hash was checked while it was written."""
        self._here.add(index)
        os.pwrite(self._note, _HERE, index)

    def _found_sha256(self, index: int) -> str | None:
        piece = self.recipe.pieces[index]
        return piece_sha256(self._file, piece.at, piece.num_bytes)


class SentPieces:
    """Writes pieces of a stream into an assembly.

    Args:
        assembly: The assembly.
        indices: Indices of the pieces, in the order of the stream.

    Attributes:
        wrong: Indices of those with a wrong hash.
        num_bytes: Size of the received data.
    """

    def __init__(self, assembly: Assembly, indices: Sequence[int]) -> None:
        self._assembly = assembly
        self._coming = list(reversed(indices))
        self._got = 0
        self._digest = hashlib.sha256()
        self.wrong: list[int] = []
        self.num_bytes = 0

    @property
    def is_complete(self) -> bool:
        """Whether all pieces have come."""
        return not self._coming

    def take(self, data: bytes) -> None:
        """Write the next bytes of the stream.

        Raises:
            OSError: If they cannot be written.
            InvalidModel: If there are more than expected.
        """
        view = memoryview(data)
        self.num_bytes += len(data)
        while view:
            if not self._coming:
                raise InvalidModel(
                    "more bytes arrived than requested; install the same spanmesh on every host"
                )
            index = self._coming[-1]
            piece = self._assembly.recipe.pieces[index]
            part = view[: piece.num_bytes - self._got]
            write_all(self._assembly.descriptor, part, piece.at + self._got)
            self._digest.update(part)
            self._got += len(part)
            view = view[len(part) :]
            if self._got == piece.num_bytes:
                self._finish(index, piece.sha256)

    def _finish(self, index: int, sha256: str) -> None:
        if self._digest.hexdigest() == sha256:
            self._assembly.claim(index)
        else:
            self.wrong.append(index)
        self._coming.pop()
        self._got = 0
        self._digest = hashlib.sha256()


@dataclass(frozen=True)
class Transfer:
    """Origin of the bytes of one stage, or of several."""

    reused_bytes: int = 0
    """Weights that the host had: in another stage, in a model file, from an earlier try."""
    head_bytes: int = 0
    """Weights sent by the head."""
    hub_bytes: int = 0
    """Weights from the hub."""
    wrong_pieces: int = 0
    """Number of pieces with a wrong hash, which were fetched again."""

    def __add__(self, other: Transfer) -> Transfer:
        """Sum of both."""
        return Transfer(
            self.reused_bytes + other.reused_bytes,
            self.head_bytes + other.head_bytes,
            self.hub_bytes + other.hub_bytes,
            self.wrong_pieces + other.wrong_pieces,
        )

    @property
    def moved_bytes(self) -> int:
        """Bytes that crossed a network."""
        return self.head_bytes + self.hub_bytes


def note_path(path: Path) -> Path:
    """Path of the record of an assembly."""
    return path.with_suffix(".pieces")


def wrong_pieces(recipe: Recipe, path: Path) -> list[int] | None:
    """Check a whole stage file, byte by byte.

    Args:
        recipe: The expected recipe.
        path: The file.

    Returns:
        Indices of the pieces with a wrong hash; None if the header, the size or the zeros are wrong.

    Raises:
        OSError: If it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if os.fstat(descriptor).st_size != recipe.size_bytes:
            return None
        if os.pread(descriptor, len(recipe.header), 0) != recipe.header:
            return None
        if not _are_zeros(descriptor, recipe.zeros()):
            return None

        def found(piece: Piece) -> str | None:
            return piece_sha256(descriptor, piece.at, piece.num_bytes)

        with closing(in_threads(found, recipe.pieces)) as all_found:
            return [index for index, (piece, sha256) in enumerate(all_found) if sha256 != piece.sha256]
    finally:
        os.close(descriptor)


def _are_zeros(descriptor: int, stretches: Iterable[tuple[int, int]]) -> bool:
    return all(
        piece_sha256(descriptor, start, stop - start) == zeros_sha256(stop - start)
        for start, stop in stretches
    )
