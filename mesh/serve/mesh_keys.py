"""What keeps two rings apart, and strangers out of either."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field


@dataclass(frozen=True)
class MeshKeys:
    """Of one ring. A repaired one is another: what is left of the old one is refused by the new.

    Attributes:
        mesh_id: Its name, hex.
        mesh_key: Secret that every call between stages and coordinator carries.
        term: Of the head; higher than that of any head before it.
    """

    mesh_id: str
    mesh_key: str = field(repr=False)
    term: int = 0


def new_mesh_keys(term: int = 0) -> MeshKeys:
    """Keys for a new ring."""
    return MeshKeys(secrets.token_hex(16), secrets.token_urlsafe(32), term)
