"""Span: rows of one slot, the unit of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from spanmesh_proto import windows_pb2 as wire


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one slot, for a batch."""

    slot: int
    """Sequence slot."""
    start: int
    """Absolute position of the first row. The slot's rows from there on are dropped."""
    tokens: Sequence[int]
    """Token ids, one a row."""
    hidden: NDArray[np.float32] | None = None
    """float32 (rows, n_embd); required except at the first stage, where they replace the tokens' embeddings.
    """
    num_outputs: int = 0
    """At the tail, number of last rows that return logits."""
    checkpoints: tuple[int, ...] = ()
    """In models with recurrent layers: positions of the slot's checkpoints that are kept, and `start` if one
    is to be made before the first row. Empty to keep all and make none."""
    may_be_padded: bool = False
    """Whether other rows may be computed with it, only because that is faster."""

    @classmethod
    def of(cls, slot: int, window: wire.Window, hidden: NDArray[np.float32] | None = None) -> Span:
        """Rows of a window; without hidden states if they are decoded later."""
        return cls(
            slot,
            window.start,
            list(window.tokens),
            hidden,
            num_outputs=window.verify_rows,
            checkpoints=tuple(window.checkpoints),
        )

    @property
    def is_costly(self) -> bool:
        """Whether more is done than its rows are computed: states may be copied, which takes a while."""
        return bool(self.checkpoints)
