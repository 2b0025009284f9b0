"""Packets of the lab's router: endpoints are read and replaced, and every checksum is right afterwards."""

from __future__ import annotations

import ipaddress
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbench.lab.packets import (
    TCP,
    UDP,
    Endpoint,
    Flow,
    checksum,
    flow_of,
    is_icmp,
    refusal_of,
    transport_checksum,
    with_endpoints,
)

A = Endpoint(ipaddress.ip_address("10.77.0.1").packed, 40_000)
B = Endpoint(ipaddress.ip_address("10.77.0.2").packed, 20_005)
A6 = Endpoint(ipaddress.ip_address("fd77::1").packed, 40_000)
B6 = Endpoint(ipaddress.ip_address("fd77::2").packed, 20_005)
SYN, ACK, RST, FIN = 0x02, 0x10, 0x04, 0x01

addresses = st.binary(min_size=4, max_size=4)
endpoints = st.builds(Endpoint, addresses, st.integers(0, 65_535))
protocols = st.sampled_from([TCP, UDP])


def tcp(
    source: Endpoint,
    destination: Endpoint,
    data: bytes = b"",
    *,
    flags: int = SYN,
    sequence: int = 1_000,
    acknowledged: int = 0,
    options: bytes = b"",
) -> bytes:
    """An IP packet with a TCP segment."""
    offset = (5 + len(options) // 4) << 4
    header = struct.pack(
        "!HHIIBBHHH", source.port, destination.port, sequence, acknowledged, offset, flags, 512, 0, 0
    )
    segment = bytearray(header + options + data)
    segment[16:18] = transport_checksum(source.address, destination.address, TCP, bytes(segment)).to_bytes(2)
    return ip(source, destination, TCP, bytes(segment))


def udp(source: Endpoint, destination: Endpoint, data: bytes = b"", *, has_checksum: bool = True) -> bytes:
    """An IP packet with a UDP datagram."""
    segment = bytearray(struct.pack("!HHHH", source.port, destination.port, 8 + len(data), 0) + data)
    if has_checksum:
        found = transport_checksum(source.address, destination.address, UDP, bytes(segment))
        segment[6:8] = (found or 0xFFFF).to_bytes(2)
    return ip(source, destination, UDP, bytes(segment))


def ip(source: Endpoint, destination: Endpoint, protocol: int, content: bytes, *, fragment: int = 0) -> bytes:
    """An IP packet of the version of its addresses."""
    if len(source.address) == 16:
        header = struct.pack("!IHBB", 6 << 28, len(content), protocol, 64)
        return header + source.address + destination.address + content
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(content), 7, fragment, 64, protocol, 0)
    whole = bytearray(header + source.address + destination.address)
    whole[10:12] = checksum(bytes(whole)).to_bytes(2)
    return bytes(whole) + content


def packet_of(protocol: int, source: Endpoint, destination: Endpoint, data: bytes) -> bytes:
    return (tcp if protocol == TCP else udp)(source, destination, data)


def check_sums(packet: bytes) -> None:
    """What a kernel checks before it takes a packet: a sum over its own checksum is zero."""
    if packet[0] >> 4 == 4:
        assert checksum(packet[:20]) == 0
        source, destination, protocol, segment = packet[12:16], packet[16:20], packet[9], packet[20:]
    else:
        source, destination, protocol, segment = packet[8:24], packet[24:40], packet[6], packet[40:]
    if protocol == 1:
        assert checksum(segment) == 0
    else:
        assert transport_checksum(source, destination, protocol, segment) == 0


@given(protocols, endpoints, endpoints, st.binary(max_size=40))
def test_endpoints_are_read(protocol: int, source: Endpoint, destination: Endpoint, data: bytes) -> None:
    packet = packet_of(protocol, source, destination, data)
    check_sums(packet)
    assert flow_of(packet) == Flow(protocol, source, destination)
    assert not is_icmp(packet)


def test_endpoints_of_ipv6_are_read() -> None:
    for protocol in (TCP, UDP):
        packet = packet_of(protocol, A6, B6, b"data")
        check_sums(packet)
        assert flow_of(packet) == Flow(protocol, A6, B6)
        assert flow_of(packet_of(protocol, B6, A6, b"")) == Flow(protocol, A6, B6).answers


