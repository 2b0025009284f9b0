"""What `mesh serve` prints for a person."""

import pytest

from mesh.cluster.join_token import JoinToken, encode
from mesh.serve.startup_message import join_line, reachable
from spanmesh_proto.addresses import PortRange

TOKEN = encode(JoinToken(("10.0.0.7:20056",), "secret", bytes(32), 2**39))


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


def test_who_is_to_join_learns_the_command_and_the_ports() -> None:
    ranged = join_line(TOKEN, PortRange(20_000, 20_099))
    assert f"\n  mesh join {TOKEN} --port-range 20000-20099\n" in ranged
    assert "TCP to 10.0.0.7:20056. For the mesh this host listens on 20000-20099 only" in ranged
    anywhere = join_line(TOKEN, None)
    assert f"\n  mesh join {TOKEN}\n" in anywhere
    assert "TCP to 10.0.0.7:20056. Ray and the stages use free ports of every host:" in anywhere


def test_who_may_come_by_several_addresses_learns_of_each() -> None:
    token = encode(JoinToken(("10.8.0.6:20056", "192.168.7.1:20056"), "secret", bytes(32), 2**39))
    line = join_line(token, None)
    assert "TCP to 10.8.0.6:20056 or 192.168.7.1:20056. A host takes the address that it reaches" in line
    assert "--advertise" in line
