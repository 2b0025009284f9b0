"""Addresses and ports of this host."""

import contextlib
import re
import socket

import pytest

from mesh.cluster.addresses import (
    advertised,
    check_port_free,
    free_port,
    is_loopback,
    is_of_this_machine,
    primary_address,
)
from spanmesh_proto.addresses import join_address, split_address
from spanmesh_proto.errors import ClusterError, PortInUse
from tests.support.ipv6 import needs_ipv6


@pytest.mark.parametrize("place", [("192.0.2.1", 80), ("2001:db8::1", 65535), ("host.example", 1)])
def test_splitting_undoes_joining(place: tuple[str, int]) -> None:
    assert split_address(join_address(*place)) == place


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:http", "host:0", "host:65536", "host:-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ClusterError, match="host:port"):
        split_address(text)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::ffff:127.0.0.1", True), ("::1", True), ("localhost", True)],
)
def test_loopback_is_known(host: str, *, expected: bool) -> None:
    assert is_loopback(host) is expected
    assert not is_loopback("192.0.2.1")
    assert not is_loopback("0.0.0.0")


def test_addresses_of_this_machine_are_known() -> None:
    own = primary_address()
    assert is_of_this_machine(own, "127.0.0.1")
    assert ":" in own or is_of_this_machine(f"::ffff:{own}")
    for other in ("203.0.113.9", "2001:db8::9", "0.0.0.0", "localhost", ""):
        assert not is_of_this_machine(other)
        assert not is_of_this_machine(own, other)


def test_the_primary_address_can_be_listened_on() -> None:
    check_port_free(primary_address(), 0, "--advertise")
    assert primary_address("127.0.0.1") == "127.0.0.1"
    assert primary_address("no such host") == "127.0.0.1"


@needs_ipv6
def test_the_primary_address_is_of_the_other_host_s_version() -> None:
    assert primary_address("::1") == "::1"
    assert primary_address("no such host", "::1") == "::1"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("host.example", "host.example"),
        ("[fd00::1]", "fd00::1"),
        ("FD00:0:0::1", "fd00::1"),
    ],
)
def test_an_address_is_advertised_in_one_form(written: str, meant: str) -> None:
    assert advertised(written) == meant


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "[::]", "fe80::1", "fe80::1%eth0"])
def test_what_leads_no_other_host_here_is_not_advertised(address: str) -> None:
    with pytest.raises(ClusterError, match=f"--advertise {re.escape(address)} .*name ") as caught:
        advertised(address)
    assert caught.value.param == "--advertise"


def test_a_port_in_use_is_named_with_the_option_that_changes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"127\.0\.0\.1:{port}; choose another with --port"):
            check_port_free("127.0.0.1", port, "--port")
    check_port_free("127.0.0.1", free_port("127.0.0.1"), "--port")


def test_a_free_port_is_not_one_that_outgoing_connections_take() -> None:
    ports = [free_port("127.0.0.1") for _ in range(8)]
    assert len(set(ports)) == len(ports)
    assert all(20_000 <= port < 32_768 for port in ports)


def test_a_free_port_is_none_that_is_listened_on() -> None:
    with contextlib.ExitStack() as stack:
        # Listened on by this test, or by another process: either way it is passed over.
        following = free_port("127.0.0.1") + 1
        following = 20_000 if following == 32_768 else following
        with contextlib.suppress(OSError):
            stack.enter_context(socket.create_server(("127.0.0.1", following)))
        assert free_port("127.0.0.1") != following


@pytest.mark.parametrize("host", ["203.0.113.9", "no such host"])
def test_an_address_of_no_interface_is_refused(host: str) -> None:
    with pytest.raises(ClusterError, match=host):
        check_port_free(host, 0, "--host")
