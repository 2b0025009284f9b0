"""Output queue: parts of an answer on their way to its reader, with back-pressure."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.engine import Committed

# Several seconds of an answer: a reader that is merely late is not affected.
MAX_UNREAD_TOKENS: Final = 256


class OutputQueue:
    """Queue of the parts of an answer for its reader, with back-pressure.

    Args:
        on_room: Called when a reader that was too far behind has caught up.
    """

    def __init__(self, on_room: Callable[[], None]) -> None:
        self._on_room = on_room
        self._parts: asyncio.Queue[Committed | MeshError] = asyncio.Queue()
        self._num_tokens = 0
        self._is_full = False

    @property
    def is_full(self) -> bool:
        """Whether generation should pause; windows in flight still have room."""
        return self._is_full

    def put(self, part: Committed | MeshError) -> None:
        """Add committed tokens, or the error that ends the answer."""
        if not isinstance(part, MeshError):
            self._num_tokens += len(part.tokens)
            self._is_full = self._is_full or self._num_tokens >= MAX_UNREAD_TOKENS
        self._parts.put_nowait(part)

    async def take(self) -> Committed:
        """Remove and return the oldest part; waits until there is one.

        Raises:
            MeshError: If the error that ends the answer is next.
        """
        part = await self._parts.get()
        if isinstance(part, MeshError):
            raise part
        self._num_tokens -= len(part.tokens)
        if self._is_full and self._num_tokens <= MAX_UNREAD_TOKENS // 2:
            self._is_full = False
            self._on_room()
        return part
