"""The mesh's certificate authority: the head, whose own certificate the join token pins."""

from __future__ import annotations

import datetime as dt
import ipaddress
from typing import TYPE_CHECKING, Final

import structlog
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mesh.cluster.certificate import CLOCK_SKEW
from spanmesh_proto.errors import JoinError
from stages.transport.channels import Identity, NewKey, peer_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh.cluster.certificate import Certificate

log = structlog.get_logger()

# Of a certificate. A host's is renewed when two thirds of that are over, a stage's when its ring is connected
# the next time after that.
LIFETIME: Final = dt.timedelta(days=30)
_MAX_REQUEST_BYTES: Final = 4096


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


class Authority:
    """Signs the keys of admitted hosts. Its own key is the head's, and like it never travels.

    Args:
        certificate: The head's, with its key.
        lifetime: Of the certificates that it signs.
        clock: Aware time.
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
        """A certificate for a key that was made elsewhere.

        Args:
            request_pem: PKCS #10, of a P-256 key. Whatever names or extensions it asks for are ignored.
            host: The host's name, as it was admitted.
            address: IP address or host name where the others reach it.

        Returns:
            The certificate, PEM.

        Raises:
            JoinError: If the request is none, or is not signed with its own key.
        """
        return self._sign(request_pem, host, address, self._clock() + self._lifetime)

    def is_due(self, certificate_pem: bytes) -> bool:
        """Whether two thirds of the life of a certificate that it signed are over."""
        until = x509.load_pem_x509_certificate(certificate_pem).not_valid_after_utc
        return until - self._clock() < self._lifetime / 3

    def sign_for_ray(self, request_pem: bytes, host: str, address: str) -> bytes:
        """The same for Ray's processes, which read it once: good as long as the authority.

        Raises:
            JoinError: As for `sign`.
        """
        return self._sign(request_pem, host, address, self._certificate.not_valid_after_utc)

    def own_identity(self, hosts: Sequence[str], address: str) -> Identity:
        """For the head's own process, which holds the authority's key anyway: good as long as that is.

        Args:
            hosts: What the head's host is called.
            address: Where the others reach it.
        """
        key = NewKey()
        certificate = self._issue(key.public_key, hosts, address, self._certificate.not_valid_after_utc)
        return key.identity(certificate.public_bytes(serialization.Encoding.PEM), self.certificate_pem)

    def _sign(self, request_pem: bytes, host: str, address: str, until: dt.datetime) -> bytes:
        certificate = self._issue(_requested_key(request_pem, host), [host], address, until)
        log.info("certificate_signed", host=host, until=certificate.not_valid_after_utc.isoformat())
        return certificate.public_bytes(serialization.Encoding.PEM)

    def _issue(
        self, key: ec.EllipticCurvePublicKey, hosts: Sequence[str], address: str, until: dt.datetime
    ) -> x509.Certificate:
        names = [x509.DNSName(peer_name(host)) for host in hosts]
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])]))
            .issuer_name(self._certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._clock() - CLOCK_SKEW)
            .not_valid_after(min(until, self._certificate.not_valid_after_utc))
            .add_extension(x509.SubjectAlternativeName([*names, _general_name(address)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )


def _requested_key(request_pem: bytes, host: str) -> ec.EllipticCurvePublicKey:
    malformed = JoinError(
        f"host {host!r} sent no proper certificate request: install the same spanmesh on both hosts"
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
                f"{address!r} cannot stand in a certificate; give --advertise an IP address"
            ) from None
        return x509.DNSName(address)
