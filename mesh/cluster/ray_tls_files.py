"""The key and certificates of a host's Ray node: the one place where a private key touches the disk.

Ray's processes take them from files only. They lie in the node's folder, which is this user's alone and goes
with the node.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from stages.transport.channels import Identity

_MODE: Final = 0o600


class RayTlsFiles:
    """Three files.

    Args:
        folder: Of the node; nobody else can enter it.
    """

    def __init__(self, folder: Path) -> None:
        self._certificate = folder / "certificate.pem"
        self._key = folder / "key.pem"
        self._authority = folder / "authority.pem"

    @property
    def exist(self) -> bool:
        """Whether this node speaks TLS."""
        return self._key.exists()

    def write(self, identity: Identity) -> None:
        """Write them, readable by this user only."""
        for path, content in (
            (self._certificate, identity.certificate_pem),
            (self._authority, identity.authority_pem),
            (self._key, identity.private_key_pem),
        ):
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE), "wb") as file:
                file.write(content)

    def environment(self) -> dict[str, str]:
        """What tells Ray of them."""
        return {
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_CERT": str(self._certificate),
            "RAY_TLS_SERVER_KEY": str(self._key),
            "RAY_TLS_CA_CERT": str(self._authority),
        }
