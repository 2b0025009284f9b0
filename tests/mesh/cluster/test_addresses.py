"""Addresses and ports of this host."""

import contextlib
import ipaddress
import re
import socket
from typing import Any

import pytest

from mesh.cluster.addresses import (
    AddressWatch,
    InterfaceAddress,
    advertised,
    bind_address,
    check_port_free,
    free_port,
    is_of_this_machine,
    lasting,
    own_addresses,
    primary_address,
    ranked,
)
from spanmesh_proto.addresses import is_loopback, join_address, split_address
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


def on(interface: str, text: str, *, is_lasting: bool = True, is_up: bool = True) -> InterfaceAddress:
    found = ipaddress.ip_interface(text)
    return InterfaceAddress(interface, found.ip, found.network, is_lasting, is_up)


LOOP = (on("lo", "127.0.0.1/8"), on("lo", "::1/128"), on("eth0", "fe80::1/64"))
HOUSE = on("eth0", "192.168.7.1/24")
TUNNEL = on("tun0", "10.8.0.6/24")
DOCKER = on("docker0", "172.17.0.1/16")
TEMPORARY = on("eth0", "2001:db8:1::abcd/64", is_lasting=False)
LASTING = on("eth0", "2001:db8:1::2/64")


@pytest.mark.parametrize(
    ("found", "routed", "best"),
    [
        ((), (), ()),
        ((HOUSE,), (), ("192.168.7.1",)),
        ((HOUSE, TUNNEL), ("10.8.0.6",), ("10.8.0.6", "192.168.7.1")),
        ((HOUSE, TUNNEL), (), ("192.168.7.1", "10.8.0.6")),
        # Another address in the same network leads no further.
        ((HOUSE, on("eth0", "192.168.7.9/24")), ("192.168.7.9",), ("192.168.7.9",)),
        ((HOUSE, DOCKER, on("eth1", "169.254.3.4/16")), (), ("192.168.7.1",)),
        ((DOCKER,), (), ("172.17.0.1",)),
        ((HOUSE, DOCKER), ("172.17.0.1",), ("172.17.0.1", "192.168.7.1")),
        ((HOUSE, on("eth1", "10.1.1.1/24", is_up=False)), (), ("192.168.7.1",)),
        ((on("eth1", "169.254.3.4/16"),), (), ("169.254.3.4",)),
        # One version of IP for all.
        ((LASTING, HOUSE), ("192.168.7.1", "2001:db8:1::2"), ("192.168.7.1",)),
        ((TEMPORARY, LASTING), (), ("2001:db8:1::2",)),
        ((TEMPORARY,), (), ("2001:db8:1::abcd",)),
    ],
)
def test_addresses_for_other_hosts_are_found_and_ranked(
    found: tuple[InterfaceAddress, ...], routed: tuple[str, ...], best: tuple[str, ...]
) -> None:
    assert ranked((*LOOP, *found), routed) == best


def test_an_address_that_goes_is_replaced_by_one_that_stays() -> None:
    assert lasting("2001:db8:1::abcd", (*LOOP, TEMPORARY, LASTING)) == "2001:db8:1::2"
    elsewhere = on("eth1", "2001:db8:1::3/64")
    assert lasting("2001:db8:1::abcd", (TEMPORARY, elsewhere)) == "2001:db8:1::abcd"
    assert lasting("2001:db8:1::2", (TEMPORARY, LASTING)) == "2001:db8:1::2"
    assert lasting("192.0.2.1", ()) == "192.0.2.1"


def test_several_networks_without_a_route_need_a_name_if_hosts_are_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [*LOOP, HOUSE, TUNNEL]
    monkeypatch.setattr("mesh.cluster.addresses.interface_addresses", lambda: tuple(found))
    monkeypatch.setattr("mesh.cluster.addresses.primary_address", lambda *_towards: "127.0.0.1")
    with pytest.raises(ClusterError, match=r"192\.168\.7\.1, 10\.8\.0\.6 .*--advertise") as caught:
        own_addresses(must_be_clear=True)
    assert caught.value.param == "--advertise"
    assert own_addresses(must_be_clear=False) == ("192.168.7.1", "10.8.0.6")
    found.remove(TUNNEL)
    assert own_addresses(must_be_clear=True) == ("192.168.7.1",)
    found.remove(HOUSE)
    assert own_addresses(must_be_clear=True) == ("127.0.0.1",)


def test_servers_listen_where_hosts_come_from() -> None:
    assert bind_address("192.168.7.1", ()) == "192.168.7.1"
    assert bind_address("192.168.7.1", ("10.8.0.6",)) == "0.0.0.0"
    assert bind_address("fd00::1", ("fd01::1",)) == "::"


def test_an_address_is_lost_when_it_was_there_and_stays_away() -> None:
    looks = [(0, False), (9, False), (10, True), (14, False), (15, False), (16, True), (17, False)]
    now: dict[str, Any] = {"s": 0, "is_own": False}
    watch = AddressWatch("192.0.2.1", 4.0, clock_s=lambda: now["s"], is_own=lambda *_addresses: now["is_own"])
    seen = []
    for now["s"], now["is_own"] in looks:
        seen.append(watch.has_lost)
    assert seen == [False, False, False, False, True, False, False]


def test_a_name_that_means_loopback_here_is_not_advertised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.cluster.addresses.resolved", lambda _name: ("127.0.1.1",))
    with pytest.raises(ClusterError, match=r"--advertise alpha means 127\.0\.1\.1 .*/etc/hosts"):
        advertised("alpha")
    assert advertised("localhost") == "localhost"


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
