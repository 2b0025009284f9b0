"""Strangers and members who connect at once, while certificates are renewed, bring no server down."""

import socket
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

_NUM_HANDSHAKES = 1000
_NUM_AT_ONCE = 8


def test_many_handshakes_at_once_survive_renewals() -> None:
    """gRPC crashed after some hundreds of them when each handshake was given a certificate anew."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    # In a process of its own, as it would take the tests with it.
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.renewing_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        port = int(server.stdout.readline())

        def certificate(_number: int) -> bytes | None:
            with (
                socket.create_connection(("127.0.0.1", port), 10) as connection,
                context.wrap_socket(connection) as tls,
            ):
                return tls.getpeercert(binary_form=True)

        with ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
            certificates = set(pool.map(certificate, range(_NUM_HANDSHAKES)))
        server.stdin.close()
        assert server.wait(120) == 0
    assert len(certificates) > 3
