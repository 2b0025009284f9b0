"""Which tokens a session holds at which positions, as the KV cache beside it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from spanmesh_proto.errors import InvalidWindow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_FIRST_CAPACITY: Final = 256


class TokenRecord:
    """Token ids by absolute position. Like the cache it is cut where a window starts, and goes on with it.

    So there is nothing to take back after a rejection: the next window overwrites what was rejected.
    """

    def __init__(self) -> None:
        self._ids = np.empty(_FIRST_CAPACITY, np.int64)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def write(self, start: int, tokens: Sequence[int]) -> None:
        """Forget everything from `start` on and put `tokens` there.

        Raises:
            InvalidWindow: If that would leave a gap.
        """
        if start > self._size:
            raise InvalidWindow(
                f"a window starts at position {start}, but only {self._size} tokens are known"
            )
        stop = start + len(tokens)
        if stop > self._ids.size:
            grown = np.empty(max(stop, 2 * self._ids.size), np.int64)
            grown[:start] = self._ids[:start]
            self._ids = grown
        self._ids[start:stop] = tokens
        self._size = stop

    def before(self, position: int) -> NDArray[np.int64]:
        """The tokens at positions below `position`: int64, a view that the next `write` may change."""
        return self._ids[: min(position, self._size)]
