"""Stages are started and loaded, all at once."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mesh.serve.blame import all_at_once, blaming
from mesh.util.progress import progress_bars

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.serve.blame import Blame
    from mesh.serve.stage_handle import StageHandle


async def load_all(handles: Sequence[StageHandle], blame: Blame) -> None:
    """Place and load stages, all at once, with progress.

    Args:
        handles: The stages.
        blame: Called with each that failed, and why.

    Raises:
        ModelDoesNotFit: If a host has too little memory left; nothing is loaded then.
        MeshError: What the first stage that failed says.
    """
    await all_at_once(blaming(handle.place, handle, blame) for handle in handles)
    await all_at_once(blaming(handle.check_memory, handle, blame) for handle in handles)
    with progress_bars() as bars:
        await all_at_once(
            blaming(partial(handle.load, bars.add(f"{handle.who}: waiting")), handle, blame)
            for handle in handles
        )
