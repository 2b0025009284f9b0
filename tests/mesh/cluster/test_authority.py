"""Certificates of hosts: what the head signs, what it does not, and when a host asks again."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from mesh.cluster import certificates
from mesh.cluster.certificates import (
    Authority,
    HostCertificate,
    check_clock,
    check_validity,
    make_certificate,
    renewal_in_s,
)
from spanmesh_proto.errors import JoinError
from stages.transport.channels import NewKey, peer_name

NOW = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
AUTHORITY = Authority(make_certificate(NOW), clock=lambda: NOW)


def request_by(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, *names: str) -> bytes:
    wanted = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    signed = request.add_extension(wanted, critical=False).sign(key, hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM)


def names_in(certificate: x509.Certificate) -> list[object]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [name.value for name in names]


def test_a_certificate_names_the_host_as_it_was_admitted_and_nobody_else() -> None:
    request = request_by(ec.generate_private_key(ec.SECP256R1()), peer_name("victim"), "spanmesh-head")
    certificate = x509.load_pem_x509_certificate(AUTHORITY.sign(request, "studio", "192.0.2.7"))
    assert names_in(certificate) == [peer_name("studio"), ipaddress.ip_address("192.0.2.7")]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(AUTHORITY.certificate_pem))
    assert certificate.not_valid_after_utc - NOW == dt.timedelta(days=30)


def test_a_certificate_does_not_outlive_the_authority() -> None:
    late = Authority(make_certificate(NOW), clock=lambda: NOW + dt.timedelta(days=36495))
    certificate = x509.load_pem_x509_certificate(late.sign(NewKey().request_pem(), "studio", "studio.lan"))
    assert certificate.not_valid_after_utc == NOW + dt.timedelta(days=36500)
    assert names_in(certificate) == [peer_name("studio"), "studio.lan"]


def tampered() -> bytes:
    """A request whose key is not the one that signed it."""
    own, other = (x509.load_pem_x509_csr(NewKey().request_pem()) for _ in range(2))
    der = own.public_bytes(serialization.Encoding.DER)
    mine, another = (
        request.public_key().public_bytes(
            serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
        )
        for request in (own, other)
    )
    return x509.load_der_x509_csr(der.replace(mine, another)).public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    "request_pem",
    [
        b"",
        b"\xff" * 100,
        b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n",
        NewKey().request_pem() * 20,
        NewKey().request_pem()[:200],
        request_by(rsa.generate_private_key(65537, 2048), "a"),
        request_by(ec.generate_private_key(ec.SECP384R1()), "a"),
        tampered(),
    ],
    # The keys in them differ from process to process.
    ids=["empty", "no text", "no request", "twenty", "cut off", "RSA", "another curve", "tampered"],
)
def test_what_is_no_proper_request_is_refused(request_pem: bytes) -> None:
    with pytest.raises(JoinError, match="'studio' sent an invalid certificate request"):
        AUTHORITY.sign(request_pem, "studio", "192.0.2.7")


def test_an_address_that_no_certificate_can_hold_is_refused() -> None:
    with pytest.raises(JoinError, match="give --advertise an IP address"):
        AUTHORITY.sign(NewKey().request_pem(), "studio", "stüdio.lan")


def test_hosts_get_names_of_their_own_whatever_they_are_called() -> None:
    assert len({peer_name(host) for host in ("a", "A", "10.0.0.7", "a.b", "a_b")}) == 5


def test_a_private_key_shows_in_no_text() -> None:
    identity = AUTHORITY.own_identity(["studio"], "192.0.2.7")
    assert "PRIVATE" in identity.private_key_pem.decode()
    assert "PRIVATE" not in repr(identity)


def test_renewal_is_due_when_two_thirds_are_over_and_never_at_once() -> None:
    certificate_pem = AUTHORITY.sign(NewKey().request_pem(), "studio", "192.0.2.7")
    assert renewal_in_s(certificate_pem, NOW) == 20 * 86400
    assert renewal_in_s(certificate_pem, NOW + dt.timedelta(days=100)) == 1.0
    # A clock that is behind makes it no later.
    assert renewal_in_s(certificate_pem, NOW - dt.timedelta(days=100)) == 20 * 86400


@pytest.mark.parametrize(
    ("ahead", "said"),
    [
        (dt.timedelta(days=11), "is 11 days ahead of the head's"),
        (dt.timedelta(days=-3660), "is 3660 days behind the head's"),
        (dt.timedelta(days=9), None),
        (dt.timedelta(days=-3600), None),
    ],
)
def test_a_clock_by_which_certificates_would_not_count_is_refused(
    ahead: dt.timedelta, said: str | None
) -> None:
    host = HostCertificate(AUTHORITY.certificate_pem, clock=lambda: NOW + ahead)
    host.take(AUTHORITY.sign(host.request_pem(), "studio", "192.0.2.7"))
    assert host.clock_ahead() == ahead
    if said is None:
        check_clock(ahead)
    else:
        with pytest.raises(JoinError, match=said):
            check_clock(ahead)


def test_a_head_whose_clock_stands_at_the_beginning_has_a_certificate_that_stays_valid() -> None:
    begin = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    certificate_pem = make_certificate(begin).certificate_pem
    for now in (begin - dt.timedelta(days=3000), begin, NOW):
        check_validity(certificate_pem, now)
    with pytest.raises(JoinError, match=r"is 365 days ahead of the validity of the head's certificate"):
        check_validity(certificate_pem, begin + dt.timedelta(days=36865))


async def test_a_clock_that_is_set_forward_makes_a_certificate_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where both clocks stood in the past and are set right."""
    monkeypatch.setattr(certificates, "_LOOK_S", 0.01)
    now = NOW
    host = HostCertificate(AUTHORITY.certificate_pem, clock=lambda: now)
    host.take(AUTHORITY.sign(host.request_pem(), "studio", "192.0.2.7"))
    due = asyncio.ensure_future(host.due())
    done, _ = await asyncio.wait([due], timeout=0.1)
    assert not done
    now += dt.timedelta(days=60)
    await asyncio.wait_for(due, 20)


def test_a_certificate_is_due_for_the_last_third_of_its_life() -> None:
    certificate_pem = AUTHORITY.sign(NewKey().request_pem(), "studio", "192.0.2.7")
    now = NOW
    later = Authority(make_certificate(NOW), clock=lambda: now)
    dues = []
    for days in (0, 19, 21, 31):
        now = NOW + dt.timedelta(days=days)
        dues.append(later.is_due(certificate_pem))
    assert dues == [False, False, True, True]


def test_only_the_latest_request_counts() -> None:
    certificate = HostCertificate(AUTHORITY.certificate_pem, clock=lambda: NOW)
    first = AUTHORITY.sign(certificate.request_pem(), "studio", "192.0.2.7")
    certificate.take(first)
    second = AUTHORITY.sign(certificate.request_pem(), "studio", "192.0.2.7")
    # Until the head has answered, the first certificate and its own key stay in use.
    assert certificate.identity().certificate_pem == first
    certificate.take(second)
    identity = certificate.identity()
    key = serialization.load_pem_private_key(identity.private_key_pem, password=None)
    signed = x509.load_pem_x509_certificate(identity.certificate_pem)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.public_key() == signed.public_key()
