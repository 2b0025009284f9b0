"""When a stage is left alone for good."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


async def orphaned(alone_s: Callable[[], float], orphan_s: float) -> None:
    """Wait until nobody has needed the stage for so long.

    Args:
        alone_s: For how long nobody has now, in seconds; 0 while somebody does.
        orphan_s: How long that may last.
    """
    while (left_s := orphan_s - alone_s()) > 0:  # noqa: ASYNC110 - nothing tells that nobody came
        await asyncio.sleep(left_s)
