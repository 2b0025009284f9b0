"""What the API may ask of the hosts of a mesh besides computing: how fast they would be, and how they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mesh.serve.examination import Examination
from mesh.serve.rehearsals import Rehearsals

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh.cluster.members import Members
    from mesh.cluster.ray_driver import RayDriver
    from mesh.serve.state import MeshState


class Inspection:
    """Looks into hosts while the mesh goes on with its work.

    Args:
        driver: Starts processes on hosts.
        members: Hosts.
        state: Knows which files hosts should have.
    """

    def __init__(self, driver: RayDriver, members: Members, state: MeshState) -> None:
        self._rehearsals = Rehearsals(driver, members)
        self._examination = Examination(driver, members)
        self._state = state

    async def rehearse(self, wanted: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """See `Rehearsals.run`."""
        return await self._rehearsals.run(wanted)

    async def examine(self) -> list[dict[str, Any]]:
        """See `Examination.run`."""
        files: dict[str, list[str]] = {}
        fleet = self._state.fleet
        handles = () if fleet is None else (*fleet.handles, *fleet.copies)
        for handle in handles:
            if handle.config.whole is None:
                files.setdefault(handle.member.name, []).append(handle.config.sha256)
        return await self._examination.run({host: sorted(set(hashes)) for host, hashes in files.items()})
