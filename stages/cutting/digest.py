"""sha256 of large files, with progress."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import InvalidModel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_CHUNK_BYTES: Final = 4 * 1024 * 1024


def file_sha256(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """Hash a file in constant memory.

    Args:
        path: The file.
        on_bytes: Called with the number of bytes just hashed.

    Returns:
        The sha256, hex.

    Raises:
        InvalidModel: If the file cannot be read.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                if on_bytes is not None:
                    on_bytes(count)
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()
