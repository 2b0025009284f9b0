"""Group operations on stages: loading, wiring, and attribution of errors to stages."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from mesh.util.terminal import progress_bars
from spanmesh_proto.errors import MeshError, StageFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from mesh.coordinator.ring import StageAddress
    from mesh.serve.pipeline import PipelineStage
    from mesh.serve.stage_handle import RingCredentials, StageHandle
    from stages.transport.hidden_codec import HiddenType

    OnStageError = Callable[[StageHandle, MeshError], None]


log = structlog.get_logger()


def log_stage_error(handle: StageHandle, error: MeshError) -> None:
    """Log which stage failed; for callers that need nothing else."""
    layers = str(handle.config.layers)
    log.warning("stage_in_trouble", host=handle.member.name, layers=layers, reason=error.message)


async def attributing(
    work: Callable[[], Coroutine[Any, Any, None]], handle: StageHandle, on_stage_error: OnStageError
) -> None:
    """Do work for a stage; if it fails, report the stage.

    Args:
        work: Returns the awaitable. A coroutine made before would never be awaited if this is cancelled
            before it begins, and Python would print a warning.
        handle: The stage.
        on_stage_error: Called with it and the error.
    """
    try:
        await work()
    except MeshError as error:
        on_stage_error(handle, error)
        raise


async def run_concurrently(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all at once; the first failure ends the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def load_all(handles: Sequence[StageHandle], on_stage_error: OnStageError) -> None:
    """Start and load stages, all at once, with progress.

    Args:
        handles: The stages.
        on_stage_error: Called with each stage that failed, and the error.

    Raises:
        ModelDoesNotFit: If a host has too little memory left; nothing is loaded then.
        MeshError: Error of the first stage that failed.
    """
    await run_concurrently(attributing(handle.place, handle, on_stage_error) for handle in handles)
    await run_concurrently(attributing(handle.check_memory, handle, on_stage_error) for handle in handles)
    with progress_bars() as bars:
        await run_concurrently(
            attributing(partial(handle.load, bars.add(f"{handle.who}: waiting")), handle, on_stage_error)
            for handle in handles
        )


async def wire_up(
    stages: Sequence[PipelineStage], credentials: RingCredentials, on_stage_error: OnStageError
) -> tuple[StageAddress, ...]:
    """Connect loaded stages to a ring, each linked to the next.

    Args:
        stages: In pipeline order.
        credentials: Keys of the new ring.
        on_stage_error: Called with each stage that did not answer, or that the stage before it could not
            reach, and the error.

    Returns:
        Addresses of the stages, in pipeline order.

    Raises:
        MeshError: If a stage does not answer, or cannot reach the next.
    """
    handles = [stage.handle for stage in stages if stage.handle is not None]
    if len(handles) < len(stages):
        raise StageFailed("a stage of the ring was lost before it was wired")
    await run_concurrently(
        attributing(partial(_enter, handle, index, credentials, stage.wire), handle, on_stage_error)
        for index, (handle, stage) in enumerate(zip(handles, stages, strict=True))
    )
    await run_concurrently(
        attributing(partial(handle.connect, following), following, on_stage_error)
        for handle, following in itertools.pairwise(handles)
    )
    return tuple(handle.address for handle in handles)


async def _enter(handle: StageHandle, index: int, credentials: RingCredentials, wire: HiddenType) -> None:
    await handle.serve()
    await handle.rejoin(index, credentials, wire)
