"""The last requests of a model that is unloaded."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import structlog

from spanmesh_proto.errors import ModelNotFound, StageFailed

if TYPE_CHECKING:
    from mesh.serve.served_model import ServedModel

log = structlog.get_logger()

_LOOK_S: Final = 0.1


async def drained(model: ServedModel, wait_s: float) -> int:
    """Let requests end, and turn away whatever comes after.

    Args:
        model: The API finds it no more.
        wait_s: How long they have, in seconds.

    Returns:
        How many did not end in time, and had to.
    """
    name, engine = model.name, model.engine
    coordinator = engine.coordinator
    if coordinator is None:
        return 0
    deadline_s = time.monotonic() + wait_s
    while (num_left := coordinator.num_requests) and time.monotonic() < deadline_s:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)
    if num_left:
        log.warning("requests_ended", model=name, requests=num_left, after_s=wait_s)
    # Some may have found the model a moment before it was gone.
    engine.ended = ModelNotFound(f"the model `{name}` was unloaded", param="model")
    coordinator.give_up(StageFailed(f"the model {name} was unloaded"))
    return num_left
