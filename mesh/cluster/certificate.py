"""The head's self-signed certificate: made anew for each mesh, trusted because the join token names it.

It is the mesh's certificate authority, too: see `mesh.cluster.authority`.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import hmac
import ssl
from dataclasses import dataclass, field
from typing import Final

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from spanmesh_proto.addresses import split_address
from spanmesh_proto.errors import HostUnreachable, InvalidJoinToken
from stages.weights.fetch import SERVER_NAME

# As long as any mesh: it cannot be renewed without another join token.
_LIFETIME: Final = dt.timedelta(days=3650)
CLOCK_SKEW: Final = dt.timedelta(days=1)


@dataclass(frozen=True)
class Certificate:
    """A certificate with its private key, both PEM.

    Attributes:
        certificate_pem: Goes to every peer.
        private_key_pem: Stays on the head's host.
    """

    certificate_pem: bytes
    private_key_pem: bytes = field(repr=False)

    @property
    def fingerprint(self) -> bytes:
        """sha256 of the DER form, 32 bytes."""
        return fingerprint_of(self.certificate_pem)


def make_certificate(now: dt.datetime) -> Certificate:
    """A new P-256 key and a certificate for `SERVER_NAME`, good for ten years.

    Args:
        now: Aware time of making; a day earlier counts too, for hosts whose clock is behind.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Certificate(
        certificate_pem=certificate.public_bytes(serialization.Encoding.PEM),
        private_key_pem=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


def fingerprint_of(certificate_pem: bytes) -> bytes:
    """sha256 of a PEM certificate's DER form, 32 bytes."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate_pem.decode())).digest()


def server_credentials(certificate: Certificate) -> grpc.ServerCredentials:
    """For the port of the membership service."""
    return grpc.ssl_server_credentials([(certificate.private_key_pem, certificate.certificate_pem)])


async def fetch_pinned_certificate(address: str, fingerprint: bytes, *, timeout_s: float) -> bytes:
    """The PEM certificate that the server at `address` presents, if it is the one expected.

    Nothing but the TLS handshake crosses the wire: no secret is at stake yet.

    Args:
        address: `host:port`.
        fingerprint: sha256 that the certificate's DER form must have.
        timeout_s: For connecting and the handshake together.

    Raises:
        HostUnreachable: If nothing answers there in time, or what answers does not speak TLS.
        InvalidJoinToken: If the server presents another certificate.
    """
    host, port = split_address(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The fingerprint below decides, not a chain of authorities.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except TimeoutError:
        raise HostUnreachable(f"no answer from the head at {address} within {timeout_s:g} s") from None
    except ssl.SSLError as error:
        raise HostUnreachable(f"what listens at {address} is not a mesh head: {error.reason}") from error
    except OSError as error:
        raise HostUnreachable(f"cannot reach the head at {address}: {error.strerror or error}") from error
    try:
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.transport.abort()
    if not hmac.compare_digest(hashlib.sha256(der).digest(), fingerprint):
        raise InvalidJoinToken(
            f"the server at {address} is not the one that made this join token (its certificate differs): "
            "was the head started anew? Use the line that it printed last"
        )
    return ssl.DER_cert_to_PEM_cert(der).encode()
