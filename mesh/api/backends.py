"""The models that are served, and which of them a request means."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from mesh.api.backend import DEFAULT_MODEL, Backend
from mesh.metrics.request_metrics import ObservedEngine, RequestStatistics
from mesh.metrics.tracing import current_span
from mesh.text.chat_template import chat_template_of
from spanmesh_proto.errors import InvalidRequest, ModelNotFound

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from starlette.requests import Request

    from mesh.api.unknown_fields import UnknownFields
    from mesh.engine import Engine
    from mesh.text.tokenizer import Tokenizer
    from spanmesh_proto.errors import MeshError


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
