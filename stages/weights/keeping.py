"""What the user of a host says about weights; its stages hear it by environment.

`mesh join` and `mesh serve` set the variables for the processes that they start.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MODELS: Final = "SPANMESH_MODELS"
CACHE_BYTES: Final = "SPANMESH_CACHE_BYTES"


@dataclass(frozen=True)
class Keeping:
    """How weights are kept.

    Attributes:
        models: A folder with GGUF files of this host's own, if there is one.
        cache_bytes: What stage files may take of the disk together, if that is limited.
    """

    models: Path | None = None
    cache_bytes: int | None = None

    def to_environment(self) -> None:
        """Let the processes that this one starts know."""
        for name, value in ((MODELS, self.models), (CACHE_BYTES, self.cache_bytes)):
            if value is not None:
                os.environ[name] = str(value)


NOTHING_SAID: Final = Keeping()


def read_keeping() -> Keeping:
    """What whoever started this process said."""
    models, cache_bytes = os.environ.get(MODELS), os.environ.get(CACHE_BYTES)
    return Keeping(Path(models) if models else None, int(cache_bytes) if cache_bytes else None)
