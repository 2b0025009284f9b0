"""A model in parts, each a link to a file that is named by a hash, as in the cache of a hub's client."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def linked_parts(parts: Sequence[Path]) -> Path:
    """Replace the parts by links.

    Args:
        parts: Files of the model, in order.

    Returns:
        The link to the first one.
    """
    blobs = parts[0].parent / "blobs"
    blobs.mkdir()
    for number, part in enumerate(parts):
        blob = blobs / f"{number:040x}"
        part.rename(blob)
        part.symlink_to(blob)
    return parts[0]
