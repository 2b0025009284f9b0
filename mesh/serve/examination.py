"""Every host of a mesh looks at itself, and its clock is compared: what `mesh doctor` asks for."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

import structlog

from mesh.cluster.ray_driver import result_of
from spanmesh_proto.errors import MeshError
from stages.host.host_report import LookingHost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.cluster.members import Member, Members
    from mesh.cluster.ray_driver import RayDriver

log = structlog.get_logger()

# Files are read whole: minutes for large stages on slow disks.
_PATIENCE_S: Final = 600.0
_NUM_CLOCKS: Final = 5


class Examination:
    """Of all hosts at the same time.

    Args:
        driver: Starts a process on a host.
        members: Hosts.
    """

    def __init__(self, driver: RayDriver, members: Members) -> None:
        self._driver = driver
        self._members = members
        self._turn = asyncio.Lock()

    async def run(self, files: dict[str, Sequence[str]]) -> list[dict[str, Any]]:
        """Have every ready host look.

        Args:
            files: By host, sha256 of the stage files that it should have.

        Returns:
            For each host what it found, how far its clock is ahead of this one's, and how sure that is, both
            in milliseconds; or why it found nothing. Fit for JSON.
        """
        async with self._turn:
            ready = [member for member in self._members if member.is_ready]
            return list(
                await asyncio.gather(*(self._of(member, files.get(member.name, ())) for member in ready))
            )

    async def _of(self, member: Member, files: Sequence[str]) -> dict[str, Any]:
        actor: Any = None
        try:
            async with asyncio.timeout(_PATIENCE_S):
                name = f"look at {member.name} {secrets.token_hex(4)}"
                actor = await self._driver.create(LookingHost, ray_node_name=member.ray_node_name, name=name)
                found = await result_of(actor.look.remote(list(files)), member.name)
                ahead_ms, within_ms = await _clock(actor, member.name)
        except TimeoutError:
            failure = f"{member.name} did not finish within {_PATIENCE_S:g} s"
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


async def _clock(actor: Any, host: str) -> tuple[float, float]:
    """How far the host's clock is ahead, by the quickest of some questions, and half its time: the doubt."""
    asked = []
    for _ in range(_NUM_CLOCKS):
        before_s, start_s = time.time(), time.perf_counter()
        there_s = await result_of(actor.clock_s.remote(), host)
        took_s = time.perf_counter() - start_s
        asked.append((took_s / 2, there_s - before_s - took_s / 2))
    doubt_s, ahead_s = min(asked)
    return ahead_s * 1e3, doubt_s * 1e3
