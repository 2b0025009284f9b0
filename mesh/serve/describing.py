"""Finding out what the plan's stages are made of, with progress, and without outliving Ctrl-C."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import TYPE_CHECKING

from mesh.progress import progress_bars

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from mesh.progress import ProgressTask
    from stages.cutting import StageCache
    from stages.layers import LayerRange
    from stages.weights.recipe import Recipe


class _Abandoned(Exception):
    """Raised in the working thread to unwind it."""


async def describe_stages(cache: StageCache, model: Path, parts: Sequence[LayerRange]) -> tuple[Recipe, ...]:
    """The recipes of these layers, one after the other; what was hashed before takes no time.

    Raises:
        ModelError: See `StageCache.describe`.
    """
    recipes = []
    with progress_bars() as bars:
        for layers in parts:
            bar = bars.add(f"hashing layers {layers}")
            recipes.append(await _in_thread(partial(cache.describe, model, layers), bar))
    return tuple(recipes)


async def _in_thread(work: Callable[..., Recipe], bar: ProgressTask) -> Recipe:
    """Run blocking work in a thread that stops at its next sign of progress when we are cancelled."""
    is_abandoned = threading.Event()

    def on_bytes(done_bytes: int, total_bytes: int) -> None:
        if is_abandoned.is_set():
            raise _Abandoned
        bar(done_bytes / total_bytes if total_bytes else 1.0)

    thread = asyncio.create_task(asyncio.to_thread(work, progress=on_bytes))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        is_abandoned.set()
        await asyncio.wait([thread])
        if not thread.cancelled():
            thread.exception()  # seen: whatever it was, nobody waits for it
        raise
