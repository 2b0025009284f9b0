"""Services of the head that the API offers: its hosts, its links, and models that are loaded by request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from spanmesh_proto.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from mesh.options.model import LoadRequest
    from mesh.status import TuningStatus
    from spanmesh_proto.errors import MeshError
    from stages.slicing.model_facts import ModelSummary

# Probes alone take about this long, over links of the length that a mesh can bear.
_RETRY_AFTER_S: Final = 5
# As long as `mesh top` waits for an answer; the probes of any key take less.
_TURN_S: Final = 60.0


class HostAdmin(Protocol):
    """Sends hosts away; see `mesh.serve.host_draining.HostDraining`."""

    async def drain(self, name: str) -> Mapping[str, Any]:
        """Have a host's layers moved, and let it go."""

    async def evict(self, name: str) -> Mapping[str, Any]:
        """Cut a host off at once."""


class ModelAdmin(Protocol):
    """Loads models beside the first; see `mesh.serve.model_registry.ModelRegistry`."""

    async def load(self, load_request: LoadRequest) -> Mapping[str, Any]:
        """Serve a model beside those that are served."""

    async def unload(self, name: str, wait_s: float) -> Mapping[str, Any]:
        """Serve a model no more."""


@dataclass(frozen=True)
class LibraryModel:
    """A model that a request may have loaded."""

    name: str
    """Model name in requests."""
    phase: Literal["unloaded", "waiting", "loading", "loaded", "unloading"]
    """Whether it answers; `waiting` if a request waits for other models to make room."""
    created: int
    """Last change of its file, Unix seconds."""
    context_length: int
    """Positions of a session, once it is loaded."""
    summary: ModelSummary
    """What its files say."""
    projector: str | None = None
    """Name of the file with which it reads pictures; None for text only."""

    @property
    def size_bytes(self) -> int:
        """Size of its files."""
        return self.summary.file_bytes


class ModelLease(Protocol):
    """One request's use of a model, and its right: until its release the model is not unloaded for others."""

    async def loaded(self, *, is_bounded: bool) -> None:
        """Return once the model answers; have it loaded if it is not, and if the request may have that done.

        Args:
            is_bounded: Whether the wait has a limit: the client hears nothing meanwhile.

        Raises:
            ClusterError: If it does not fit for now, or loading it fails or takes longer.
            Overloaded: If too many requests wait for it.
            MeshError: If its file cannot be served; the refusal of a request that may not have it loaded,
                once it is not loading for others.
        """

    def release(self) -> None:
        """End the use; later calls have no effect."""


class OnDemandModels(Protocol):
    """Loads models for requests; see `mesh.serve.on_demand.loader.OnDemandLoader`."""

    @property
    def reads_pictures(self) -> bool:
        """Whether any of them reads pictures, as of the latest look."""

    async def models(self, *, is_glance: bool = False) -> Sequence[LibraryModel]:
        """All models of the library, by name.

        Args:
            is_glance: Whether files may be missing that are new: for those who look every second.
        """

    async def find(self, name: str) -> LibraryModel | None:
        """The model of the library that has this name."""

    def answers(self, name: str) -> bool:
        """Whether a model answers that no order and no other model is about to unload."""

    def lease(self, name: str, client: str | None, *, refusal: MeshError | None = None) -> ModelLease:
        """Begin the use of a model; taken at once, before anything is awaited.

        Args:
            name: Name of the model.
            client: Identity of the API key; None where the API is open.
            refusal: Error for a request that may not have the model loaded; None if it may.
        """

    def forget(self, clients: Collection[str]) -> None:
        """End the requests of removed keys that wait for a model: none is loaded for them."""

    def describe(self, name: str) -> Mapping[str, Any]:
        """Stages of a model that answers, as `ModelAdmin.load` returns them."""


class DrafterAdmin(Protocol):
    """Tunes drafters in the background; see `mesh.serve.background_tuning.BackgroundTuning`."""

    async def go_back(self) -> TuningStatus:
        """Serve the group with the drafter before, and never again with that of now."""


class HostInspection(Protocol):
    """Inspects hosts; see `mesh.serve.host_inspection.Inspection`."""

    async def rehearse(
        self, wanted: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> Sequence[Mapping[str, Any]]:
        """Have hosts time blank stages."""

    async def examine(self) -> Sequence[Mapping[str, Any]]:
        """Have every host look at itself."""


class LinkMeasurement(Protocol):
    """Measures links; see `mesh.serve.status.measured_links`."""

    async def __call__(
        self, num_probes: int, bulk_bytes: int, *, checks_ports: bool = False
    ) -> Mapping[str, Any]:
        """Measurements, JSON-serialisable."""


class LinkRuns:
    """Measures links for one client at a time, in the order in which they ask.

    A client has one run under way or waiting, so that none keeps others from measuring.

    Args:
        measure: Measures them.
        patience_s: Longest wait for the runs of others.
    """

    def __init__(self, measure: LinkMeasurement, patience_s: float = _TURN_S) -> None:
        self._measure = measure
        self._patience_s = patience_s
        # asyncio's lock is given to those who wait in the order of their arrival.
        self._turn = asyncio.Lock()
        self._clients: set[str | None] = set()

    async def run(
        self, num_probes: int, bulk_bytes: int, client: str | None, *, checks_ports: bool = False
    ) -> Mapping[str, Any]:
        """Measurements. Being cancelled ends it.

        Args:
            num_probes: Round trips of each size on each link.
            bulk_bytes: Sent over each link to find its bandwidth; 0 leaves that out.
            client: Identity of the API key; None where the API is open.
            checks_ports: Whether hosts also try ports of each other's ranges.

        Raises:
            Overloaded: If another run of the client is not over, or runs of others take too long.
        """
        if client in self._clients:
            raise _busy()
        self._clients.add(client)
        try:
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._turn.acquire()
            except TimeoutError:
                raise _busy() from None
            try:
                return await self._measure(num_probes, bulk_bytes, checks_ports=checks_ports)
            finally:
                self._turn.release()
        finally:
            self._clients.discard(client)


def _busy() -> Overloaded:
    return Overloaded(
        "another client is measuring the links, and two measurements at once would disturb each other: try"
        f" again in {_RETRY_AFTER_S} s",
        retry_after_s=_RETRY_AFTER_S,
    )
