"""gRPC channels and ports over mutual TLS: identities, key check, and failed handshakes."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import socket
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import grpc
import structlog
from google.protobuf.message import DecodeError

from spanmesh_proto.addresses import join_address
from spanmesh_proto.errors import MeshError, ProtocolError, wire_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from cryptography.hazmat.primitives.asymmetric import ec

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
_KEY_HEADER: Final = "x-mesh-key"
_CLIENT_PING_MS: Final = 8_000
# gRPC frees the former certificate though a handshake that began just before may still use it, and then
# crashes (grpc/grpc issue 36693). So renewals are rare, and leave such a handshake this time.
_RENEWAL_S: Final = 0.05
_SIZES: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
CLIENT_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *_SIZES,
    ("grpc.keepalive_time_ms", _CLIENT_PING_MS),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # No proxies between the hosts of a mesh.
    ("grpc.enable_http_proxy", 0),
)
# The server must allow pings twice as often as clients send them, or a long prefill ends with GOAWAY.
SERVER_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *_SIZES,
    ("grpc.http2.min_ping_interval_without_data_ms", _CLIENT_PING_MS // 2),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", _CLIENT_PING_MS // 2),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
)
# A peer that uses plain text, or whose certificate another authority signed, fails in the handshake. gRPC
# reports the beginning of a handshake to a server, as it asks for the certificate, and the peer of each call.
# A peer that connected and has not called a few seconds later is no member.
# Members call as soon as they are connected, even over a slow network within this time.
PATIENCE_S: Final = 3.0
# Connections with calls; a mesh has a few for each stage.
_MOST_REMEMBERED: Final = 4096

log = structlog.get_logger()


@dataclass(frozen=True)
class Identity:
    """TLS identity of a process, all PEM."""

    certificate_pem: bytes
    """Certificate for its host, signed by the authority."""
    private_key_pem: bytes = field(repr=False)
    """Key generated in this process."""
    authority_pem: bytes
    """Certificate of the mesh's authority, which must have signed those of peers."""


class NewKey:
    """A new P-256 key that never leaves this process; only its certificate request does."""

    def __init__(self) -> None:
        # Measurements within one process run where the package may be missing.
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

        self._key = ec.generate_private_key(ec.SECP256R1())

    @property
    def public_key(self) -> ec.EllipticCurvePublicKey:
        """Its public half."""
        return self._key.public_key()

    def request_pem(self) -> bytes:
        """PKCS #10, without a name: the authority adds the host's."""
        from cryptography import x509  # noqa: PLC0415
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415

        request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
        return request.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def identity(self, certificate_pem: bytes, authority_pem: bytes) -> Identity:
        """The identity of the key with its certificate."""
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415

        private_key_pem = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Identity(certificate_pem, private_key_pem, authority_pem)


class KeyCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Interceptor that refuses calls without the mesh key, and malformed messages of others.

    Args:
        mesh_key: The expected key.
        on_refused: Called with the peer of each refused call.
    """

    def __init__(self, mesh_key: str, on_refused: Callable[[str], None] = lambda _peer: None) -> None:
        self._key = mesh_key.encode()
        self._on_refused = on_refused

    def replace(self, mesh_key: str) -> None:
        """Set another key for later calls."""
        self._key = mesh_key.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Compare in constant time."""
        metadata: Sequence[tuple[str, str | bytes]] = handler_call_details.invocation_metadata or ()
        given = dict(metadata).get(_KEY_HEADER, "")
        given_bytes = given if isinstance(given, bytes) else given.encode()
        if hmac.compare_digest(given_bytes, self._key):
            return _decoding(await continuation(handler_call_details))
        return _refusal(await continuation(handler_call_details), self._on_refused)


