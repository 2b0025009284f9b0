"""Context managers that block as they open, such as one that loads a draft model, for an event loop."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractContextManager

Value = TypeVar("Value")


@asynccontextmanager
async def entered_in_thread(manager: AbstractContextManager[Value]) -> AsyncIterator[Value]:
    """Open it in a thread, and close it here behind the block, or at once if nobody waits any more."""
    entering = asyncio.create_task(asyncio.to_thread(manager.__enter__))
    try:
        value = await asyncio.shield(entering)
    except asyncio.CancelledError:
        await asyncio.wait([entering])
        if not entering.cancelled() and entering.exception() is None:
            manager.__exit__(None, None, None)
        raise
    try:
        yield value
    finally:
        manager.__exit__(None, None, None)
