"""Finding out what the plan's stages are made of, with progress, and without outliving Ctrl-C."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mesh.util.progress import progress_bars
from stages.cancellable_work import CancellableWork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from mesh.util.progress import ProgressTask
    from stages.layers import LayerRange
    from stages.weights.recipe import Recipe
    from stages.weights.stage_cache import StageCache


async def describe_stages(cache: StageCache, model: Path, parts: Sequence[LayerRange]) -> tuple[Recipe, ...]:
    """The recipes of these layers, one after the other; what was hashed before takes no time.

    Raises:
        ModelError: See `StageCache.describe`.
    """
    recipes = []
    with progress_bars() as bars:
        for layers in parts:
            bar = bars.add(f"hashing layers {layers}")
            recipes.append(await _described(partial(cache.describe, model, layers), bar))
    return tuple(recipes)


async def _described(work: Callable[..., Recipe], bar: ProgressTask) -> Recipe:
    hashing = CancellableWork()

    def on_bytes(done_bytes: int, total_bytes: int) -> None:
        hashing.check()
        bar(done_bytes / total_bytes if total_bytes else 1.0)

    return await hashing.run(partial(work, progress=on_bytes))
