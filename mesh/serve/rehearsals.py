"""Hosts of a mesh rehearse stages of a model that they do not hold: what `mesh plan` asks for."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any, Final

import structlog

from mesh.cluster.ray_driver import result_of
from spanmesh_proto.errors import MeshError, StageFailed
from stages.host.profiler import Rehearsal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh.cluster.members import Members
    from mesh.cluster.ray_driver import RayDriver

log = structlog.get_logger()

# A process starts within a few seconds; a part of a stage is loaded and timed within a few more.
_PATIENCE_S: Final = 90.0


class Rehearsals:
    """One at a time, and of one host after the other: hosts may share what limits them.

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
            wanted: By host, orders as `RehearsalOrder.as_dict` gives them.

        Returns:
            For each host its timings in the same order, or why there are none; fit for JSON.
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
        """Its actor; None if the host is not there."""
        member = self._members.find(host)
        if member is None or not member.is_ready:
            return None
        try:
            name = f"rehearsal on {host} {secrets.token_hex(4)}"
            return await self._driver.create(Rehearsal, ray_node_name=member.ray_node_name, name=name)
        except MeshError as error:
            log.warning("rehearsal_failed", host=host, reason=error.message)
            return None

    async def _on(self, host: str, actor: Any, orders: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        try:
            if actor is None:
                raise StageFailed(f"host {host} is not in the mesh, or not ready")
            async with asyncio.timeout(_PATIENCE_S):
                timings = [await result_of(actor.rehearse.remote(dict(order)), host) for order in orders]
        except TimeoutError:
            failure = f"{host} did not finish within {_PATIENCE_S:g} s"
        except MeshError as error:
            failure = error.message
        else:
            log.info("rehearsed", host=host, row_ms=[round(timing["row_ms"], 3) for timing in timings])
            return {"host": host, "timings": timings, "failure": None}
        log.warning("rehearsal_failed", host=host, reason=failure)
        return {"host": host, "timings": [], "failure": failure}
