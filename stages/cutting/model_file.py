"""Reading bytes of a model's files; whatever goes wrong names the file."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from spanmesh_proto.errors import InvalidModel

if TYPE_CHECKING:
    from pathlib import Path


class ModelFile:
    """An open model.

    Args:
        paths: Its file, or all of them.

    Raises:
        InvalidModel: If one cannot be read, here or later.
    """

    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        self._stack = ExitStack()
        self._descriptors: list[int] = []
        with self._stack:
            for path in paths:
                try:
                    descriptor = os.open(path, os.O_RDONLY)
                except OSError as error:
                    raise unreadable(path, error) from error
                self._stack.callback(os.close, descriptor)
                self._descriptors.append(descriptor)
            self._stack = self._stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file."""
        self._stack.close()

    def descriptor(self, file: int) -> int:
        """Of one of the files, to read from."""
        return self._descriptors[file]

    def read_at(self, position: int, count: int, file: int = 0) -> bytes:
        """Up to `count` bytes from `position` on; none at the end of the file."""
        try:
            return os.pread(self._descriptors[file], count, position)
        except OSError as error:
            raise unreadable(self.paths[file], error) from error


def unreadable(path: Path, error: BaseException) -> InvalidModel:
    """What a failed read means."""
    reason = error.strerror if isinstance(error, OSError) else None
    return InvalidModel(f"{path} cannot be read: {reason or error}")
