"""Certificates of a mesh: its authority, identities of head and hosts, and their renewal."""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import hmac
import ipaddress
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import grpc
import structlog
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from spanmesh_proto.addresses import split_address
from spanmesh_proto.errors import HostUnreachable, InvalidJoinToken, JoinError, MeshError
from stages.transport.channels import Identity, NewKey, peer_name
from stages.units import format_duration
from stages.weights.fetch import SERVER_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Longer than any mesh runs, since it cannot be renewed without another join token; also if the head's clock
# stood at 1970 when it was made and is set right later.
_LIFETIME: Final = dt.timedelta(days=36500)
# Certificates are valid from that long before they were signed, for hosts whose clock is behind. It costs
# nothing: the authority is known by its fingerprint, and no key is older than its certificate.
_BACKDATED: Final = dt.timedelta(days=3650)
# Lifetime of a certificate. A host's is renewed when two thirds of it are over, a stage's when its ring is
# connected the next time after that.
LIFETIME: Final = dt.timedelta(days=30)
# Of a host's clock. Others renew their certificates when as much of their lifetime is left: a clock that is
# further ahead finds them expired, and one that is further behind not valid yet.
MOST_AHEAD: Final = LIFETIME / 3
MOST_BEHIND: Final = _BACKDATED
_MAX_REQUEST_BYTES: Final = 4096
# Between looks at the wall clock.
_LOOK_S: Final = 60.0

log = structlog.get_logger()


@dataclass(frozen=True)
class Certificate:
    """A certificate with its private key, both PEM."""

    certificate_pem: bytes
    """Sent to every peer."""
    private_key_pem: bytes = field(repr=False)
    """Never leaves the head's host."""

    @property
    def fingerprint(self) -> bytes:
        """sha256 of the DER form, 32 bytes."""
        return fingerprint_of(self.certificate_pem)


def make_certificate(now: dt.datetime) -> Certificate:
    """A new P-256 key and a certificate for `SERVER_NAME`, valid for a hundred years.

    Args:
        now: Current time, aware; validity begins ten years earlier, for hosts whose clock is behind.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
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
    """TLS credentials of the membership service's port."""
    return grpc.ssl_server_credentials([(certificate.private_key_pem, certificate.certificate_pem)])


def check_validity(certificate_pem: bytes, now: dt.datetime) -> None:
    """Check that the head's certificate is valid by this host's clock, as TLS does without a clear message.

    Args:
        certificate_pem: The head's.
        now: Current time here, aware.

    Raises:
        JoinError: If it is not; with the difference.
    """
    certificate = x509.load_pem_x509_certificate(certificate_pem)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if begin <= now <= end:
        return
    ahead = now - (begin if now < begin else end)
    raise JoinError(
        f"this host's clock is {clock_difference(ahead)} the validity of the head's certificate, "
        f"{begin:%Y-%m-%d} to {end:%Y-%m-%d}: set the clock, on Linux with `timedatectl set-ntp true`"
    )


