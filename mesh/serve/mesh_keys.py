"""What keeps two meshes apart, and strangers out of either."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stages.cutting import StageFile


@dataclass(frozen=True)
class MeshKeys:
    """Of one run.

    Attributes:
        mesh_id: Hash of all stage files in order, so of the model and its cuts, hex.
        mesh_key: Secret that every call between stages and coordinator carries.
    """

    mesh_id: str
    mesh_key: str


def new_mesh_keys(files: Sequence[StageFile]) -> MeshKeys:
    """Keys for a mesh of these stages."""
    content = hashlib.sha256("".join(file.sha256 for file in files).encode())
    return MeshKeys(content.hexdigest(), secrets.token_urlsafe(32))
