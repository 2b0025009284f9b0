"""Links between hosts: measurement of one, its echo service and protobuf form, and the survey of all."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import grpc
import structlog

from mesh.cluster.members import ports_message
from mesh.cluster.port_plan import RangeListener, own_ports, unreachable_ports
from mesh.placement.links import Link, LinkProbeOptions, Links
from spanmesh_proto import links_pb2 as wire
from spanmesh_proto import links_pb2_grpc as rpc
from spanmesh_proto import membership_pb2 as membership_wire
from spanmesh_proto.addresses import PortRange, join_address, parse_port_range, split_address
from spanmesh_proto.errors import ClusterError, HostUnreachable, InvalidRequest, MeshError
from stages.transport.channels import (
    SERVER_OPTIONS,
    HandshakeMonitor,
    KeyCheck,
    abort,
    add_port,
    key_metadata,
    listen_within,
    open_channel,
)
from stages.transport.links import explain

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from mesh.cluster.members import Member, Members
    from mesh.cluster.membership_server import MembershipService
    from stages.transport.channels import Identity

    Bounce = grpc.aio.StreamStreamCall[wire.Probe, wire.Probe]

MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024
# A peer that is done ends its call; one that is cut off does not.
_LISTEN_S: Final = 10.0
SMALL_BYTES: Final = 64
# The first round trips open the connection and wake the other end.
_NUM_WARM_UP: Final = 3
_CHUNK_BYTES: Final = 512 * 1024
_CONNECT_TIMEOUT_S: Final = 3.0
_PORTS_TIMEOUT_S: Final = 2.0
# Time for the way to a host and back, beyond that of its links.
_REPORT_S: Final = 5.0
log = structlog.get_logger()


class EchoService(rpc.EchoServicer):
    """Echo service: replies with as many bytes as requested, and opens ports for a check.

    Args:
        handshakes: Records each call.

    Attributes:
        listener: Opens ports of this host's range; None without a range.
    """

    def __init__(self, handshakes: HandshakeMonitor) -> None:
        self._handshakes = handshakes
        self.listener: RangeListener | None = None

    async def Bounce(  # noqa: N802 - the service's name for it
        self,
        request_iterator: AsyncIterator[wire.Probe],
        context: grpc.aio.ServicerContext[wire.Probe, wire.Probe],
    ) -> AsyncIterator[wire.Probe]:
        """Reply to each probe once, in order."""
        self._handshakes.called(context.peer())
        async for probe in request_iterator:
            if probe.answer_bytes > MAX_ANSWER_BYTES:
                asked = f"an answer of {probe.answer_bytes} bytes; {MAX_ANSWER_BYTES} at most"
                await abort(context, InvalidRequest(asked))
                return
            yield wire.Probe(payload=bytes(probe.answer_bytes))

    async def OpenPorts(  # noqa: N802 - the service's name for it
        self, _request: wire.PortCheck, context: grpc.aio.ServicerContext[wire.PortCheck, wire.OpenedPorts]
    ) -> AsyncIterator[wire.OpenedPorts]:
        """Listen on some ports of this host's range until the caller is done."""
        self._handshakes.called(context.peer())
        if self.listener is None:
            yield wire.OpenedPorts()
            return
        port_range = self.listener.port_range
        try:
            async with self.listener.opened() as (ports, nonce):
                yield wire.OpenedPorts(ports=ports, nonce=nonce, first=port_range.first, last=port_range.last)
                await asyncio.sleep(_LISTEN_S)
        except MeshError as error:
            await abort(context, error)


class EchoServer:
    """Echo service, for callers with the key.

    Args:
        secret: Secret of the join token.
        identity: Returns the TLS identity of this host, at each connection.
    """

    def __init__(self, secret: str, identity: Callable[[], Identity]) -> None:
        self._identity = identity
        self._handshakes = HandshakeMonitor()
        key_check = KeyCheck(echo_key(secret), self._handshakes.called)
        self._server = grpc.aio.server(interceptors=[key_check], options=SERVER_OPTIONS)
        self._service = EchoService(self._handshakes)
        rpc.add_EchoServicer_to_server(self._service, self._server)

    async def start(self, address: str, port_range: PortRange | None = None) -> int:
        """Listen.

        Args:
            address: Address of this host.
            port_range: Ports that this host may listen on; None for any free ones.

        Returns:
            The port.

        Raises:
            ClusterError: If nothing can be bound there.
        """
        try:
            port = listen_within(
                address,
                own_ports(port_range),
                lambda place: add_port(self._server, place, self._identity, self._handshakes.connected),
            )
        except RuntimeError as error:
            ports = "" if port_range is None else f", and --port-range {port_range} must have free ports"
            raise ClusterError(
                f"cannot listen on {address}: {error}; --advertise must be an address of this host{ports}"
            ) from None
        if port_range is not None:
            self._service.listener = RangeListener(address, port_range)
        await self._server.start()
        return port

    async def stop(self) -> None:
        """Stop at once."""
        await self._server.stop(grace=0)


