"""Recent failures and recoveries, and the error output of crashed processes."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self, TypeAlias

import structlog

from mesh.cluster.ray_driver import result_of
from mesh.status import FailureStatus, RepairStatus
from spanmesh_proto.errors import MeshError
from stages.host.crash_log import CrashLogReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.cluster.members import Member
    from mesh.cluster.ray_driver import RayDriver
    from mesh.serve.stage_handle import StageLoss

_MOST_FAILURES: Final = 20
# The recovery comes first: it needs the processor.
_DELAY_S: Final = 3.0
_PATIENCE_S: Final = 20.0

log = structlog.get_logger()

# Called with each lost stage, and the host of its process.
OnFailure: TypeAlias = "Callable[[FailureStatus, StageLoss, Member], None]"


class Incidents:
    """The latest failures, and counts of recoveries.

    Args:
        clock_s: Wall clock, Unix seconds.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._failures: deque[FailureStatus] = deque(maxlen=_MOST_FAILURES)
        self._num_losses = 0
        self._num_repairs = 0
        self._num_moves = 0
        self._last_repair_s: float | None = None

    def failed(self, host: str, layers: str, reason: str) -> FailureStatus:
        """Record a lost stage."""
        failure = FailureStatus(at_s=self._clock_s(), host=host, layers=layers, reason=reason)
        self._failures.append(failure)
        self._num_losses += 1
        return failure

    def explain(self, failure: FailureStatus, more: str) -> None:
        """Add to the reason of a failure, unless it was dropped for later ones."""
        explained = replace(failure, reason=f"{failure.reason}: {more}")
        self._failures = deque(
            (explained if each is failure else each for each in self._failures), maxlen=_MOST_FAILURES
        )

    def repaired(self, took_s: float) -> None:
        """Record a recovery, and for how long the ring was down."""
        self._num_repairs += 1
        self._last_repair_s = took_s

    def moved(self) -> None:
        """Record a planned move of layers between hosts."""
        self._num_moves += 1

    @property
    def failures(self) -> tuple[FailureStatus, ...]:
        """The latest failures, the last one last."""
        return tuple(self._failures)

    @property
    def repairs(self) -> RepairStatus:
        """Counts of losses and recoveries."""
        return RepairStatus(
            losses=self._num_losses,
            count=self._num_repairs,
            last_s=None if self._last_repair_s is None else round(self._last_repair_s, 3),
            moves=self._num_moves,
        )


class CrashLogs:
    """Error output of crashed processes, read in the background while in the block.

    Args:
        driver: Starts a reader on the host.
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

    def collect(self, incidents: Incidents, failure: FailureStatus, loss: StageLoss, member: Member) -> None:
        """Add the error output to a failure, if its process is gone and its host is not.

        Args:
            incidents: Record of the failure.
            failure: The failure.
            loss: Loss with the process id.
            member: Host of the process.
        """
        if loss.pid is not None:
            task = asyncio.create_task(self._collect(incidents, failure, loss.pid, member))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _collect(self, incidents: Incidents, failure: FailureStatus, pid: int, member: Member) -> None:
        await asyncio.sleep(_DELAY_S)
        message, reader = None, None
        try:
            async with asyncio.timeout(_PATIENCE_S):
                reader = await self._driver.create(CrashLogReader, ray_node_name=member.ray_node_name)
                message = await result_of(
                    reader.crash_message.remote(pid), f"the disk reader on {member.name}"
                )
        except (MeshError, TimeoutError) as error:
            log.info("no_last_words", host=member.name, reason=str(error) or "it took too long")
        finally:
            if reader is not None:
                self._driver.kill(reader)
        if message:
            log.error("stage_crashed", host=member.name, layers=failure.layers, last_words=message)
            incidents.explain(failure, message)
