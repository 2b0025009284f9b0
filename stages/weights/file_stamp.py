"""Recognising files of a model without reading them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spanmesh_proto.errors import InvalidModel

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@dataclass(frozen=True)
class FileStamp:
    """What a file looked like when its content was found out.

    The time of the last change of status cannot be set by anybody: a file that was altered and given its old
    times back has another.
    """

    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """The stamp of a file as it is now.

        Raises:
            InvalidModel: If it is not there any more.
        """
        try:
            status = path.stat()
        except OSError as error:
            raise InvalidModel(f"{path} cannot be read: {error.strerror or error}") from error
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def stamps_of(paths: Iterable[Path]) -> tuple[FileStamp, ...]:
    """Of every file; see `FileStamp.of`."""
    return tuple(FileStamp.of(path) for path in paths)
