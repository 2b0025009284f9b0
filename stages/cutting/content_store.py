"""Files named by the sha256 of their content."""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Final

import structlog

from spanmesh_proto.errors import ModelError
from stages.cutting.digest import file_sha256
from stages.cutting.stamp import Stamp

if TYPE_CHECKING:
    from pathlib import Path

log = structlog.get_logger()

_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class ContentStore:
    """A folder of files that were whole when they came in.

    Each has a stamp beside it. A file that no longer fits its stamp is hashed again, and removed if its
    content is not what its name says.

    Args:
        root: The folder; made when needed.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def find(self, sha256: str) -> Path | None:
        """The file with this content, or None.

        Raises:
            ModelError: If `sha256` is not one.
        """
        path = self._path(sha256)
        if not path.is_file():
            return None
        stamp = Stamp.load(self._stamp_path(sha256))
        if stamp is not None and stamp.fits(path):
            return path
        if file_sha256(path) == sha256:
            Stamp.of(path, sha256).save(self._stamp_path(sha256))
            return path
        log.warning("cached_stage_damaged", path=str(path))
        path.unlink(missing_ok=True)
        self._stamp_path(sha256).unlink(missing_ok=True)
        return None

    def partial(self, sha256: str) -> Path:
        """Where to gather this content until it is whole; what lies there may be continued.

        Raises:
            ModelError: If `sha256` is not one.
        """
        partial = self._path(sha256).with_suffix(".partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        return partial

    def fresh(self) -> Path:
        """A name of its own for a file that is written here; its content decides its name later."""
        self._root.mkdir(parents=True, exist_ok=True)
        return self._root / f"{secrets.token_hex(8)}.fresh"

    def adopt(self, partial: Path, sha256: str) -> Path:
        """Take a file in after checking its content.

        Returns:
            Its path from now on.

        Raises:
            ModelError: If the content is another; the file is removed, so that a new try starts from nothing.
            InvalidModel: If the file cannot be read.
        """
        found = file_sha256(partial)
        if found != sha256:
            partial.unlink()
            raise ModelError(
                f"{partial.name} has sha256 {found}, expected {sha256}; it was removed, fetch it again"
            )
        return self.adopt_trusted(partial, sha256)

    def adopt_trusted(self, partial: Path, sha256: str) -> Path:
        """Take a file in whose content was hashed while it was written here."""
        path = self._path(sha256)
        partial.replace(path)
        Stamp.of(path, sha256).save(self._stamp_path(sha256))
        return path

    def _path(self, sha256: str) -> Path:
        # The name may come from a peer: nothing but a hash may become part of a path.
        if not _SHA256.fullmatch(sha256):
            raise ModelError(f"{sha256!r} is not a sha256 in lower-case hex")
        return self._root / f"{sha256}.gguf"

    def _stamp_path(self, sha256: str) -> Path:
        return self._path(sha256).with_suffix(".json")
