"""The join token in a file, for hosts that share a disk or a clipboard."""

from __future__ import annotations

import contextlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mesh.util.files import write_private_file
from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@contextmanager
def token_file(path: Path | None, text: str) -> Iterator[Callable[[str], None]]:
    """While in the block, `path` holds `text`, readable by this user only; afterwards it is gone.

    What the block is given writes another text over it.

    A reader sees the whole token or no file. A token that another mesh wrote there meanwhile stays.

    Args:
        path: Where, or None for no file.
        text: The token.

    Raises:
        ClusterError: If the file cannot be written.
    """
    current = text

    def write(new_text: str) -> None:
        nonlocal current
        if path is None:
            return
        current = new_text
        try:
            write_private_file(path, f"{new_text}\n")
        except OSError as error:
            raise ClusterError(
                f"cannot write the join token to {path}: {error.strerror}", param="--token-file"
            ) from error

    write(text)
    try:
        yield write
    finally:
        with contextlib.suppress(OSError):
            if path is not None and path.read_text().strip() == current:
                path.unlink()
