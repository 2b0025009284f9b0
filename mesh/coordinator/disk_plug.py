"""Prefixes on the stages' disks, as a plug of the coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh.coordinator.disk_prefixes import DiskHistory, DiskPrefixes
from mesh.coordinator.plugs import Plug
from mesh.coordinator.prefix_cache import PrefixMatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh.coordinator.options import CoordinatorOptions
    from mesh.coordinator.plugs import NewRing
    from mesh.engine import GenerationRequest
    from mesh.status import MeshStatus
    from spanmesh_proto import windows_pb2 as wire


class DiskPlug(Plug):
    """Prefixes on disks of all rings.

    Args:
        options: Limits of sessions.
        clock_ms: Monotonic clock, milliseconds.

    Attributes:
        prefixes: Those of the latest ring; None before the first.
    """

    def __init__(self, options: CoordinatorOptions, clock_ms: Callable[[], float]) -> None:
        self.prefixes: DiskPrefixes | None = None
        self._options = options
        self._clock_ms = clock_ms
        self._history = DiskHistory()
        self._stats: Callable[[], Sequence[wire.StageStats | None]] = list

    def in_ring(self, new: NewRing) -> DiskPrefixes:
        """Blocks on the disks of a new ring's stages."""
        options = self._options
        self._stats = lambda: new.ring.latest_stats
        self.prefixes = DiskPrefixes(
            [stage.wire for stage in new.stages[:-1]],
            self._history,
            send=new.ring.fetch,
            clock_ms=self._clock_ms,
            can_trim=options.can_trim and not options.has_windows,
            block_positions=options.block_positions,
            is_first_ring=new.is_first,
        )
        return self.prefixes

    async def lengthened(self, match: PrefixMatch, request: GenerationRequest) -> PrefixMatch | None:
        """The cached prefix, or a longer one that the stages have read from their disks into memory."""
        disk, options, slot = self.prefixes, self._options, match.slot
        found = None if disk is None else disk.find(request.prompt, request.client, match.num_cached)
        if disk is None or found is None:
            return match
        fetch, num_positions = await disk.fetch(found)
        if num_positions > match.num_cached:
            disk.used(num_positions)
            checkpoints = () if options.can_trim else (num_positions,)
            floor = num_positions if options.has_windows and options.can_trim else 0
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
            return_points=(len(computed),) if self._options.can_trim else return_points,
            num_prompt=len(request.prompt),
        )

    def describe(self, status: MeshStatus) -> None:
        """Add counts of fetches and blocks; none if no stage keeps blocks."""
        status.kv_disk = None if self.prefixes is None else self.prefixes.status(self._stats())
