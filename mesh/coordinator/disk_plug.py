"""Prefixes on the stages' disks, as a plug of the coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh.coordinator.disk_prefixes import BLOCK_POSITIONS, DiskHistory, DiskPrefixes
from mesh.coordinator.plugs import Plug
from mesh.coordinator.prefix_cache import PrefixMatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh.coordinator.plugs import NewRing
    from mesh.engine import GenerationRequest
    from mesh.status import MeshStatus
    from spanmesh_proto import windows_pb2 as wire


class DiskPlug(Plug):
    """Prefixes on disks of all rings.

    Args:
        has_windows: Whether some layers attend to a sliding window only. A prefix from disk lacks rows before
            the windows at its end, so its slot cannot go back further.
        block_positions: Positions of a block of KV rows.

    Attributes:
        prefixes: Those of the latest ring; None before the first.
    """

    def __init__(self, *, has_windows: bool = False, block_positions: int = BLOCK_POSITIONS) -> None:
        self.prefixes: DiskPrefixes | None = None
        self._has_windows = has_windows
        self._block_positions = block_positions
        # Whether slots can go back to any earlier position.
        self._can_trim = True
        self._history = DiskHistory()
        self._stats: Callable[[], Sequence[wire.StageStats | None]] = list

    def in_ring(self, new: NewRing) -> DiskPrefixes:
        """Blocks on the disks of a new ring's stages."""
        self._can_trim = new.options.can_trim
        self._stats = lambda: new.ring.latest_stats
        self.prefixes = DiskPrefixes(
            [stage.wire for stage in new.stages[:-1]],
            self._history,
            send=new.ring.fetch,
            clock_ms=new.clock_ms,
            can_trim=self._can_trim and not self._has_windows,
            block_positions=self._block_positions,
            is_first_ring=new.is_first,
        )
        return self.prefixes

    async def lengthened(self, match: PrefixMatch, request: GenerationRequest) -> PrefixMatch | None:
        """The cached prefix, or a longer one that the stages have read from their disks into memory."""
        disk, slot = self.prefixes, match.slot
        found = None if disk is None else disk.find(request.prompt, request.client, match.num_cached)
        if disk is None or found is None:
            return match
        fetch, num_positions = await disk.fetch(found)
        if num_positions > match.num_cached:
            disk.used(num_positions)
            checkpoints = () if self._can_trim else (num_positions,)
            floor = num_positions if self._has_windows and self._can_trim else 0
            return PrefixMatch(slot, slot, num_positions, checkpoints, fetch, floor)
        if fetch:
            disk.drop(fetch)
        return None

    def prefilled(self, num_positions: int, elapsed_ms: float) -> None:
        """Learn what computing costs, beside fetching."""
        self._history.computed(num_positions, elapsed_ms)

    def kept(
        self, request: GenerationRequest, computed: Sequence[int], return_points: Sequence[int]
    ) -> wire.Keep | None:
        """Blocks that the stages are to keep on disk."""
        if self.prefixes is None:
            return None
        return self.prefixes.keep(
            computed,
            request.client,
            # Slots that can be trimmed can be cut off there.
            return_points=(len(computed),) if self._can_trim else return_points,
            num_prompt=len(request.prompt),
        )

    def describe(self, status: MeshStatus) -> None:
        """Add counts of fetches and blocks; none if no stage keeps blocks."""
        status.kv_disk = None if self.prefixes is None else self.prefixes.status(self._stats())
