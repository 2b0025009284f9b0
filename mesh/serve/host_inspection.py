"""Host inspection: health reports and stage timings, measured by the hosts themselves."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

import structlog

from mesh.cluster.ray_driver import result_of
from spanmesh_proto.errors import MeshError, StageFailed
from stages.host.host_report import HostReporter
from stages.host.profiler import StageProfiler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mesh.cluster.members import Member, Members
    from mesh.cluster.ray_driver import RayDriver
    from mesh.serve.pipeline import Pipeline

# Files are read whole: minutes for large stages on slow disks.
_EXAMINATION_PATIENCE_S: Final = 600.0
_NUM_CLOCKS: Final = 5
# A process starts within a few seconds; a part of a stage is loaded and timed within a few more.
_PROFILE_PATIENCE_S: Final = 90.0

log = structlog.get_logger()


class HostReports:
    """Reports of all hosts, made at the same time.

    Args:
        driver: Starts a process on a host.
        members: Hosts.
    """

    def __init__(self, driver: RayDriver, members: Members) -> None:
        self._driver = driver
        self._members = members
        self._turn = asyncio.Lock()

    async def run(self, files: dict[str, Sequence[str]]) -> list[dict[str, Any]]:
        """Have every ready host report.

        Args:
            files: By host, sha256 digests of its expected stage files.

        Returns:
            For each host its report, with the offset of its clock from this one's and the error of that, both
            in milliseconds; or the reason why there is none. JSON-serialisable.
        """
        async with self._turn:
            ready = [member for member in self._members if member.is_ready]
            return list(
                await asyncio.gather(*(self._of(member, files.get(member.name, ())) for member in ready))
            )

    async def _of(self, member: Member, files: Sequence[str]) -> dict[str, Any]:
        actor: Any = None
        try:
            async with asyncio.timeout(_EXAMINATION_PATIENCE_S):
                name = f"look at {member.name} {secrets.token_hex(4)}"
                actor = await self._driver.create(HostReporter, ray_node_name=member.ray_node_name, name=name)
                found = await result_of(actor.report.remote(list(files)), member.name)
                ahead_ms, within_ms = await _clock(actor, member.name)
        except TimeoutError:
            failure = f"{member.name} did not finish within {_EXAMINATION_PATIENCE_S:g} s"
        except MeshError as error:
            failure = error.message
        else:
            return {
                "host": member.name,
                "look": found,
                "clock_ahead_ms": ahead_ms,
                "clock_within_ms": within_ms,
                "failure": None,
            }
        finally:
            if actor is not None:
                self._driver.kill(actor)
        log.warning("host_not_examined", host=member.name, reason=failure)
        return {"host": member.name, "look": None, "failure": failure}


class StageProfiles:
    """Timings of stages, one host after the other: hosts may share what limits them.

    Args:
        driver: Starts a process on a host.
        members: Hosts.
    """

    def __init__(self, driver: RayDriver, members: Members) -> None:
        self._driver = driver
        self._members = members
        self._turn = asyncio.Lock()

    async def run(self, wanted: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """Time stages.

        Args:
            wanted: By host, requests as `ProfileRequest.as_dict` returns them.

        Returns:
            For each host its timings in the same order, or the reason why there are none; JSON-serialisable.
        """
        async with self._turn:
            actors = dict(zip(wanted, await asyncio.gather(*map(self._start, wanted)), strict=True))
            try:
                return [await self._on(host, actors[host], orders) for host, orders in wanted.items()]
            finally:
                for actor in actors.values():
                    if actor is not None:
                        self._driver.kill(actor)

    async def _start(self, host: str) -> Any:
        """Actor on the host; None if the host is not a member."""
        member = self._members.find(host)
        if member is None or not member.is_ready:
            return None
        try:
            name = f"rehearsal on {host} {secrets.token_hex(4)}"
            return await self._driver.create(StageProfiler, ray_node_name=member.ray_node_name, name=name)
        except MeshError as error:
            log.warning("rehearsal_failed", host=host, reason=error.message)
            return None

    async def _on(self, host: str, actor: Any, orders: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        try:
            if actor is None:
                raise StageFailed(f"host {host} is not in the mesh, or not ready")
            async with asyncio.timeout(_PROFILE_PATIENCE_S):
                timings = [await result_of(actor.profile.remote(dict(order)), host) for order in orders]
        except TimeoutError:
            failure = f"{host} did not finish within {_PROFILE_PATIENCE_S:g} s"
        except MeshError as error:
            failure = error.message
        else:
            log.info("rehearsed", host=host, row_ms=[round(timing["row_ms"], 3) for timing in timings])
            return {"host": host, "timings": timings, "failure": None}
        log.warning("rehearsal_failed", host=host, reason=failure)
        return {"host": host, "timings": [], "failure": failure}


class Inspection:
    """Inspection of hosts while the mesh serves.

    Args:
        driver: Starts processes on hosts.
        members: Hosts.
        pipelines: Returns the pipelines of all models, whose stage files hosts should have.
    """

    def __init__(
        self, driver: RayDriver, members: Members, pipelines: Callable[[], Iterable[Pipeline]]
    ) -> None:
        self._profiles = StageProfiles(driver, members)
        self._host_reports = HostReports(driver, members)
        self._pipelines = pipelines

    async def rehearse(self, wanted: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """See `StageProfiles.run`."""
        return await self._profiles.run(wanted)

    async def examine(self) -> list[dict[str, Any]]:
        """See `HostReports.run`."""
        files: dict[str, list[str]] = {}
        for pipeline in self._pipelines():
            for handle in (*pipeline.handles, *pipeline.replicas):
                if handle.config.whole is None:
                    files.setdefault(handle.member.name, []).append(handle.config.sha256)
        return await self._host_reports.run({host: sorted(set(hashes)) for host, hashes in files.items()})


async def _clock(actor: Any, host: str) -> tuple[float, float]:
    """Offset of the host's clock, by the quickest of some queries, and half its round trip: the error."""
    asked = []
    for _ in range(_NUM_CLOCKS):
        before_s, start_s = time.time(), time.perf_counter()
        there_s = await result_of(actor.clock_s.remote(), host)
        took_s = time.perf_counter() - start_s
        asked.append((took_s / 2, there_s - before_s - took_s / 2))
    doubt_s, ahead_s = min(asked)
    return ahead_s * 1e3, doubt_s * 1e3
