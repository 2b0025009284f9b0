"""Where a host keeps its stage files."""

from __future__ import annotations

import os
from pathlib import Path

from stages.weights.stage_store import StageStore


def default_root() -> Path:
    """`$XDG_CACHE_HOME/spanmesh`, or `~/.cache/spanmesh`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spanmesh"


def stage_store(root: Path | None = None) -> StageStore:
    """The stage files themselves, cut here or fetched; all that a host needs that cuts nothing.

    Args:
        root: The cache's folder, `default_root` unless given.
    """
    return StageStore((root if root is not None else default_root()) / "stages")
