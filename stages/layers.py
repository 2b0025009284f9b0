"""Layer ranges, half-open, and the cuts between them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

EXPERTS: Final = r"\.ffn_(gate|up|gate_up|down)_(ch)?exps\."
"""Pattern within the names of tensors of a layer's experts: matrices, biases and scales."""


@dataclass(frozen=True, order=True)
class LayerRange:
    """Layers `[start, stop)` of a model.

    Raises:
        ValueError: If the range is empty or negative.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"[{self.start}, {self.stop}) is not a layer range: need 0 <= start < stop")

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


def ranges_from_cuts(cuts: tuple[int, ...], n_layers: int) -> tuple[LayerRange, ...]:
    """Cut points to ranges: `(10, 20)` of 30 layers gives `[0, 10)`, `[10, 20)`, `[20, 30)`."""
    edges = (0, *cuts, n_layers)
    return tuple(LayerRange(start, stop) for start, stop in itertools.pairwise(edges))


def cuts_of(layers: LayerRange, n_layers: int) -> tuple[int, ...]:
    """The cuts at both ends of a stage; none for the whole model."""
    return tuple(cut for cut in (layers.start, layers.stop) if 0 < cut < n_layers)
