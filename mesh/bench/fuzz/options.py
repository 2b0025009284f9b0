"""What the user of `mesh bench fuzz` says of one kind of input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class FuzzOptions:
    """One run of one kind.

    Attributes:
        num_cases: How many inputs.
        seed: Of all randomness: the same seed makes the same inputs in the same order.
        model: A GGUF file, for what serves one.
        output: Folder for failing inputs and the servers' logs; it exists.
    """

    num_cases: int
    seed: int
    model: Path
    output: Path