class LinkSurvey:
    """Measurement of all links. One survey runs at a time.

    Args:
        own: Host of the head, with its echo service.
        members: Hosts; the head's own may be among them.
        service: Membership service for the others.
        secret: Secret of the join token.
        identity: TLS identity of this host.
    """

    def __init__(
        self, own: Member, members: Members, service: MembershipService, secret: str, identity: Identity
    ) -> None:
        self._own = own
        self._members = members
        self._service = service
        self._secret = secret
        self._identity = identity
        self._ids = itertools.count(1)
        self._turn = asyncio.Lock()

    @property
    def head(self) -> str:
        """Name of the head's host; distinct from a joined host's with the same name."""
        own = self._own
        is_taken = any(
            other.name == own.name and other.ray_node_name != own.ray_node_name for other in self._members
        )
        return f"{own.name} (head)" if is_taken else own.name

    async def measure(self, options: LinkProbeOptions) -> Links:
        """Links from every host to every other, the head's included.

        Round trips are measured by all hosts at the same time, one link of each at a time. Bandwidths are
        measured by one host after the other, as two transfers over one wire would share it. Each link is an
        order of its own, so that a cancelled survey starts no further one.
        """
        async with self._turn:
            hosts = {member.name: member for member in self._members}
            # The head's entry among the members, if there is one, has no echo service.
            hosts[self.head] = replace(self._own, name=self.head)
            if options.bulk_bytes:
                measured = [await self._from(member, hosts, options) for member in hosts.values()]
            else:
                measured = await asyncio.gather(
                    *(self._from(member, hosts, options) for member in hosts.values())
                )
            return Links(tuple(itertools.chain.from_iterable(measured)))

    async def _from(self, member: Member, hosts: dict[str, Member], options: LinkProbeOptions) -> list[Link]:
        if not member.echo_port:
            # It runs a version without this service.
            return []
        found: list[Link] = []
        for other in hosts.values():
            if other.name != member.name and other.echo_port:
                found += await self._between(member, other, options)
        return found

    async def _between(self, member: Member, other: Member, options: LinkProbeOptions) -> list[Link]:
        target = join_address(other.address_for(member), other.echo_port)
        order = order_of(next(self._ids), {other.name: target}, options)
        timeout_s = _REPORT_S + options.patience_s
        try:
            async with asyncio.timeout(timeout_s):
                if member.ray_node_name == self._own.ray_node_name:
                    report = await carry_out(order, member.name, self._secret, self._identity)
                else:
                    report = await self._service.ask_links(member.name, order)
        except TimeoutError:
            reason = f"{member.name} did not report within {timeout_s:.0f} s"
        except MeshError as error:
            reason = error.message
        else:
            return links_of(member.name, report)
        log.warning("links_not_measured", host=member.name, target=other.name, reason=reason)
        return [Link(member.name, other.name, failure=reason)]


def echo_key(secret: str) -> str:
    """Key of the echo service, derived from the join token's secret, which it does not reveal."""
    return hashlib.sha256(f"spanmesh echo {secret}".encode()).hexdigest()


async def measure_link(
    source: str, target: str, address: str, options: LinkProbeOptions, *, secret: str, identity: Identity
) -> Link:
    """Measure round trips over one open stream, as windows use it, then bandwidth.

    Args:
        source: Name of this host.
        target: Name of the other host.
        address: `host:port` of its echo service.
        options: Options of the measurement.
        secret: Secret of the join token.
        identity: TLS identity of this host.

    Returns:
        The measured link; with the reason if it cannot be measured.
    """
    try:
        async with (
            asyncio.timeout(options.patience_s),
            open_channel(address, target, identity) as channel,
        ):
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await channel.channel_ready()
            call = rpc.EchoStub(channel).Bounce(metadata=key_metadata(echo_key(secret)))
            await _round_trips(call, SMALL_BYTES, _NUM_WARM_UP)
            small_ms = await _round_trips(call, SMALL_BYTES, options.num_probes)
            hidden_ms = await _round_trips(call, options.hidden_bytes, options.num_probes)
            rate = None
            if options.bulk_bytes:
                # In the first transfer TCP still grows its window.
                await _bulk_s(call, options.bulk_bytes)
                wire_s = await _bulk_s(call, options.bulk_bytes) - min(small_ms) / 1e3
                rate = options.bulk_bytes / max(wire_s, 1e-6)
            call.cancel()
            link = Link(source, target, tuple(small_ms), tuple(hidden_ms), rate)
            if options.checks_ports:
                link = await _with_ports(link, channel, address, secret)
    except TimeoutError:
        return Link(source, target, failure=f"{address} does not answer in time")
    except grpc.aio.AioRpcError as error:
        return Link(source, target, failure=explain(error, address).message)
    except MeshError as error:
        return Link(source, target, failure=error.message)
    return link


