"""What a session committed and nobody took yet."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.engine import Committed

# Seconds of an answer: a reader that is merely late never notices.
MAX_UNREAD_TOKENS: Final = 256


class Outbox:
    """Hands parts of an answer to their reader, and says when that one is too far behind.

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
        """Whether so much waits that no more should be made; what is under way still has room."""
        return self._is_full

    def put(self, part: Committed | MeshError) -> None:
        """Tokens that joined the answer, or why it ends."""
        if not isinstance(part, MeshError):
            self._num_tokens += len(part.tokens)
            self._is_full = self._is_full or self._num_tokens >= MAX_UNREAD_TOKENS
        self._parts.put_nowait(part)

    async def take(self) -> Committed:
        """The oldest part; waits until there is one.

        Raises:
            MeshError: If the answer ended with it.
        """
        part = await self._parts.get()
        if isinstance(part, MeshError):
            raise part
        self._num_tokens -= len(part.tokens)
        if self._is_full and self._num_tokens <= MAX_UNREAD_TOKENS // 2:
            self._is_full = False
            self._on_room()
        return part