class HandshakeMonitor:
    """Counts connections to one server, and logs those without a call in time.

    For the event loop that made it.

    Args:
        patience_s: Longest time from the beginning of a handshake to the first call, in seconds.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._loop = asyncio.get_running_loop()
        self._patience_s = patience_s
        self._callers: OrderedDict[str, None] = OrderedDict()
        self._num_callers = 0
        self._num_judged = 0
        self._num_logged = 0

    def connected(self) -> None:
        """Record the beginning of a handshake. From any thread, while the loop is open."""
        self._loop.call_soon_threadsafe(self._loop.call_later, self._patience_s, self._check)

    def called(self, peer: str) -> None:
        """Record a call, answered or not.

        Args:
            peer: Address and port, as gRPC names them, unique for each connection.
        """
        if peer not in self._callers:
            self._num_callers += 1
        self._callers[peer] = None
        self._callers.move_to_end(peer)
        if len(self._callers) > _MOST_REMEMBERED:
            self._callers.popitem(last=False)

    def _check(self) -> None:
        self._num_judged += 1
        # Recent callers only delay the decision.
        if self._num_judged - self._num_logged > self._num_callers:
            self._num_logged += 1
            log.warning(
                "handshake_without_call",
                within_s=self._patience_s,
                reason="no call arrived: the peer uses plain text, lacks a certificate of this mesh, or left",
            )


def peer_name(host: str) -> str:
    """The DNS name in the certificates of a host.

    Names of hosts need not be valid DNS names, and are case-sensitive: hence a digest. The host's own name is
    the certificate's common name.
    """
    return f"{hashlib.sha256(host.encode()).hexdigest()[:32]}.host.spanmesh"


def open_channel(address: str, host: str, identity: Identity | None) -> grpc.aio.Channel:
    """A channel over mutual TLS.

    Args:
        address: `host:port` of the peer.
        host: Name of the host that must answer there, by its certificate.
        identity: TLS identity of this process. None for plain text, within one process only.
    """
    if identity is None:
        return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
    credentials = grpc.ssl_channel_credentials(
        identity.authority_pem, identity.private_key_pem, identity.certificate_pem
    )
    options = (*CLIENT_OPTIONS, ("grpc.ssl_target_name_override", peer_name(host)))
    return grpc.aio.secure_channel(address, credentials, options=options)


def add_port(
    server: grpc.aio.Server,
    address: str,
    identity: Callable[[], Identity] | None,
    on_connection: Callable[[], None] = lambda: None,
) -> int:
    """Let a server listen over mutual TLS: peers without a certificate of the mesh are refused.

    Args:
        server: Server before its start.
        address: `host:port`; port 0 takes a free one.
        identity: Returns the current TLS identity at each connection. None for plain text, within one process
            only.
        on_connection: Called in a thread of gRPC at the beginning of each handshake; never for plain text.

    Returns:
        The port.

    Raises:
        RuntimeError: If nothing can be bound there.
    """
    if identity is None:
        return server.add_insecure_port(address)
    shown = identity()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        on_connection()
        now = identity()
        if now == shown:
            return None
        time.sleep(_RENEWAL_S)
        shown = now
        return _configuration(now)

    credentials = grpc.dynamic_ssl_server_credentials(
        _configuration(shown),
        renewed,  # type: ignore[arg-type]  # None for no change is documented, but not in the stubs
        require_client_authentication=True,
    )
    return server.add_secure_port(address, credentials)


def _configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(identity.private_key_pem, identity.certificate_pem)], root_certificates=identity.authority_pem
    )


def listen_within(host: str, ports: Sequence[int], listen: Callable[[str], int]) -> int:
    """Listen on the first free port of some.

    Args:
        host: Address to bind.
        ports: Ports, the preferred ones first; empty for any free one.
        listen: Binds `host:port` and returns the port; raises RuntimeError if it cannot, like gRPC's servers.

    Returns:
        The port.

    Raises:
        RuntimeError: If all of them are taken, or nothing can be bound at `host`.
    """
    if not ports:
        return listen(join_address(host, 0))
    for port in ports:
        # Asked first, since gRPC writes a line to standard error for each port that it cannot bind.
        if _is_taken(host, port):
            continue
        try:
            return listen(join_address(host, port))
        except RuntimeError:
            # Another process may have been quicker.
            if not _is_taken(host, port):
                raise
    raise RuntimeError(f"other processes listen on all of the {len(ports)} ports {ports[0]} to {ports[-1]}")


def _is_taken(host: str, port: int) -> bool:
    """Whether another process listens on a port; False if it cannot be bound for another reason."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do; without it a port counts as taken for a minute after its last use.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def key_metadata(mesh_key: str) -> tuple[tuple[str, str], ...]:
    """Metadata of each call, with the mesh key."""
    return ((_KEY_HEADER, mesh_key),)


def status_of(error: BaseException) -> grpc.StatusCode:
    """The gRPC status of an exception, by the one table in `spanmesh_proto.errors`."""
    return grpc.StatusCode[wire_of(error).grpc]


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: MeshError) -> None:
    """End a call with the status and the code of `error`."""
    await context.abort(status_of(error), error.message, (("x-mesh-code", wire_of(error).code),))


def _decoding(handler: Any) -> Any:
    """The handler, with malformed messages as protocol errors.

    A single request, which is decoded before the handler is called, becomes None.
    """
    if handler is None:
        return None
    if not handler.request_streaming:
        return grpc.unary_stream_rpc_method_handler(
            handler.unary_stream, _decoder(handler.request_deserializer, None), handler.response_serializer
        )
    error = ProtocolError("the peer sent bytes that are not a message of this protocol")
    return grpc.stream_stream_rpc_method_handler(
        handler.stream_stream, _decoder(handler.request_deserializer, error), handler.response_serializer
    )


def _decoder(decode: Callable[[bytes], Any], error: MeshError | None) -> Callable[[bytes], Any]:
    def decoded(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError:
            if error is None:
                return None
            raise error from None

    return decoded


def _refusal(handler: Any, on_refused: Callable[[str], None]) -> Any:
    """A handler of the same kind (streaming or not) that refuses."""

    async def refuse_stream(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        reason = "the mesh key is missing or wrong"
        log.warning("peer_refused", peer=context.peer(), reason=reason)
        on_refused(context.peer())
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)
        yield  # the type of a streaming handler

    if handler is None:
        return None
    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse_stream)
    return grpc.unary_stream_rpc_method_handler(refuse_stream)
