"""Span: rows of one slot, the unit of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one slot, for a batch.

    Attributes:
        slot: Sequence slot.
        start: Absolute position of the first row. The slot's rows from there on are dropped.
        tokens: Token ids, one a row.
        hidden: float32 (rows, n_embd); required except at the first stage.
        num_outputs: At the tail, number of last rows that return logits.
        checkpoints: In models with recurrent layers: positions of the slot's checkpoints that are kept, and
            `start` if one is to be made before the first row. Empty to keep all and make none.
        may_be_padded: Whether other rows may be computed with it, only because that is faster.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    hidden: NDArray[np.float32] | None = None
    num_outputs: int = 0
    checkpoints: tuple[int, ...] = ()
    may_be_padded: bool = False