@given(protocols, endpoints, endpoints, endpoints, endpoints, st.binary(max_size=40))
def test_other_endpoints_are_those_that_the_packet_would_have_been_sent_with(
    protocol: int, source: Endpoint, destination: Endpoint, a: Endpoint, b: Endpoint, data: bytes
) -> None:
    changed = with_endpoints(packet_of(protocol, source, destination, data), a, b)
    assert changed == packet_of(protocol, a, b, data)


def test_a_datagram_without_a_checksum_gets_none() -> None:
    assert with_endpoints(udp(A, B, b"data", has_checksum=False), B, A) == udp(
        B, A, b"data", has_checksum=False
    )


def test_a_damaged_packet_stays_damaged() -> None:
    packet = bytearray(tcp(A, B, b"data"))
    packet[-1] ^= 1
    changed = with_endpoints(bytes(packet), B, A)
    assert transport_checksum(B.address, A.address, TCP, changed[20:]) != 0


def test_what_has_no_ports_has_no_flow() -> None:
    echo = ip(A, B, 1, b"\x08\0\0\0\0\0\0\0")
    assert flow_of(echo) is None
    assert is_icmp(echo)
    assert is_icmp(ip(A6, B6, 58, b"\x80\0\0\0\0\0\0\0"))
    later = ip(A, B, UDP, bytes(64), fragment=100)
    assert flow_of(later) is None
    assert not is_icmp(later)
    # The first of several fragments has ports, and says that more follow.
    assert flow_of(ip(A, B, UDP, udp(A, B, bytes(64))[20:], fragment=0x2000)) == Flow(UDP, A, B)
    assert flow_of(ip(A, B, TCP, bytes(8))) is None
    # A header of IPv6 between the two is not read.
    assert flow_of(ip(A6, B6, 0, bytes(64))) is None


@pytest.mark.parametrize(("source", "destination"), [(A, B), (A6, B6)])
def test_a_rejected_connection_is_reset(source: Endpoint, destination: Endpoint) -> None:
    refusal = refusal_of(tcp(source, destination, sequence=2**32 - 1))
    assert refusal is not None
    check_sums(refusal)
    assert flow_of(refusal) == Flow(TCP, destination, source)
    sequence, acknowledged, _, flags = struct.unpack_from("!IIBB", refusal, len(refusal) - 16)
    # A SYN counts as one byte; so the connection's next byte wraps around to 0.
    assert (sequence, acknowledged, flags) == (0, 0, RST | ACK)


def test_a_rejected_segment_is_reset_where_its_sender_expects_it() -> None:
    refusal = refusal_of(tcp(A, B, b"abc", flags=ACK, acknowledged=77, options=bytes(4)))
    assert refusal is not None
    assert struct.unpack_from("!IIBB", refusal, 24)[::3] == (77, RST)
    refusal = refusal_of(tcp(A, B, b"abc", flags=FIN, sequence=500, options=bytes(4)))
    assert refusal is not None
    assert struct.unpack_from("!II", refusal, 24) == (0, 504)
    assert refusal_of(tcp(A, B, flags=RST)) is None


@pytest.mark.parametrize(("source", "destination", "icmp"), [(A, B, (1, 3, 3)), (A6, B6, (58, 1, 4))])
def test_a_rejected_datagram_is_told_of(
    source: Endpoint, destination: Endpoint, icmp: tuple[int, int, int]
) -> None:
    packet = udp(source, destination, b"data")
    refusal = refusal_of(packet)
    assert refusal is not None
    check_sums(refusal)
    start = 20 if source is A else 40
    protocol = refusal[9] if source is A else refusal[6]
    assert (protocol, refusal[start], refusal[start + 1]) == icmp
    # By the ports in it the sender finds the socket.
    assert packet.startswith(refusal[start + 8 :])
    assert len(refusal[start + 8 :]) == start + 8
    # ICMP itself is never answered with ICMP.
    assert refusal_of(refusal) is None
