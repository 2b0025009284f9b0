"""What the API may ask of the hosts of a mesh besides computing: how fast they would be, and how they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mesh.serve.examination import Examination
from mesh.serve.rehearsals import Rehearsals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mesh.cluster.members import Members
    from mesh.cluster.ray_driver import RayDriver
    from mesh.serve.fleet import Fleet


class Inspection:
    """Looks into hosts while the mesh goes on with its work.

    Args:
        driver: Starts processes on hosts.
        members: Hosts.
        fleets: Gives those of all models: the files that hosts should have are theirs.
    """

    def __init__(self, driver: RayDriver, members: Members, fleets: Callable[[], Iterable[Fleet]]) -> None:
        self._rehearsals = Rehearsals(driver, members)
        self._examination = Examination(driver, members)
        self._fleets = fleets

    async def rehearse(self, wanted: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """See `Rehearsals.run`."""
        return await self._rehearsals.run(wanted)

    async def examine(self) -> list[dict[str, Any]]:
        """See `Examination.run`."""
        files: dict[str, list[str]] = {}
        for fleet in self._fleets():
            for handle in (*fleet.handles, *fleet.copies):
                if handle.config.whole is None:
                    files.setdefault(handle.member.name, []).append(handle.config.sha256)
        return await self._examination.run({host: sorted(set(hashes)) for host, hashes in files.items()})
