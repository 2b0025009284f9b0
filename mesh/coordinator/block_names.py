"""Names of blocks on the stages' disks: chained digests, as in vLLM's prefix cache (Kwon et al. 2023).

A name stands for the API key, for what the rows of all stages depend on, and for all tokens up to the end of
the block. Another key, model or mode has other names, so no block of one is found by another.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_POSITIONS: Final = 256
"""Positions of a block: few, so that little of a prompt is left over; many, so that files have some size."""
# Raised when a name stands for something else.
_VERSION: Final = b"spanmesh blocks 1"


class BlockNames:
    """Names for one sequence of tokens, computed as far as they are asked for.

    Args:
        root: See `names_root`.
        tokens: The tokens.
        block_positions: Positions of a block.
    """

    def __init__(self, root: bytes, tokens: Sequence[int], block_positions: int) -> None:
        self._tokens = tokens
        self._block_positions = block_positions
        # The first is that of no block.
        self._names = [root]

    @property
    def num_blocks(self) -> int:
        """Number of whole blocks."""
        return len(self._tokens) // self._block_positions

    def block(self, index: int) -> bytes:
        """Name of a whole block, 32 bytes."""
        size = self._block_positions
        while len(self._names) <= index + 1:
            start = (len(self._names) - 1) * size
            self._names.append(self._name(b"rows", self._names[-1], start, start + size))
        return self._names[index + 1]

    def start_of_state(self, stop: int) -> int:
        """First position of the block that ends at `stop` with a recurrent state."""
        return (stop - 1) // self._block_positions * self._block_positions

    def state(self, stop: int) -> bytes:
        """Name of the block that ends at `stop` with a recurrent state, 32 bytes."""
        start = self.start_of_state(stop)
        parent = self.block(start // self._block_positions - 1) if start else self._names[0]
        return self._name(b"state", parent, start, stop)

    def _name(self, kind: bytes, parent: bytes, start: int, stop: int) -> bytes:
        tokens = np.asarray(self._tokens[start:stop], "<i8").tobytes()
        return hashlib.sha256(kind + parent + tokens).digest()


def names_root(client: str | None, identities: Sequence[bytes], wires: Sequence[str]) -> bytes:
    """The digest with which the names of a client's blocks begin, 32 bytes.

    Args:
        client: Identity of the API key; None where the API is open.
        identities: Of each stage, the digest of what its rows depend on besides tokens and other stages.
        wires: Formats of hidden states between the stages, on which rows of later stages depend.
    """
    digest = hashlib.sha256(_VERSION)
    parts = [b"" if client is None else b"key " + client.encode(), *identities]
    for part in (*parts, *(each.encode() for each in wires)):
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.digest()
