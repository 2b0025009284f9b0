"""Room for one more model: whether it fits once some others are unloaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mesh.placement.host_capacity import in_one_kind
from mesh.serve.planning import plan_in_thread
from mesh.serve.preflight import placed
from mesh.serve.served_model import checked_load
from spanmesh_proto.errors import ModelDoesNotFit, NotEnoughHosts
from stages.gguf import part_paths
from stages.units import format_size
from stages.weights.hashing import stamps_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from mesh.options.host import HeadOptions
    from mesh.options.model import LoadRequest
    from mesh.serve.allocations import HostAllocations
    from mesh.serve.head import Head
    from mesh.serve.preflight import Preflight
    from mesh.serve.served_model import ServedModel
    from spanmesh_proto.errors import MeshError


class RoomCheck:
    """Tries the planner on memory as it would be.

    Args:
        first: The model that `mesh serve` was started with.
        head: The open head.
        allocations: Allocations of all models.
    """

    def __init__(self, first: ServedModel, head: Head, allocations: HostAllocations) -> None:
        self._first = first
        self._head = head
        self._allocations = allocations
        # The latest: several questions follow one another about the same model.
        self._checked: tuple[object, tuple[HeadOptions, Preflight]] | None = None

    def layout(self) -> object:
        """State that answers depend on: they hold as long as it is equal."""
        return (
            tuple((member.ray_node_name, member.facts) for member in self._head.members.ready),
            tuple(
                (
                    each.name,
                    each.draft_bytes,
                    each.request_bytes,
                    each.pipeline.placements,
                    each.pipeline.intended,
                )
                for each in self._allocations
            ),
        )

    async def shortage(self, load_request: LoadRequest, gone: Collection[str]) -> MeshError | None:
        """Reason why a model does not fit, with the memory that is missing; None if it fits.

        Args:
            load_request: Options of the model.
            gone: Names of models that are unloaded by then.

        Raises:
            ModelError: If its file is no model that can be served with these options.
            ClusterError: If options contradict the model.
        """
        options, known = await self._known(load_request)
        own, facts = self._head.own, self._first.known.facts
        left_bytes = (
            facts.memory_bytes - self._allocations.held_bytes(own, without=gone) - known.request_bytes
        )
        if known.draft_bytes and known.draft_bytes > left_bytes:
            return ModelDoesNotFit(
                f"{load_request.served_name} does not fit: its draft model needs"
                f" {format_size(known.draft_bytes)} of {own.name}; free are {format_size(max(0, left_bytes))}"
            )
        hosts = [
            self._allocations.capacity_without(
                member, gone, draft_bytes=known.draft_bytes, request_bytes=known.request_bytes
            )
            for member in self._head.members.ready
        ]
        if options.exact:
            hosts = list(in_one_kind(hosts))
        try:
            await plan_in_thread(lambda is_time_up: placed(options, known, hosts, is_time_up=is_time_up))
        except (ModelDoesNotFit, NotEnoughHosts) as error:
            return error
        return None

    async def _known(self, load_request: LoadRequest) -> tuple[HeadOptions, Preflight]:
        key = (load_request, stamps_of(part_paths(Path(load_request.model))))
        if self._checked is None or self._checked[0] != key:
            self._checked = (key, await checked_load(load_request, self._first))
        return self._checked[1]
