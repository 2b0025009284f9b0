"""Membership client of a joining host."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import grpc
import structlog

from mesh.cluster.certificates import (
    HostCertificate,
    check_clock,
    check_validity,
    clock_difference,
    fetch_pinned_certificate,
)
from mesh.cluster.link_probe import EchoServer, carry_out
from mesh.cluster.members import KEEPALIVE, later_report, port_range_of, report_of
from mesh.cluster.membership_server import RayAccess
from mesh.cluster.port_plan import CheckListener, check_ray_reachable
from spanmesh_proto import PROTOCOL_VERSION
from spanmesh_proto import membership_pb2 as wire
from spanmesh_proto import membership_pb2_grpc as rpc
from spanmesh_proto.errors import HostUnreachable, MeshError, ProtocolVersionMismatch
from stages.transport.links import explain
from stages.weights.fetch import pinned_channel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from mesh.cluster.join_token import JoinToken
    from mesh.cluster.members import Member

# Together below the 5 s within which a join that cannot work must fail; the head dials back within 2 s of the
# second.
_CONNECT_TIMEOUT_S: Final = 1.8
_ANSWER_TIMEOUT_S: Final = 2.8
# From here a clock was not set, or set wrongly.
_CLOCKS_APART: Final = dt.timedelta(minutes=1)

log = structlog.get_logger()


@dataclass(frozen=True)
class HeadEndpoint:
    """The head: the address that answered, and its certificate."""

    address: str
    certificate_pem: bytes


class Membership:
    """Membership of this host. An async context manager; leaving it leaves the mesh.

    Args:
        head: Address and certificate of the head.
        secret: Secret of the join token.
        member: This host.
        rejoin_secret: Secret from an earlier membership of this host; empty for none.

    Attributes:
        rejoin_secret: Secret for the next membership, once admitted; empty if the head gives none.
    """

    def __init__(self, head: HeadEndpoint, secret: str, member: Member, *, rejoin_secret: str = "") -> None:
        self._head = head
        self._secret = secret
        self._member = member
        self.rejoin_secret = rejoin_secret
        self._check = CheckListener()
        self._certificate = HostCertificate(head.certificate_pem)
        self._echo: EchoServer | None = None
        self._echo_port = 0
        self._link_secret = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing = asyncio.Lock()
        self._channel: grpc.aio.Channel | None = None
        self._call: grpc.aio.StreamStreamCall[wire.HostReport, wire.HeadReport] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._call is not None:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._call.done_writing()
            self._call.cancel()
        if self._channel is not None:
            await self._channel.close(grace=None)
        await self._check.close()
        if self._echo is not None:
            await self._echo.stop()

    async def join(self) -> RayAccess:
        """Ask for admission.

        Returns:
            Address and token of the Ray cluster.

        Raises:
            InvalidJoinToken: If the head accepts neither secret, the token expired, or this host was
                evicted.
            ProtocolVersionMismatch: If the two speak different versions.
            HostUnreachable: If either cannot reach the other; a head with a port range also at Ray's port.
            JoinError: For any other reason of the head; or if the clocks of the two are too far apart.
        """
        check_ports = await self._check.open(self._member.address, self._member.port_range)
        report = report_of(
            self._member,
            secret=self._secret,
            rejoin_secret=self.rejoin_secret,
            check_ports=check_ports,
            check_nonce=self._check.nonce,
            certificate_request=self._certificate.request_pem(),
        )
        self._channel = pinned_channel(self._head.address, self._head.certificate_pem, options=KEEPALIVE)
        self._call = rpc.MembershipStub(self._channel).Join()
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await self._write(report)
                answer = await self._read()
        except TimeoutError:
            raise HostUnreachable(
                f"the head at {self._head.address} does not answer within {_ANSWER_TIMEOUT_S:g} s"
            ) from None
        self.rejoin_secret = answer.rejoin_secret or self.rejoin_secret
        await self._check.close()
        if answer.protocol_version != PROTOCOL_VERSION:
            raise ProtocolVersionMismatch(
                f"the head speaks protocol version {answer.protocol_version} (spanmesh "
                f"{answer.software_version}"
                f"), this host speaks {PROTOCOL_VERSION}: install the same spanmesh on both"
            )
        head_range = port_range_of(answer)
        if head_range is not None:
            await check_ray_reachable(answer.ray_address, head_range, timeout_s=_CONNECT_TIMEOUT_S)
        self._certificate.take(answer.certificate)
        self._compare_clocks()
        ray_identity = (
            self._certificate.with_certificate(answer.ray_certificate) if answer.ray_certificate else None
        )
        self._in_background(self._renew())
        self._link_secret = answer.link_secret
        self._echo = EchoServer(self._link_secret, self._certificate.identity)
        self._echo_port = await self._echo.start(self._member.address, self._member.port_range)
        return RayAccess(answer.ray_address, answer.ray_token, ray_identity)

    def _compare_clocks(self) -> None:
        """Note a clock that differs, and refuse one by which certificates of other hosts would not count."""
        ahead = self._certificate.clock_ahead()
        check_clock(ahead)
        if abs(ahead) > _CLOCKS_APART:
            log.warning("clock_differs", here=f"{clock_difference(ahead)} the head's")

    async def report_ready(self) -> None:
        """Report that this host's Ray node runs."""
        await self._write(later_report(self._member.name, is_ready=True, echo_port=self._echo_port))

    async def report_leaving(self) -> None:
        """Ask the head to move this host's layers; when that is done, it closes `states`."""
        await self._write(later_report(self._member.name, is_leaving=True))

    async def states(self) -> AsyncIterator[str]:
        """Announcements of the head, until it closes the mesh.

        Meanwhile links are measured on its orders, and certificates renewed.

        Raises:
            HostUnreachable: If the connection to the head is lost.
        """
        while True:
            report = await self._read()
            if report.HasField("measure"):
                self._in_background(self._measure(report.measure))
                continue
            if report.certificate:
                self._certificate.take(report.certificate)
                continue
            yield report.state
            if report.is_closing:
                return

    async def _measure(self, order: wire.LinkOrder) -> None:
        links = await carry_out(order, self._member.name, self._link_secret, self._certificate.identity())
        await self._write(wire.HostReport(name=self._member.name, links=links))

    async def _renew(self) -> None:
        while True:
            await self._certificate.due()
            await self._write(wire.HostReport(certificate_request=self._certificate.request_pem()))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def _joined(self) -> grpc.aio.StreamStreamCall[wire.HostReport, wire.HeadReport]:
        if self._call is None:
            raise MeshError("this host has not joined")
        return self._call

    async def _write(self, report: wire.HostReport) -> None:
        # Writing to a call that has ended fails; its reason is reported by the reader.
        # gRPC takes one message after the other, not two at a time.
        async with self._writing:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._joined.write(report)

    async def _read(self) -> wire.HeadReport:
        try:
            answer = await self._joined.read()
        except grpc.aio.AioRpcError as error:
            raise explain(error, f"the head at {self._head.address}") from None
        if not isinstance(answer, wire.HeadReport):
            raise HostUnreachable(f"the head at {self._head.address} ended the connection")
        return answer


async def find_head(token: JoinToken) -> HeadEndpoint:
    """Connect to all addresses of the token at once; the first that proves to be the head is taken.

    Raises:
        InvalidJoinToken: If a server answers with another certificate.
        HostUnreachable: If none answers in time.
        JoinError: If the head's certificate is not valid by this host's clock.
    """
    attempts = [asyncio.create_task(_try(address, token.fingerprint)) for address in token.addresses]
    failures: list[MeshError] = []
    try:
        for done in asyncio.as_completed(attempts):
            try:
                return await done
            except MeshError as error:
                failures.append(error)
    finally:
        for attempt in attempts:
            attempt.cancel()
        await asyncio.gather(*attempts, return_exceptions=True)
    # The error of an address that answered and was refused is more specific than a timeout.
    raise next((failure for failure in failures if not isinstance(failure, HostUnreachable)), failures[0])


async def _try(address: str, fingerprint: bytes) -> HeadEndpoint:
    certificate_pem = await fetch_pinned_certificate(address, fingerprint, timeout_s=_CONNECT_TIMEOUT_S)
    check_validity(certificate_pem, dt.datetime.now(dt.UTC))
    return HeadEndpoint(address, certificate_pem)
