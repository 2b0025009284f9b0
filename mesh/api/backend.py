"""Backend of the endpoints, and backends by model name."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from mesh.api.bodies import MOST_BODY_BYTES, MOST_PICTURE_BODY_BYTES, read_body
from mesh.api.request_parsing import UnknownFields
from mesh.api.response_store import ResponseStore
from mesh.embedding.registry import EmbeddingBackends
from mesh.metrics.request_metrics import ObservedEngine, RequestStatistics
from mesh.metrics.tracing import CURRENT_SPAN
from mesh.text.chat_template import template_source_of
from mesh.text.text_jobs import TextModel
from mesh.text.text_service import TextService
from spanmesh_proto.errors import ClusterError, InvalidRequest, ModelNotFound

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from starlette.requests import Request

    from mesh.api.head_services import (
        DrafterAdmin,
        HostAdmin,
        HostInspection,
        LinkRuns,
        ModelAdmin,
        OnDemandModels,
    )
    from mesh.api.request_parsing import Body
    from mesh.engine import Engine
    from mesh.status import MeshStatus, StageCounts
    from mesh.text.tokenizer import Tokenizer
    from mesh.vision.pictures import ModelPictures
    from spanmesh_proto.errors import MeshError

DEFAULT_MODEL: Final = "default"


@dataclass(frozen=True, kw_only=True)
class ApiContext:
    """Clocks, hooks into the mesh and stored responses: what all models of one API server share."""

    now_s: Callable[[], float] = time.time
    """Wall clock, Unix seconds."""
    steady_s: Callable[[], float] = time.monotonic
    """Monotonic clock in seconds, for durations and limits per minute."""
    random_bits: Callable[[int], int] = secrets.randbits
    """Returns a random integer of the given number of bits: ids, and seeds that requests leave out."""
    ping_interval_s: float = 1.0
    """A stream that has been silent for this long sends a comment."""
    link_runs: LinkRuns | None = None
    """Measures the links between hosts for `/mesh/links`; None without hosts."""
    host_admin: Callable[[], HostAdmin | None] = lambda: None
    """Returns the implementation of `/mesh/drain` and `/mesh/evict`; None while there is none."""
    inspection: Callable[[], HostInspection | None] = lambda: None
    """Returns the implementation of `/mesh/rehearse` and `/mesh/examine`, likewise."""
    model_admin: Callable[[], ModelAdmin | None] = lambda: None
    """Returns the implementation of `/mesh/load` and `/mesh/unload`, likewise."""
    drafter_admin: Callable[[], DrafterAdmin | None] = lambda: None
    """Returns the implementation of `/mesh/drafter`; None if no drafter is tuned, or while there is none."""
    on_demand: Callable[[], OnDemandModels | None] = lambda: None
    """Returns what loads models for requests; None without a library, or while there is none."""
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server shuts down; open answers end at once."""
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    """Names of unknown request fields that were logged."""
    responses: ResponseStore = field(default_factory=ResponseStore)
    """Responses stored for later requests."""
    fingerprint: str = field(default_factory=lambda: f"spanmesh-{version('spanmesh')}")
    """`system_fingerprint` of answers."""


