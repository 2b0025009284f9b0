"""The join token in a file, for hosts that share a disk or a clipboard."""

from __future__ import annotations

import contextlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mesh.private_file import write_private_file
from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def token_file(path: Path | None, text: str) -> Iterator[None]:
    """While in the block, `path` holds `text`, readable by this user only; afterwards it is gone.

    A reader sees the whole token or no file. A token that another mesh wrote there meanwhile stays.

    Args:
        path: Where, or None for no file.
        text: The token.

    Raises:
        ClusterError: If the file cannot be written.
    """
    if path is None:
        yield
        return
    try:
        write_private_file(path, f"{text}\n")
    except OSError as error:
        raise ClusterError(
            f"cannot write the join token to {path}: {error.strerror}", param="--token-file"
        ) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if path.read_text().strip() == text:
                path.unlink()
