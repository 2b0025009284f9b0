"""sha256 of large files, with progress."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from stages.cutting.model_file import ModelFile

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
    position = 0
    with ModelFile(path) as file:
        while chunk := file.read_at(position, _CHUNK_BYTES):
            digest.update(chunk)
            position += len(chunk)
            if on_bytes is not None:
                on_bytes(len(chunk))
    return digest.hexdigest()
