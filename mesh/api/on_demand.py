"""Answers by models that may have to be loaded first, and the leases that hold these for a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mesh.api.auth import client_of, load_refusal
from mesh.api.backend import backends_of
from mesh.api.event_stream import DelayedStream, while_connected

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

    from mesh.api.backend import Backend, Backends
    from mesh.api.event_stream import StreamForm
    from mesh.api.head_services import ModelLease, OnDemandModels
    from spanmesh_proto.errors import MeshError

_LEASES: Final = "spanmesh.leases"


class ReleasedLeases:
    """Middleware that releases the leases of each request at its end, however it ends.

    Args:
        app: Next ASGI app.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, then release."""
        leases: list[ModelLease] = []
        scope[_LEASES] = leases
        try:
            await self._app(scope, receive, send)
        finally:
            for lease in leases:
                lease.release()


def lease_for(
    scope: Scope, on_demand: OnDemandModels, name: str, *, refusal: MeshError | None = None
) -> ModelLease:
    """Begin the use of a model, which ends with the request.

    Args:
        scope: ASGI scope of the request.
        on_demand: Loads models.
        name: Name of the model.
        refusal: Error for a request that may use the model, but may not have it loaded; None if it may.
    """
    lease = on_demand.lease(name, client_of(scope), refusal=refusal)
    leases: list[ModelLease] = scope[_LEASES]
    leases.append(lease)
    return lease


async def answered(
    request: Request,
    model: str | None,
    answer: Callable[[Backend], Awaitable[Response]],
    *,
    form: StreamForm | None = None,
    needs_engine: bool = True,
) -> Response:
    """Answer a request by the model that it names.

    A model of the library that is not loaded is loaded first, if the request may have that done. Meanwhile a
    stream is kept alive by comments; for a whole answer the client waits, up to a limit, without a word.

    Args:
        request: Request of the client, its body already read.
        model: Name of the model; None for the first.
        answer: Answers by the model, which is loaded.
        form: Form of the `EventStream` that `answer` returns; None if it returns a whole answer.
        needs_engine: Whether the model must answer; otherwise its tokenizer is enough.

    Raises:
        ModelNotFound: Naming the models that are served.
        Forbidden: If the model is not loaded, or the loading that the request waited for ended without it,
            and the request may not have it loaded.
        ClusterError: If the model is loading and not of the library, or does not fit for now.
        MeshError: What `answer` raises, and errors of loading.
    """
    backends = backends_of(request)
    lease = await _lease_to_wait_for(request, backends, model)
    choose = backends.ready if needs_engine else backends.named
    api = backends.first.api
    if lease is None:
        return await answer(choose(model))
    if form is not None:

        async def stream() -> Response:
            await lease.loaded(is_bounded=False)
            return await answer(choose(model))

        return DelayedStream(stream, form, api.closing, api.ping_interval_s)

    await while_connected(request, lease.loaded(is_bounded=True))
    return await answer(choose(model))


async def _lease_to_wait_for(request: Request, backends: Backends, model: str | None) -> ModelLease | None:
    """A lease of a model that is to be loaded for a request; None if it answers, or is not of the library."""
    on_demand = backends.first.api.on_demand()
    found = backends.find(model)
    if on_demand is None or model is None or found is backends.first:
        return None
    if found is not None and on_demand.answers(model):
        # From here on it is not unloaded for others.
        lease_for(request.scope, on_demand, model)
        return None
    known = await on_demand.find(model)
    if known is None:
        return None
    refusal = load_refusal(request, model)
    if refusal is not None and known.phase != "loading":
        raise refusal
    # While others have it loaded, every client may wait for it.
    return lease_for(request.scope, on_demand, model, refusal=refusal)
