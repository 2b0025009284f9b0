"""Orders to the mesh are taken from the head's own machine: a key that opens the API does not open these."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mesh.cluster.addresses import is_loopback
from spanmesh_proto.errors import Unauthorized

if TYPE_CHECKING:
    from starlette.requests import Request

# A proxy on this machine has its address, whoever is behind it.
_MARKS_OF_PROXIES: Final = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")


def require_own_machine(request: Request, what: str) -> None:
    """Turn away whoever asks from elsewhere, or through a proxy that says so.

    Args:
        request: Of somebody with a key, or where none is needed.
        what: What only this machine may do, such as `hosts are sent away`.

    Raises:
        Unauthorized: With the remedy.
    """
    client = request.client
    is_near = client is not None and is_loopback(client.host)
    if not is_near or any(mark in request.headers for mark in _MARKS_OF_PROXIES):
        raise Unauthorized(f"{what} from the head's own machine only: run the command there")
