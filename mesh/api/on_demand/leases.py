"""Leases of a request: the models that it uses, until it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mesh.api.auth import client_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

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
