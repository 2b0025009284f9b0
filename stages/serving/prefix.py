"""A cached prefix that no slot holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from stages.runtime.slot_memory import SlotMemory


class Prefix(Protocol):
    """Rows of a session's cached prefix that no slot holds."""

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Token ids of the rows, int64."""

    @property
    def origin(self) -> str:
        """Where it comes from, for errors, such as `from disk`."""

    def serves(self, tokens: Sequence[int]) -> bool:
        """Whether a slot with the rows can begin with exactly these tokens."""

    def put_into(self, memory: SlotMemory, slot: int) -> None:
        """Put the rows into an empty slot.

        Raises:
            MeshError: If llama.cpp does not take them.
            MemoryError: If there is no room for them.
        """
