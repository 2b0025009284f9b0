"""IP packets of the lab: their endpoints, other endpoints with correct checksums, and refusals.

Packets are whole, as bytes, of IPv4 or IPv6, without options between IPv6's header and that of TCP or UDP.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

TCP: Final = 6
UDP: Final = 17
_ICMP: Final = 1
_ICMPV6: Final = 58

_IPV6_BYTES: Final = 40
# Of the shortest headers.
_LEAST_BYTES: Final = {TCP: 20, UDP: 8}
_FRAGMENT_OFFSET: Final = 0x1FFF
_FIN, _SYN, _RST, _ACK = 0x01, 0x02, 0x04, 0x10
_TTL: Final = 64
_DO_NOT_FRAGMENT: Final = 0x4000
# Of what was refused, as much as makes it recognisable: its IP header and 8 bytes (RFC 792).
_QUOTED_BYTES: Final = 8
_UNREACHABLE: Final = {4: (3, 3), 6: (1, 4)}


class Endpoint(NamedTuple):
    """Address and port of one end."""

    address: bytes
    """IP address, 4 or 16 bytes."""
    port: int
    """TCP or UDP port."""


class Flow(NamedTuple):
    """Protocol and both ends of a packet, and of all others like it."""

    protocol: int
    """`TCP` or `UDP`."""
    source: Endpoint
    """The sender."""
    destination: Endpoint
    """The receiver."""

    @property
    def answers(self) -> Flow:
        """The flow of the packets that answer it."""
        return Flow(self.protocol, self.destination, self.source)


def addresses_of(packet: bytes) -> tuple[bytes, bytes]:
    """Source and destination address of a packet."""
    if packet[0] >> 4 == 4:
        return packet[12:16], packet[16:20]
    return packet[8:24], packet[24:40]


def is_icmp(packet: bytes) -> bool:
    """Whether a packet is ICMP of its IP version: an error, an echo, or its answer."""
    return packet[9] == _ICMP if packet[0] >> 4 == 4 else packet[6] == _ICMPV6


def flow_of(packet: bytes) -> Flow | None:
    """The flow of a packet; None if it has no ports: other protocols, and all fragments but the first."""
    if packet[0] >> 4 == 4:
        protocol, start = packet[9], _header_bytes(packet)
        if int.from_bytes(packet[6:8]) & _FRAGMENT_OFFSET:
            return None
    else:
        protocol, start = packet[6], _IPV6_BYTES
    if protocol not in _LEAST_BYTES or len(packet) < start + _LEAST_BYTES[protocol]:
        return None
    source, destination = addresses_of(packet)
    source_port, destination_port = struct.unpack_from("!HH", packet, start)
    return Flow(protocol, Endpoint(source, source_port), Endpoint(destination, destination_port))


def _header_bytes(packet: bytes) -> int:
    """Length of the IP header."""
    return (packet[0] & 0x0F) * 4 if packet[0] >> 4 == 4 else _IPV6_BYTES


def with_endpoints(packet: bytes, source: Endpoint, destination: Endpoint) -> bytes:
    """An IPv4 packet of TCP or UDP with other endpoints.

    Its checksums are updated by the difference (RFC 1624, equation 3): a damaged packet stays damaged.

    Args:
        packet: The packet; not a later fragment.
        source: New source.
        destination: New destination.
    """
    start = _header_bytes(packet)
    changed = bytearray(packet)
    changed[12:20] = source.address + destination.address
    struct.pack_into("!HH", changed, start, source.port, destination.port)
    addresses = packet[12:20], bytes(changed[12:20])
    ports = packet[start : start + 4], bytes(changed[start : start + 4])
    _update(changed, 10, [addresses])
    if packet[9] == TCP:
        _update(changed, start + 16, [addresses, ports])
    elif packet[start + 6 : start + 8] != b"\0\0":  # in UDP that means that there is none
        _update(changed, start + 6, [addresses, ports])
        if changed[start + 6 : start + 8] == b"\0\0":
            changed[start + 6 : start + 8] = b"\xff\xff"
    return bytes(changed)


def _update(packet: bytearray, at: int, changes: list[tuple[bytes, bytes]]) -> None:
    """Update the checksum at an offset by old and new bytes, an even number each."""
    total = ~int.from_bytes(packet[at : at + 2]) & 0xFFFF
    for old, new in changes:
        total += sum(~word & 0xFFFF for word in _words(old)) + sum(_words(new))
    packet[at : at + 2] = (~_folded(total) & 0xFFFF).to_bytes(2)


def checksum(data: bytes) -> int:
    """Internet checksum (RFC 1071) of bytes whose own checksum field, if they have one, is zero."""
    return ~_folded(sum(_words(data + b"\0" * (len(data) % 2)))) & 0xFFFF


def _words(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"!{len(data) // 2}H", data)


def _folded(total: int) -> int:
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def transport_checksum(source: bytes, destination: bytes, protocol: int, segment: bytes) -> int:
    """Checksum of TCP, UDP or ICMPv6 over its pseudo header and segment.

    Args:
        source: Source address, 4 or 16 bytes.
        destination: Destination address.
        protocol: Number of the protocol.
        segment: Header and data, the checksum field zero.
    """
    if len(source) == 4:
        pseudo = source + destination + struct.pack("!BBH", 0, protocol, len(segment))
    else:
        pseudo = source + destination + struct.pack("!IHBB", len(segment), 0, 0, protocol)
    return checksum(pseudo + segment)


def refusal_of(packet: bytes) -> bytes | None:
    """The answer of a firewall that rejects a packet: a reset for TCP, else ICMP's port unreachable.

    Args:
        packet: The packet as its sender sent it.

    Returns:
        A packet to its sender; None for one that is never answered.
    """
    flow = flow_of(packet)
    if flow is None:
        return None
    return _reset_of(packet, flow) if flow.protocol == TCP else _unreachable_of(packet)


def _reset_of(packet: bytes, flow: Flow) -> bytes | None:
    """The reset that answers a segment to a closed port (RFC 9293, 3.10.7.1)."""
    start = _header_bytes(packet)
    sequence, acknowledged, offset, flags = struct.unpack_from("!IIBB", packet, start + 4)
    if flags & _RST:
        return None
    if flags & _ACK:
        ours = struct.pack("!IIBB", acknowledged, 0, 5 << 4, _RST)
    else:
        num_bytes = len(packet) - start - (offset >> 4) * 4 + bool(flags & _SYN) + bool(flags & _FIN)
        ours = struct.pack("!IIBB", 0, (sequence + num_bytes) & 0xFFFFFFFF, 5 << 4, _RST | _ACK)
    ports = struct.pack("!HH", flow.destination.port, flow.source.port)
    segment = bytearray(ports + ours + bytes(6))
    source, destination = flow.destination.address, flow.source.address
    segment[16:18] = transport_checksum(source, destination, TCP, bytes(segment)).to_bytes(2)
    return _datagram(source, destination, TCP, bytes(segment))


def _unreachable_of(packet: bytes) -> bytes:
    source, destination = addresses_of(packet)
    version = packet[0] >> 4
    quoted = packet[: _header_bytes(packet) + _QUOTED_BYTES]
    message = bytearray(bytes(_UNREACHABLE[version]) + bytes(6) + quoted)
    if version == 4:
        found = checksum(bytes(message))
    else:
        found = transport_checksum(destination, source, _ICMPV6, bytes(message))
    message[2:4] = found.to_bytes(2)
    return _datagram(destination, source, _ICMP if version == 4 else _ICMPV6, bytes(message))


def _datagram(source: bytes, destination: bytes, protocol: int, content: bytes) -> bytes:
    if len(source) != 4:
        header = struct.pack("!IHBB", 6 << 28, len(content), protocol, _TTL)
        return header + source + destination + content
    ipv4_header = bytearray(
        struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(content), 0, _DO_NOT_FRAGMENT, _TTL, protocol, 0)
        + source
        + destination
    )
    ipv4_header[10:12] = checksum(bytes(ipv4_header)).to_bytes(2)
    return bytes(ipv4_header) + content
