"""The join token in a file, for hosts that share a disk or a clipboard."""

from __future__ import annotations

import contextlib
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator


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
        _write(path, text)
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


def _write(path: Path, text: str) -> None:
    # A temporary file is made with mode 0600; renaming it keeps that.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text + "\n")
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