async def fetch_pinned_certificate(address: str, fingerprint: bytes, *, timeout_s: float) -> bytes:
    """The PEM certificate of the server at `address`, if it is the expected one.

    Only the TLS handshake crosses the wire, so no secret is exposed.

    Args:
        address: `host:port`.
        fingerprint: sha256 that the certificate's DER form must have.
        timeout_s: For connecting and the handshake together.

    Raises:
        HostUnreachable: If nothing answers there in time, or the answer is not TLS.
        InvalidJoinToken: If the server presents another certificate.
    """
    host, port = split_address(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The pinned fingerprint decides, not a chain of authorities.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except TimeoutError:
        raise HostUnreachable(
            f"no answer from the head at {address} within {timeout_s:g} s; check that this host reaches that "
            "address, and that the head's firewall lets TCP to this port through"
        ) from None
    except ssl.SSLError as error:
        raise HostUnreachable(f"the server at {address} is not a mesh head: {error.reason}") from error
    except OSError as error:
        raise HostUnreachable(f"cannot reach the head at {address}: {error.strerror or error}") from error
    try:
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.transport.abort()
    if not hmac.compare_digest(hashlib.sha256(der).digest(), fingerprint):
        raise InvalidJoinToken(
            f"the server at {address} is not the one that made this join token (its certificate differs), "
            "since the head restarted or another one listens there: use the line that it printed last"
        )
    return ssl.DER_cert_to_PEM_cert(der).encode()


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


class Authority:
    """Certificate authority of a mesh: signs the keys of admitted hosts. Its own key never leaves the head.

    Args:
        certificate: Certificate of the head, with its key.
        lifetime: Lifetime of the certificates that it signs.
        clock: Returns the current time, aware.
    """

    def __init__(
        self,
        certificate: Certificate,
        *,
        lifetime: dt.timedelta = LIFETIME,
        clock: Callable[[], dt.datetime] = _now,
    ) -> None:
        key = serialization.load_pem_private_key(certificate.private_key_pem, password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)  # noqa: S101 - `make_certificate` makes no other
        self._key = key
        self._certificate = x509.load_pem_x509_certificate(certificate.certificate_pem)
        self._lifetime = lifetime
        self._clock = clock
        self.certificate_pem = certificate.certificate_pem

    def sign(self, request_pem: bytes, host: str, address: str) -> bytes:
        """Sign a key that a host generated.

        Args:
            request_pem: PKCS #10, of a P-256 key. Names and extensions in it are ignored.
            host: Name of the host, as admitted.
            address: IP address or host name for the other hosts.

        Returns:
            The certificate, PEM.

        Raises:
            JoinError: If the request is malformed, or is not signed with its own key.
        """
        return self._sign(request_pem, host, address, self._clock() + self._lifetime)

    def is_due(self, certificate_pem: bytes) -> bool:
        """Whether two thirds of the lifetime of a certificate that it signed are over."""
        until = x509.load_pem_x509_certificate(certificate_pem).not_valid_after_utc
        return until - self._clock() < self._lifetime / 3

    def sign_for_ray(self, request_pem: bytes, host: str, address: str) -> bytes:
        """Sign a key of Ray's processes, which read the certificate once: valid as long as the authority's.

        Raises:
            JoinError: As for `sign`.
        """
        return self._sign(request_pem, host, address, self._certificate.not_valid_after_utc)

    def own_identity(self, hosts: Sequence[str], *addresses: str) -> Identity:
        """Identity of the head's own process, valid as long as the authority's certificate.

        Args:
            hosts: Names of the head's host.
            addresses: Its addresses for other hosts.
        """
        key = NewKey()
        certificate = self._issue(key.public_key, hosts, addresses, self._certificate.not_valid_after_utc)
        return key.identity(certificate.public_bytes(serialization.Encoding.PEM), self.certificate_pem)

    def _sign(self, request_pem: bytes, host: str, address: str, until: dt.datetime) -> bytes:
        certificate = self._issue(_requested_key(request_pem, host), [host], [address], until)
        log.info("certificate_signed", host=host, until=certificate.not_valid_after_utc.isoformat())
        return certificate.public_bytes(serialization.Encoding.PEM)

    def _issue(
        self,
        key: ec.EllipticCurvePublicKey,
        hosts: Sequence[str],
        addresses: Sequence[str],
        until: dt.datetime,
    ) -> x509.Certificate:
        names = [x509.DNSName(peer_name(host)) for host in hosts]
        where = [_general_name(address) for address in addresses]
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])]))
            .issuer_name(self._certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._clock() - _BACKDATED)
            .not_valid_after(min(until, self._certificate.not_valid_after_utc))
            .add_extension(x509.SubjectAlternativeName([*names, *where]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )


class HostCertificate:
    """Certificate of this host: generates keys, and keeps the latest certificate. For one event loop.

    Args:
        authority_pem: Certificate of the head, which the join token pins.
        clock: Returns the current time, aware.
    """

    def __init__(self, authority_pem: bytes, *, clock: Callable[[], dt.datetime] = _now) -> None:
        self._authority_pem = authority_pem
        self._clock = clock
        self._key = NewKey()
        self._identity: Identity | None = None
        self._taken = asyncio.Event()

    def request_pem(self) -> bytes:
        """A certificate request for a new key."""
        self._key = NewKey()
        self._taken.clear()
        return self._key.request_pem()

    def take(self, certificate_pem: bytes) -> None:
        """Store the certificate for the latest request."""
        self._identity = self.with_certificate(certificate_pem)
        self._taken.set()

    def clock_ahead(self) -> dt.timedelta:
        """Time by which this host's clock is ahead of the head's, which has just signed; may be negative."""
        # The beginning of the validity tells when it was signed.
        certificate = x509.load_pem_x509_certificate(self.identity().certificate_pem)
        return self._clock() - (certificate.not_valid_before_utc + _BACKDATED)

    def with_certificate(self, certificate_pem: bytes) -> Identity:
        """Identity of the latest request's key with another certificate for it."""
        return self._key.identity(certificate_pem, self._authority_pem)

    def identity(self) -> Identity:
        """Identity for new connections.

        Raises:
            MeshError: If there is no certificate yet.
        """
        if self._identity is None:
            raise MeshError("this host has no certificate yet")
        return self._identity

    async def due(self) -> None:
        """Return when there is a certificate and it is due for renewal.

        The time that has passed counts, and the wall clock as well, which may be set meanwhile.
        """
        await self._taken.wait()
        certificate_pem = self.identity().certificate_pem
        until = x509.load_pem_x509_certificate(certificate_pem).not_valid_after_utc
        left_s = renewal_in_s(certificate_pem, self._clock())
        while left_s > 0:
            await asyncio.sleep(min(left_s, _LOOK_S))
            left_s = 0.0 if self._clock() >= until else left_s - _LOOK_S


def _requested_key(request_pem: bytes, host: str) -> ec.EllipticCurvePublicKey:
    malformed = JoinError(
        f"host {host!r} sent an invalid certificate request: install the same spanmesh on both hosts"
    )
    if len(request_pem) > _MAX_REQUEST_BYTES:
        raise malformed
    try:
        request = x509.load_pem_x509_csr(request_pem)
        key = request.public_key()
        if not request.is_signature_valid:
            raise malformed
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise malformed from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise malformed
    return key


def _general_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        if not address.isascii():
            raise JoinError(
                f"{address!r} cannot be part of a certificate; give --advertise an IP address"
            ) from None
        return x509.DNSName(address)


def check_clock(ahead: dt.timedelta) -> None:
    """Check that a host's clock is near enough to the head's for their certificates.

    Args:
        ahead: How far it is ahead; negative if it is behind.

    Raises:
        JoinError: With the difference, if certificates of the other hosts would not count here.
    """
    if not -MOST_BEHIND <= ahead <= MOST_AHEAD:
        raise JoinError(
            f"this host's clock is {clock_difference(ahead)} the head's, and certificates of hosts are valid "
            f"for {LIFETIME.days} days only: set both clocks, on Linux with `timedatectl set-ntp true`"
        )


def clock_difference(ahead: dt.timedelta) -> str:
    """`3 hours ahead of` or `60 days behind`."""
    shown = format_duration(abs(ahead).total_seconds())
    return f"{shown} behind" if ahead < dt.timedelta() else f"{shown} ahead of"


def renewal_in_s(certificate_pem: bytes, now: dt.datetime) -> float:
    """Seconds until two thirds of the rest of a certificate's lifetime are over.

    Args:
        certificate_pem: Just received from the head.
        now: Current time, aware. With any clock error the result is a second at least, and no more than two
            thirds of the longest lifetime.
    """
    left = x509.load_pem_x509_certificate(certificate_pem).not_valid_after_utc - now
    return max(min(left, LIFETIME).total_seconds() * 2 / 3, 1.0)