async def _with_ports(link: Link, channel: grpc.aio.Channel, address: str, secret: str) -> Link:
    """The link with the ports of the target's range that cannot be reached."""
    call = rpc.EchoStub(channel).OpenPorts(wire.PortCheck(), metadata=key_metadata(echo_key(secret)))
    try:
        opened = await call.read()
        if not isinstance(opened, wire.OpenedPorts):
            raise HostUnreachable("the stream ended before ports were opened for the check")
        if not opened.ports:
            return link
        host, _ = split_address(address)
        closed = await unreachable_ports(host, tuple(opened.ports), opened.nonce, timeout_s=_PORTS_TIMEOUT_S)
        return replace(link, ports=str(PortRange(opened.first, opened.last)), closed_ports=tuple(closed))
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            # It runs a version without this check.
            return link
        raise
    finally:
        call.cancel()


async def _round_trips(call: Bounce, num_bytes: int, count: int) -> list[float]:
    """Round trip times in milliseconds; replies are small."""
    probe = wire.Probe(payload=bytes(num_bytes), answer_bytes=SMALL_BYTES)
    times_ms = []
    for _ in range(count):
        start_s = time.perf_counter()
        await _write(call, probe)
        await _answer(call)
        times_ms.append((time.perf_counter() - start_s) * 1e3)
    return times_ms


async def _bulk_s(call: Bounce, num_bytes: int) -> float:
    """Seconds until the last of so many bytes is acknowledged."""
    sizes = [min(_CHUNK_BYTES, num_bytes - start) for start in range(0, num_bytes, _CHUNK_BYTES)]
    start_s = time.perf_counter()

    async def send() -> None:
        for size in sizes:
            await _write(call, wire.Probe(payload=bytes(size)))

    sender = asyncio.create_task(send())
    try:
        for _ in sizes:
            await _answer(call)
        await sender
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
    return time.perf_counter() - start_s


async def _write(call: Bounce, probe: wire.Probe) -> None:
    # Writing to a call that has ended fails; its reason is reported by the reader.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(probe)


async def _answer(call: Bounce) -> None:
    if not isinstance(await call.read(), wire.Probe):
        raise HostUnreachable("the stream ended in the middle of a measurement")


def order_of(id: int, targets: Mapping[str, str], options: LinkProbeOptions) -> membership_wire.LinkOrder:
    """The order of the head for a host.

    Args:
        id: Distinguishes the report from others of the same host.
        targets: Addresses of echo services, by host.
        options: Options of the measurement.
    """
    return membership_wire.LinkOrder(
        id=id,
        targets=[membership_wire.LinkTarget(name=name, address=address) for name, address in targets.items()],
        hidden_bytes=options.hidden_bytes,
        num_probes=options.num_probes,
        bulk_bytes=options.bulk_bytes,
        checks_ports=options.checks_ports,
    )


async def carry_out(
    order: membership_wire.LinkOrder, source: str, secret: str, identity: Identity
) -> membership_wire.LinkReport:
    """Measure the links of an order, one after the other.

    Args:
        order: Order of the head.
        source: Name of this host.
        secret: Secret of the join token.
        identity: TLS identity of this host.
    """
    options = LinkProbeOptions(order.hidden_bytes, order.num_probes, order.bulk_bytes, order.checks_ports)
    links = [
        await measure_link(source, target.name, target.address, options, secret=secret, identity=identity)
        for target in order.targets
    ]
    return membership_wire.LinkReport(
        id=order.id,
        links=[
            membership_wire.MeasuredLink(
                target=link.target,
                small_ms=link.small_ms,
                hidden_ms=link.hidden_ms,
                bytes_per_s=link.bytes_per_s,
                failure=link.failure,
                port_range=ports_message(parse_port_range(link.ports) if link.ports else None),
                closed_ports=link.closed_ports,
            )
            for link in links
        ],
    )


def links_of(source: str, report: membership_wire.LinkReport) -> list[Link]:
    """Links that a host measured."""
    return [
        Link(
            source,
            link.target,
            tuple(link.small_ms),
            tuple(link.hidden_ms),
            link.bytes_per_s if link.HasField("bytes_per_s") else None,
            link.failure,
            f"{link.port_range.first}-{link.port_range.last}" if link.HasField("port_range") else "",
            tuple(link.closed_ports),
        )
        for link in report.links
    ]
