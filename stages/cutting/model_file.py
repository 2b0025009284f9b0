"""Reading bytes of a model file; whatever goes wrong names the file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self

from spanmesh_proto.errors import InvalidModel

if TYPE_CHECKING:
    from pathlib import Path


class ModelFile:
    """An open model file.

    Args:
        path: The file.

    Raises:
        InvalidModel: If it cannot be read, here or later.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise self._unreadable(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        os.close(self._descriptor)

    def read_at(self, position: int, count: int) -> bytes:
        """Up to `count` bytes from `position` on; none at the end of the file."""
        try:
            return os.pread(self._descriptor, count, position)
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> InvalidModel:
        return InvalidModel(f"{self.path} cannot be read: {error.strerror or error}")
