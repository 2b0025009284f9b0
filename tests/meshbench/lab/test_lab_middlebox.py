"""What the lab's router lets through, and with which addresses."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbench.lab.address_translation import AddressTranslation
from meshbench.lab.middlebox import Middlebox, Passed
from meshbench.lab.packets import TCP, UDP, Endpoint, Flow, flow_of
from meshbench.lab.port_filter import PortFilter, PortRules, Verdict
from tests.meshbench.lab.test_lab_packets import check_sums, ip, tcp, udp

S = 10**9
RANGE = PortRules(((20_000, 20_099),))


def at(address: str, port: int) -> Endpoint:
    return Endpoint(ipaddress.ip_address(address).packed, port)


def packed(address: str) -> bytes:
    return ipaddress.ip_address(address).packed


HEAD, NEAR, FAR = at("10.77.0.1", 4242), at("192.168.1.2", 4242), at("192.168.2.3", 4242)
FIRST, SECOND = packed("10.77.0.201"), packed("10.77.0.202")


def homes() -> Middlebox:
    """Two networks with a host each."""
    return Middlebox([AddressTranslation(FIRST, [NEAR.address]), AddressTranslation(SECOND, [FAR.address])])


def seen(passed: Passed | None) -> Flow | None:
    """Endpoints of the packet that is delivered, whose checksums are right."""
    if passed is None:
        return None
    check_sums(passed.packet)
    return flow_of(passed.packet)


class TestPortFilter:
    def test_others_open_connections_to_allowed_ports_only_and_get_answers(self) -> None:
        ports = PortFilter()
        assert ports.is_idle
        ports.set(HEAD.address, RANGE)
        assert not ports.is_idle
        for port, verdict in ((19_999, Verdict.DROP), (20_000, Verdict.PASS), (20_099, Verdict.PASS)):
            flow = Flow(TCP, at("10.77.0.2", 40_000), at("10.77.0.1", port))
            assert ports.verdict(flow) is verdict
            assert ports.verdict(flow.answers) is Verdict.PASS
        # To the port of the client itself nobody opens a connection.
        assert ports.verdict(Flow(TCP, at("10.77.0.3", 1), at("10.77.0.1", 40_000))) is Verdict.DROP

    def test_what_a_host_opens_itself_is_answered(self) -> None:
        ports = PortFilter()
        ports.set(HEAD.address, PortRules((), rejects=True))
        opened = Flow(UDP, at("10.77.0.1", 53_000), at("10.77.0.2", 53))
        assert ports.verdict(opened.answers) is Verdict.REJECT
        assert ports.verdict(opened) is Verdict.PASS
        assert ports.verdict(opened.answers) is Verdict.PASS
        other = Flow(UDP, at("10.77.0.3", 53), opened.source)
        assert ports.verdict(other) is Verdict.REJECT

    def test_rules_may_end(self) -> None:
        ports = PortFilter()
        ports.set(HEAD.address, RANGE)
        ports.set(HEAD.address, None)
        ports.set(NEAR.address, None)
        assert ports.is_idle
        assert ports.verdict(Flow(TCP, NEAR, HEAD)) is Verdict.PASS

    def test_the_longest_unused_connection_is_forgotten_first(self) -> None:
        ports = PortFilter(most_flows=2)
        ports.set(HEAD.address, PortRules(()))
        flows = [Flow(TCP, at("10.77.0.1", port), at("10.77.0.2", 80)) for port in (1, 2, 3)]
        for flow in (flows[0], flows[1], flows[0], flows[2]):
            assert ports.verdict(flow) is Verdict.PASS
        assert [ports.verdict(flow.answers) for flow in flows] == [Verdict.PASS, Verdict.DROP, Verdict.PASS]

    @given(
        st.lists(st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.integers(1, 4)), max_size=30)
    )
    def test_a_packet_passes_if_its_port_is_open_or_it_belongs_to_what_passed(
        self, steps: list[tuple[int, int, int]]
    ) -> None:
        """Against a plain model: host 1 lets port 1 in, host 2 is open."""
        ports = PortFilter()
        ports.set(packed("10.77.0.1"), PortRules(((1, 1),)))
        let_in: set[Flow] = set()
        for source, destination, port in steps:
            flow = Flow(TCP, at(f"10.77.0.{source}", port), at(f"10.77.0.{destination}", 5 - port))
            passes = destination == 2 or flow.destination.port == 1 or bool({flow, flow.answers} & let_in)
            assert (ports.verdict(flow) is Verdict.PASS) is passes
            if passes:
                let_in.add(flow)


class TestAddressTranslation:
    def test_what_goes_out_has_one_port_for_all_peers_and_answers_come_back(self) -> None:
        network = AddressTranslation(FIRST, [NEAR.address])
        outside = network.outgoing(Flow(UDP, NEAR, HEAD), 0)
        assert outside == Endpoint(FIRST, NEAR.port)
        other = at("10.77.0.9", 80)
        assert network.outgoing(Flow(UDP, NEAR, other), 0) == outside
        for peer in (HEAD, other):
            assert network.incoming(Flow(UDP, peer, outside), 1) == NEAR

    def test_nobody_else_comes_in(self) -> None:
        network = AddressTranslation(FIRST, [NEAR.address])
        outside = network.outgoing(Flow(UDP, NEAR, HEAD), 0)
        strangers = [at("10.77.0.9", HEAD.port), at("10.77.0.1", HEAD.port + 1)]
        assert [network.incoming(Flow(UDP, each, outside), 1) for each in strangers] == [None, None]
        assert network.incoming(Flow(TCP, HEAD, outside), 1) is None
        assert network.incoming(Flow(UDP, HEAD, Endpoint(FIRST, 5000)), 1) is None

    def test_two_hosts_with_the_same_port_get_two(self) -> None:
        other = at("192.168.1.7", NEAR.port)
        network = AddressTranslation(FIRST, [NEAR.address, other.address])
        ports = [network.outgoing(Flow(TCP, each, HEAD), 0).port for each in (NEAR, other, NEAR)]
        assert ports[0] == ports[2] == NEAR.port
        assert ports[1] not in (NEAR.port, 0)
        assert network.incoming(Flow(TCP, HEAD, Endpoint(FIRST, ports[1])), 0) == other

    def test_a_way_in_closes_when_nothing_goes_over_it(self) -> None:
        network = AddressTranslation(FIRST, [NEAR.address])
        outside = network.outgoing(Flow(UDP, NEAR, HEAD), 0)
        # Either end keeps it open.
        assert network.incoming(Flow(UDP, HEAD, outside), 29 * S) == NEAR
        assert network.incoming(Flow(UDP, HEAD, outside), 58 * S) == NEAR
        assert network.incoming(Flow(UDP, HEAD, outside), 90 * S) is None
        # Its port is anybody's then.
        other = AddressTranslation(FIRST, [NEAR.address, FAR.address])
        other.outgoing(Flow(UDP, NEAR, HEAD), 0)
        assert other.outgoing(Flow(UDP, FAR, HEAD), 31 * S) == outside
        assert other.incoming(Flow(UDP, HEAD, outside), 32 * S) == FAR

    def test_a_forwarded_port_is_open_to_all_and_answers_come_from_it(self) -> None:
        network = AddressTranslation(FIRST, [NEAR.address])
        network.forward(TCP, 80, at("192.168.1.2", 8080))
        client, server = at("10.77.0.9", 50_000), Endpoint(FIRST, 80)
        assert network.incoming(Flow(TCP, client, server), 0) == at("192.168.1.2", 8080)
        assert network.outgoing(Flow(TCP, at("192.168.1.2", 8080), client), 0) == server
        assert network.incoming(Flow(UDP, client, server), 0) is None
        # It stays so.
        assert network.incoming(Flow(TCP, client, server), 10**6 * S) == at("192.168.1.2", 8080)
        with pytest.raises(ValueError, match="80 is in use"):
            network.forward(TCP, 80, NEAR)
        with pytest.raises(ValueError, match=r"192\.168\.2\.3 is not behind"):
            network.forward(TCP, 81, FAR)

    @given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 40)), max_size=40))
    def test_no_two_endpoints_share_a_port_and_each_is_found_by_its_own(
        self, steps: list[tuple[int, int, int]]
    ) -> None:
        network = AddressTranslation(FIRST, [packed(f"192.168.1.{host}") for host in (1, 2, 3)])
        now_ns = 0
        for host, port, passed_s in steps:
            now_ns += passed_s * S
            inside = at(f"192.168.1.{host}", port)
            outside = network.outgoing(Flow(UDP, inside, HEAD), now_ns)
            assert outside.address == FIRST
            assert network.incoming(Flow(UDP, HEAD, outside), now_ns) == inside


class TestMiddlebox:
    def test_without_orders_it_has_nothing_to_do(self) -> None:
        assert Middlebox().is_idle
        assert not homes().is_idle

    def test_a_connection_out_of_a_network_is_translated_both_ways(self) -> None:
        box = homes()
        out = box.passed(tcp(NEAR, HEAD), 0)
        assert seen(out) == Flow(TCP, Endpoint(FIRST, NEAR.port), HEAD)
        assert out is not None
        # The link is that between the hosts themselves.
        assert (out.source, out.destination) == (NEAR.address, HEAD.address)
        back = box.passed(tcp(HEAD, Endpoint(FIRST, NEAR.port)), 0)
        assert seen(back) == Flow(TCP, HEAD, NEAR)
        assert back is not None
        assert (back.source, back.destination) == (HEAD.address, NEAR.address)

    def test_inside_addresses_lead_nowhere_from_outside(self) -> None:
        box = homes()
        assert box.passed(tcp(HEAD, NEAR), 0) is None
        assert box.passed(udp(FAR, NEAR), 0) is None
        assert box.passed(tcp(HEAD, Endpoint(FIRST, 80)), 0) is None
        neighbours = Middlebox([AddressTranslation(FIRST, [NEAR.address, packed("192.168.1.7")])])
        assert seen(neighbours.passed(tcp(NEAR, at("192.168.1.7", 80)), 0)) == Flow(
            TCP, NEAR, at("192.168.1.7", 80)
        )

    def test_two_networks_meet_when_both_have_sent(self) -> None:
        """Hole punching, by which overlay networks connect hosts behind two translations."""
        box = homes()
        near, far = Endpoint(FIRST, NEAR.port), Endpoint(SECOND, FAR.port)
        assert box.passed(udp(NEAR, far, b"lost"), 0) is None
        met = box.passed(udp(FAR, near, b"found"), 1)
        assert seen(met) == Flow(UDP, far, NEAR)
        assert met is not None
        assert (met.source, met.destination) == (FAR.address, NEAR.address)
        assert seen(box.passed(udp(NEAR, far, b"found"), 2)) == Flow(UDP, near, FAR)

    def test_a_forwarded_port_leads_in(self) -> None:
        box = homes()
        box.network_at(FIRST).forward(TCP, 80, at("192.168.1.2", 8080))
        assert seen(box.passed(tcp(HEAD, Endpoint(FIRST, 80)), 0)) == Flow(TCP, HEAD, at("192.168.1.2", 8080))
        assert seen(box.passed(tcp(at("192.168.1.2", 8080), HEAD), 0)) == Flow(TCP, Endpoint(FIRST, 80), HEAD)
        # Also out of another network.
        assert seen(box.passed(tcp(FAR, Endpoint(FIRST, 80)), 0)) == Flow(
            TCP, Endpoint(SECOND, FAR.port), at("192.168.1.2", 8080)
        )

    def test_a_rejected_packet_comes_back_from_where_it_was_sent_to(self) -> None:
        box = homes()
        box.network_at(FIRST).forward(TCP, 80, at("192.168.1.2", 8080))
        box.ports.set(NEAR.address, PortRules(((20_000, 20_099),), rejects=True))
        refused = box.passed(tcp(FAR, Endpoint(FIRST, 80)), 0)
        assert seen(refused) == Flow(TCP, Endpoint(FIRST, 80), FAR)
        assert refused is not None
        assert (refused.source, refused.destination) == (NEAR.address, FAR.address)
        box.ports.set(NEAR.address, RANGE)
        assert box.passed(tcp(FAR, Endpoint(FIRST, 80)), 0) is None

    def test_a_filter_knows_translated_connections(self) -> None:
        box = homes()
        box.ports.set(NEAR.address, PortRules(()))
        box.ports.set(HEAD.address, PortRules(((4242, 4242),)))
        assert seen(box.passed(udp(NEAR, HEAD), 0)) == Flow(UDP, Endpoint(FIRST, NEAR.port), HEAD)
        assert seen(box.passed(udp(HEAD, Endpoint(FIRST, NEAR.port)), 0)) == Flow(UDP, HEAD, NEAR)

    def test_what_has_no_ports_passes_between_open_hosts(self) -> None:
        box = homes()
        box.ports.set(HEAD.address, RANGE)
        other = at("10.77.0.9", 0)
        echo, tunnel = ip(other, HEAD, 1, bytes(8)), ip(other, HEAD, 47, bytes(8))
        assert box.passed(echo, 0) == Passed(echo, other.address, HEAD.address)
        assert box.passed(tunnel, 0) is None
        assert box.passed(ip(HEAD, other, 47, bytes(8)), 0) is not None
        assert box.passed(ip(NEAR, HEAD, 1, bytes(8)), 0) is None
        assert box.passed(ip(HEAD, Endpoint(FIRST, 0), 1, bytes(8)), 0) is None
