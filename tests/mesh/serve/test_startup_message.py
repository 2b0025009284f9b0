"""What `mesh serve` prints for a person."""

import pytest

from mesh.serve.status import reachable


@pytest.mark.parametrize(
    ("listens_at", "address", "leads_to"),
    [
        ("http://127.0.0.1:8000", "10.0.0.7", "http://127.0.0.1:8000"),
        ("http://10.0.0.8:8000", "10.0.0.7", "http://10.0.0.8:8000"),
        ("http://0.0.0.0:9000", "10.0.0.7", "http://10.0.0.7:9000"),
        ("http://[::]:9000", "fd00::7", "http://[fd00::7]:9000"),
        ("http://[fd00::8]:9000", "fd00::7", "http://[fd00::8]:9000"),
    ],
)
def test_a_url_leads_to_the_server(listens_at: str, address: str, leads_to: str) -> None:
    assert reachable(listens_at, address) == leads_to