@dataclass(kw_only=True, eq=False)
class Backend:
    """One served model, as the endpoints use it."""

    api: ApiContext
    """Shared by all models of the server."""
    engine: Engine
    """Generates token ids from token ids; need not be started before `ready`. Its requests are counted in
    `statistics`."""
    tokenizer: Tokenizer
    """Tokenizer of the model."""
    model_id: str
    """Model name in requests and answers; `default` names the first model as well."""
    created: int
    """When the model was loaded, Unix seconds."""
    status: Callable[[], MeshStatus]
    """What `/mesh/status` says of the model and, for the first one, of the mesh."""
    ready: Callable[[], bool]
    """Whether requests can be answered; until then they get 503."""
    is_whole: Callable[[], bool] = lambda: True
    """whether requests are answered at once. While a lost stage is replaced they wait, and may still be
    refused."""
    refusal: Callable[[], MeshError | None] = lambda: None
    """Error for all requests, if it is known that they cannot be answered for now."""
    num_slots: int | None = None
    """Number of concurrent answers. None if it is not known: API keys without a concurrency limit of their
    own then have no limit."""
    pictures: ModelPictures | None = None
    """Turns pictures into rows; None for a model that reads text only."""
    records: bool = False
    """Whether answers of clients that agreed are recorded."""
    stage_counts: Callable[[], Awaitable[Sequence[StageCounts]]] | None = None
    """Counters of the stages, in ring order; None without stages."""
    statistics: RequestStatistics = field(default_factory=RequestStatistics)
    """Request statistics for `/metrics`."""
    texts: TextService = field(init=False)
    """Renders conversations and tokenizes texts of clients."""

    def __post_init__(self) -> None:
        self.engine = ObservedEngine(self.engine, self.statistics, self.api.steady_s)
        source = template_source_of(self.tokenizer)
        self.texts = TextService(TextModel(str(self.tokenizer.path), self.tokenizer.stamp, source))

    @property
    def has_short_call_ids(self) -> bool:
        """Whether ids of calls are nine letters and digits, as the model's chat template wants them."""
        told = self.texts.told_format
        return told is not None and told.has_short_ids

    def now(self) -> datetime:
        """The local time."""
        return datetime.fromtimestamp(self.api.now_s()).astimezone()

    def require_ready(self) -> None:
        """Check that requests can be answered.

        Raises:
            ClusterError: While the model is loading, or hosts for it are missing.
        """
        if (refusal := self.refusal()) is not None:
            raise refusal
        if not self.ready():
            raise ClusterError("the model is still loading: try again in a moment", retry_after_s=2)


class Backends:
    """One for each model, the first of which is there for as long as the server.

    Args:
        first: What requests mean that name no model.

    Attributes:
        embeddings: Embedding models, which answer at `/v1/embeddings` only.
    """

    def __init__(self, first: Backend) -> None:
        self.first = first
        self.embeddings = EmbeddingBackends()
        self._others: dict[str, Backend] = {}

    def __iter__(self) -> Iterator[Backend]:
        """All, the first one first."""
        return iter((self.first, *self._others.values()))

    @property
    def context_length(self) -> int:
        """Positions of the longest sessions: a body is read before it is known which model it is for."""
        return max(backend.engine.context_length for backend in self)

    @property
    def reads_pictures(self) -> bool:
        """Whether any model does, likewise, those of the library included."""
        on_demand = self.first.api.on_demand()
        return any(backend.pictures is not None for backend in self) or (
            on_demand is not None and on_demand.reads_pictures
        )

    def most_body_bytes(self) -> int:
        """Most bytes of any body, likewise."""
        return MOST_PICTURE_BODY_BYTES if self.reads_pictures else MOST_BODY_BYTES

    @property
    def unknown_fields(self) -> UnknownFields:
        """Which field names were logged, whichever model they were for."""
        return self.first.api.unknown_fields

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
        """Answer for one no more, of any kind; does nothing if it is not there, or the first."""
        self._others.pop(name, None)
        self.embeddings.remove(name)

    def find(self, name: str | None) -> Backend | None:
        """The model that a request means, one that names none the first; None if it is not served."""
        if name in {None, DEFAULT_MODEL, self.first.model_id}:
            return self.first
        return self._others.get(name or "")

    def named(self, name: str | None) -> Backend:
        """The model that a request means: one that names none means the first.

        Raises:
            InvalidRequest: If it is an embedding model.
            ModelNotFound: Naming those that are served.
        """
        found = self.find(name)
        if found is None:
            if self.embeddings.find(name or "") is not None:
                raise InvalidRequest(
                    f"`{name}` is an embedding model: it makes vectors at /v1/embeddings, and no texts",
                    param="model",
                )
            served = ", ".join(f"`{backend.model_id}`" for backend in (*self, *self.embeddings))
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
        if backend is not self.first and (span := CURRENT_SPAN.get()) is not None:
            span.asks(backend.model_id)
        return backend


def backends_of(request: Request) -> Backends:
    """Those of the app."""
    backends: Backends = request.app.state.backends
    return backends


def backend_of(request: Request) -> Backend:
    """The first one, for what concerns the mesh as a whole."""
    return backends_of(request).first


async def body_of(request: Request, kind: type[Body]) -> Body:
    """The JSON body of a request, checked; see `read_body`, whose errors it raises."""
    backends = backends_of(request)
    return await read_body(
        request,
        kind,
        backends.unknown_fields,
        context_length=backends.context_length,
        has_pictures=backends.reads_pictures,
    )
