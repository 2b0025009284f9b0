"""Who a process of the mesh is: its key, its certificate, and the one authority that it believes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(frozen=True)
class Identity:
    """What a process shows its peers, and whom it believes. All PEM.

    Attributes:
        certificate_pem: Names the host that the process runs on; signed by the authority.
        private_key_pem: Made in this process.
        authority_pem: The mesh's authority: a peer whose certificate it did not sign is refused.
    """

    certificate_pem: bytes
    private_key_pem: bytes = field(repr=False)
    authority_pem: bytes


class NewKey:
    """A P-256 key that is made here and stays here; only the request to certify it travels."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())

    @property
    def public_key(self) -> ec.EllipticCurvePublicKey:
        """Its public half."""
        return self._key.public_key()

    def request_pem(self) -> bytes:
        """PKCS #10. It names nobody: who this host is, the authority knows from elsewhere."""
        request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
        return request.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def identity(self, certificate_pem: bytes, authority_pem: bytes) -> Identity:
        """What the key becomes with the certificate that was made for it."""
        private_key_pem = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Identity(certificate_pem, private_key_pem, authority_pem)


def peer_name(host: str) -> str:
    """The DNS name in the certificates of a host.

    Hosts may be called what no DNS name may, `10.0.0.7` among them, and `a` is another host than `A`: hence a
    digest. The name that people know is the certificate's common name.
    """
    return f"{hashlib.sha256(host.encode()).hexdigest()[:32]}.host.spanmesh"
