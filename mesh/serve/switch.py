"""From one ring to the next: stages are wired anew, the coordinator follows, what is left over ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mesh.serve.mesh_keys import new_mesh_keys
from mesh.serve.wiring import wire_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh.coordinator.coordinator import Coordinator
    from mesh.placement.planner import StagePlacement
    from mesh.serve.fleet import Fleet, Seat
    from mesh.serve.stage_handle import StageHandle
    from spanmesh_proto.errors import MeshError


class Switch:
    """Swaps rings.

    Args:
        fleet: Its seats become the new ring.
        coordinator: Sessions replay in it.
        term: Of the head.
        on_plan: Called with what is where now, and why.
    """

    def __init__(
        self,
        fleet: Fleet,
        coordinator: Coordinator,
        term: int,
        on_plan: Callable[[Sequence[StagePlacement], str], None],
    ) -> None:
        self._fleet = fleet
        self._coordinator = coordinator
        self._term = term
        self._on_plan = on_plan
        self._ending: set[asyncio.Task[None]] = set()

    async def to(
        self, seats: tuple[Seat, ...], reason: str, blame: Callable[[StageHandle, MeshError], None]
    ) -> None:
        """Go over to another ring, all of whose stages are loaded.

        Args:
            seats: The new ring. The fleet's from now on, even if this fails half-way.
            reason: For the log and the status.
            blame: See `wire_up`.

        Raises:
            MeshError: If a stage is gone or out of reach; sessions stay suspended.
        """
        before = self._fleet.handles
        self._fleet.seats, self._fleet.intended = seats, ()
        after = self._fleet.handles
        self._coordinator.pause(reason)
        try:
            keys = new_mesh_keys(self._term)
            addresses = await wire_up(seats, keys, blame)
            self._fleet.keys = keys
            await self._coordinator.reconnect(addresses, keys.mesh_id, keys.mesh_key)
        finally:
            for handle in before:
                if handle not in after:
                    self._end(handle)
        self._on_plan(self._fleet.placements, reason)

    def _end(self, handle: StageHandle) -> None:
        """Nobody waits for a stage that has nothing to do any more."""
        task = asyncio.create_task(handle.stop())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Wait for what is still ending."""
        await asyncio.gather(*self._ending)
