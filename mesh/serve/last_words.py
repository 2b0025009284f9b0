"""Finds out what a stage's process said before it crashed, on the host where it ran."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Self

import structlog

from mesh.cluster.ray_driver import result_of
from spanmesh_proto.errors import MeshError
from stages.host.crash_log import WordReader

if TYPE_CHECKING:
    from mesh.cluster.members import Member
    from mesh.cluster.ray_driver import RayDriver
    from mesh.serve.incidents import Failure, Incidents
    from mesh.serve.stage_handle import StageLoss

log = structlog.get_logger()

# The repair comes first: it needs the processor.
_DELAY_S: Final = 3.0
_PATIENCE_S: Final = 20.0


class LastWords:
    """Looks them up in the background while in the block.

    Args:
        driver: Places a reader on the host.
    """

    def __init__(self, driver: RayDriver) -> None:
        self._driver = driver
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def look_up(self, incidents: Incidents, failure: Failure, loss: StageLoss, member: Member) -> None:
        """Add them to what is known of a failure, if its process is gone and its host is not.

        Args:
            incidents: Where the failure is noted.
            failure: Which.
            loss: Names the process.
            member: The host.
        """
        if loss.pid is not None:
            task = asyncio.create_task(self._look_up(incidents, failure, loss.pid, member))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _look_up(self, incidents: Incidents, failure: Failure, pid: int, member: Member) -> None:
        await asyncio.sleep(_DELAY_S)
        words, reader = None, None
        try:
            async with asyncio.timeout(_PATIENCE_S):
                reader = await self._driver.create(WordReader, ray_node_name=member.ray_node_name)
                words = await result_of(reader.last_words.remote(pid), f"the reader on {member.name}")
        except (MeshError, TimeoutError) as error:
            log.info("no_last_words", host=member.name, reason=str(error) or "it took too long")
        finally:
            if reader is not None:
                self._driver.kill(reader)
        if words:
            log.error("stage_crashed", host=member.name, layers=failure.layers, last_words=words)
            incidents.explain(failure, words)
