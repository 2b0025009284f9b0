"""Pieces that arrive one after the other, in chunks of any size."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from spanmesh_proto.errors import InvalidModel
from stages.gguf.file_io import write_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stages.weights.assembly import Assembly


class SentPieces:
    """Takes them in as they come.

    Args:
        assembly: Gets them.
        indices: Which pieces come, in this order.

    Attributes:
        wrong: Those that did not have their hash.
        num_bytes: Of what came.
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
        """Whether all have come."""
        return not self._coming

    def take(self, data: bytes) -> None:
        """The next bytes.

        Raises:
            OSError: If they cannot be written.
            InvalidModel: If there are more than were asked for.
        """
        view = memoryview(data)
        self.num_bytes += len(data)
        while view:
            if not self._coming:
                raise InvalidModel(
                    "more bytes came than were asked for; install the same spanmesh everywhere"
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
