"""A service that answers probes, so that others can measure their link to this host."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import grpc

from spanmesh_proto import links_pb2 as wire
from spanmesh_proto import links_pb2_grpc as rpc
from spanmesh_proto.addresses import join_address
from spanmesh_proto.errors import ClusterError, InvalidRequest
from stages.transport.channels import SERVER_OPTIONS, KeyCheck, Strangers, abort, add_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from stages.transport.channels import Identity

MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024


def echo_key(secret: str) -> str:
    """What a caller must know: made from the join token's secret, which it does not give away."""
    return hashlib.sha256(f"spanmesh echo {secret}".encode()).hexdigest()


class EchoService(rpc.EchoServicer):
    """Sends back as many bytes as were asked for.

    Args:
        strangers: Is told of each call.
    """

    def __init__(self, strangers: Strangers) -> None:
        self._strangers = strangers

    async def Bounce(  # noqa: N802 - the service's name for it
        self,
        request_iterator: AsyncIterator[wire.Probe],
        context: grpc.aio.ServicerContext[wire.Probe, wire.Probe],
    ) -> AsyncIterator[wire.Probe]:
        """Each probe is answered once, in order."""
        self._strangers.called(context.peer())
        async for probe in request_iterator:
            if probe.answer_bytes > MAX_ANSWER_BYTES:
                asked = f"an answer of {probe.answer_bytes} bytes; {MAX_ANSWER_BYTES} at most"
                await abort(context, InvalidRequest(asked))
                return
            yield wire.Probe(payload=bytes(probe.answer_bytes))


class EchoServer:
    """The service on a free port, for those who know the key.

    Args:
        secret: The join token's.
        identity: What this host shows; asked at each connection.
    """

    def __init__(self, secret: str, identity: Callable[[], Identity]) -> None:
        self._identity = identity
        self._strangers = Strangers()
        key_check = KeyCheck(echo_key(secret), self._strangers.called)
        self._server = grpc.aio.server(interceptors=[key_check], options=SERVER_OPTIONS)
        rpc.add_EchoServicer_to_server(EchoService(self._strangers), self._server)

    async def start(self, address: str) -> int:
        """Listen; returns the port.

        Raises:
            ClusterError: If nothing can be bound there.
        """
        try:
            port = add_port(self._server, join_address(address, 0), self._identity, self._strangers.connected)
        except RuntimeError as error:
            raise ClusterError(
                f"cannot listen on {address}: {error}; --advertise must be an address of this host"
            ) from None
        await self._server.start()
        return port

    async def stop(self) -> None:
        """Stop at once."""
        await self._server.stop(grace=0)
