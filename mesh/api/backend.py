"""Backend of the endpoints, and backends by model name."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Protocol

from mesh.api.request_parsing import UnknownFields
from mesh.api.response_store import ResponseStore
from mesh.metrics.request_metrics import ObservedEngine, RequestStatistics
from mesh.metrics.tracing import current_span
from mesh.text.chat_template import chat_template_of
from spanmesh_proto.errors import ClusterError, InvalidRequest, ModelNotFound, Overloaded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from starlette.requests import Request

    from mesh.engine import Engine
    from mesh.text.chat_template import ChatTemplate
    from mesh.text.tokenizer import Tokenizer
    from spanmesh_proto.errors import MeshError


# Probes alone take about this long, over links of the length that a mesh can bear.
_RETRY_AFTER_S: Final = 5

DEFAULT_MODEL: Final = "default"


class HostAdmin(Protocol):
    """What sends hosts away; see `mesh.serve.host_draining.HostDraining`."""

    async def drain(self, name: str) -> Mapping[str, Any]:
        """Have a host's layers moved, and let it go."""

    async def evict(self, name: str) -> Mapping[str, Any]:
        """Cut a host off at once."""


class ModelAdmin(Protocol):
    """What loads models beside the first; see `mesh.serve.model_registry.ModelRegistry`."""

    async def load(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Serve a model beside those that are served."""

    async def unload(self, name: str, wait_s: float) -> Mapping[str, Any]:
        """Serve a model no more."""


class HostInspection(Protocol):
    """What looks into hosts; see `mesh.serve.host_inspection.Inspection`."""

    async def rehearse(
        self, wanted: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> Sequence[Mapping[str, Any]]:
        """Have hosts time blank stages."""

    async def examine(self) -> Sequence[Mapping[str, Any]]:
        """Have every host look at itself."""


@dataclass(frozen=True)
class Backend:
    """One served model.

    Attributes:
        engine: Answers token ids with token ids.
        tokenizer: The model's own.
        chat_template: The model's own, or what stands in for it.
        model_id: The id that clients see; they may also say `default`.
        created: When the model was loaded, Unix seconds.
        fingerprint: What runs here, for clients that compare answers.
        status: What `/mesh/status` answers.
        ready: Whether requests can be answered yet.
        is_whole: Whether they can be answered at once. While a lost stage is replaced they wait, and may
            still be refused.
        refusal: Why none are answered for now, if somebody knows.
        now_s: Unix seconds.
        num_slots: Answers that it makes at once, or None if that is not known.
        steady_s: A steady clock, in seconds.
        random_bits: Random numbers of so many bits: ids and seeds.
        ping_interval_s: A stream that has been silent this long sends a comment.
        stage_counts: What the stages themselves count, in order; none where there are none.
        link_runs: Measures the links between hosts; None without hosts.
        host_admin: Gives what sends hosts away; None while, or where, there are none.
        inspection: Gives what looks into hosts; likewise.
        model_admin: Gives what loads models beside the first; likewise.
        statistics: Of requests, for `/metrics`.
        closing: Set when the server shuts down; open answers end at once.
        unknown_fields: Which field names were logged.
        responses: Those that are kept for later requests.
    """

    engine: Engine
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    model_id: str
    created: int
    fingerprint: str
    status: Callable[[], Mapping[str, Any]]
    ready: Callable[[], bool]
    now_s: Callable[[], float]
    random_bits: Callable[[int], int]
    ping_interval_s: float
    num_slots: int | None = None
    steady_s: Callable[[], float] = time.monotonic
    is_whole: Callable[[], bool] = lambda: True
    refusal: Callable[[], MeshError | None] = lambda: None
    stage_counts: Callable[[], Awaitable[Sequence[Mapping[str, Any]]]] | None = None
    link_runs: LinkRuns | None = None
    host_admin: Callable[[], HostAdmin | None] = lambda: None
    inspection: Callable[[], HostInspection | None] = lambda: None
    model_admin: Callable[[], ModelAdmin | None] = lambda: None
    statistics: RequestStatistics = field(default_factory=RequestStatistics)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    responses: ResponseStore = field(default_factory=ResponseStore)

    def require_ready(self) -> None:
        """Check that requests can be answered.

        Raises:
            ClusterError: While the model is loading, or hosts for it are missing.
        """
        if (refusal := self.refusal()) is not None:
            raise refusal
        if not self.ready():
            raise ClusterError("the model is still loading: try again in a moment", retry_after_s=2)


class LinkRuns:
    """Measures links for one client at a time.

    Args:
        measure: Given round trips and bytes.
    """

    def __init__(self, measure: Callable[[int, int], Awaitable[Mapping[str, Any]]]) -> None:
        self._measure = measure
        self._is_running = False

    async def run(self, num_probes: int, bulk_bytes: int) -> Mapping[str, Any]:
        """What was measured. Being cancelled ends it.

        Args:
            num_probes: Round trips of each size on each link.
            bulk_bytes: Sent over each link to find its bandwidth; 0 leaves that out.

        Raises:
            Overloaded: If another run is not over.
        """
        if self._is_running:
            raise Overloaded(
                "the links are being measured for another client, and two at once would measure each other:"
                f" try again in {_RETRY_AFTER_S} s",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._is_running = True
        try:
            return await self._measure(num_probes, bulk_bytes)
        finally:
            self._is_running = False


class Backends:
    """One for each model, the first of which is there for as long as the server.

    Args:
        first: What requests mean that name no model.
    """

    def __init__(self, first: Backend) -> None:
        self.first = first
        self._others: dict[str, Backend] = {}

    def __iter__(self) -> Iterator[Backend]:
        """All, the first one first."""
        return iter((self.first, *self._others.values()))

    @property
    def context_length(self) -> int:
        """Positions of the longest sessions: a body is read before it is known which model it is for."""
        return max(backend.engine.context_length for backend in self)

    @property
    def unknown_fields(self) -> UnknownFields:
        """Which field names were logged, whichever model they were for."""
        return self.first.unknown_fields

    def add(self, backend: Backend) -> None:
        """Answer for one more.

        Raises:
            InvalidRequest: If another has its name.
        """
        name = backend.model_id
        if name == self.first.model_id or name in self._others:
            raise InvalidRequest(f"a model is served as {name!r} already", param="name")
        self._others[name] = backend

    def remove(self, name: str) -> None:
        """Answer for one no more; does nothing if it is not there, or the first."""
        self._others.pop(name, None)

    def named(self, name: str | None) -> Backend:
        """The model that a request means: one that names none means the first.

        Raises:
            ModelNotFound: Naming those that are served.
        """
        if name in {None, DEFAULT_MODEL, self.first.model_id}:
            return self.first
        found = self._others.get(name or "")
        if found is None:
            served = ", ".join(f"`{backend.model_id}`" for backend in self)
            raise ModelNotFound(
                f"the model `{name}` is not served here: use {served} or `{DEFAULT_MODEL}`", param="model"
            )
        return found

    def ready(self, name: str | None) -> Backend:
        """The model that a request means, if it answers now.

        Raises:
            ClusterError: While it is loading, or hosts for it are missing.
            ModelNotFound: Naming those that are served.
        """
        try:
            backend = self.named(name)
        except ModelNotFound:
            self.first.require_ready()
            raise
        backend.require_ready()
        if backend is not self.first and (span := current_span()) is not None:
            span.asks(backend.model_id)
        return backend


def backends_of(request: Request) -> Backends:
    """Those of the app."""
    backends: Backends = request.app.state.backends
    return backends


def backend_of(request: Request) -> Backend:
    """The first one, for what concerns the mesh as a whole."""
    return backends_of(request).first


def backend_beside(
    first: Backend,
    *,
    engine: Engine,
    tokenizer: Tokenizer,
    model_id: str,
    num_slots: int | None = None,
    status: Callable[[], Mapping[str, Any]],
    ready: Callable[[], bool],
    is_whole: Callable[[], bool],
    refusal: Callable[[], MeshError | None],
    stage_counts: Callable[[], Awaitable[Sequence[Mapping[str, Any]]]] | None,
) -> Backend:
    """A backend for another model of the same server. What clients left there is shared by all.

    Args:
        first: Of the server.
        engine: See `create_app`; so with the rest.
        tokenizer: Likewise.
        model_id: The id that clients see.
        num_slots: See `create_app`.
        status: Likewise.
        ready: Likewise.
        is_whole: Likewise.
        refusal: Likewise.
        stage_counts: Likewise.
    """
    now_s = first.now_s
    statistics = RequestStatistics()
    return replace(
        first,
        engine=ObservedEngine(engine, statistics, first.steady_s),
        tokenizer=tokenizer,
        chat_template=chat_template_of(tokenizer, now=lambda: datetime.fromtimestamp(now_s()).astimezone()),
        model_id=model_id,
        num_slots=num_slots,
        created=int(now_s()),
        status=status,
        ready=ready,
        is_whole=is_whole,
        refusal=refusal,
        stage_counts=stage_counts,
        statistics=statistics,
    )
