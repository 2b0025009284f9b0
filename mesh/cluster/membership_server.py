"""Membership service of the head: joins, leaves, announcements and stage files."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import grpc
import structlog

from mesh.cluster.admission import DAY_S, AdmissionControl, eviction
from mesh.cluster.certificates import server_credentials
from mesh.cluster.members import KEEPALIVE, SERVER_PINGS, changes_of, member_of, ports_message
from mesh.cluster.port_plan import check_reachable_back
from spanmesh_proto import PROTOCOL_VERSION, SOFTWARE_VERSION
from spanmesh_proto import membership_pb2 as wire
from spanmesh_proto import membership_pb2_grpc as rpc
from spanmesh_proto.addresses import join_address, split_address
from spanmesh_proto.errors import HostUnreachable, InvalidModel, JoinError, MeshError, PortInUse
from stages.cancellable_work import CancellableWork, in_own_thread
from stages.transport.channels import SERVER_OPTIONS, abort, listen_within
from stages.weights.fetch import MAX_REQUEST_BYTES, RateLimit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from mesh.cluster.admission import Admissions
    from mesh.cluster.certificates import Authority, Certificate
    from mesh.cluster.host_facts import Versions
    from mesh.cluster.join_token import JoinToken
    from mesh.cluster.members import Member, Members
    from spanmesh_proto.addresses import PortRange
    from stages.transport.channels import Identity
    from stages.weights.virtual_stages import StageCache

_CHUNK_BYTES: Final = 1024 * 1024
_REPORT_TIMEOUT_S: Final = 2.0
_DIAL_BACK_TIMEOUT_S: Final = 2.0
# Of a host with a port range; this host itself names fewer.
_MOST_CHECK_PORTS: Final = 16
_DISMISSAL_TIMEOUT_S: Final = 1.0
# Ids of orders that only ping a host; those of link measurements count from 1.
_FIRST_PING_ID: Final = 2**32
_SIZES: Final = (("grpc.max_receive_message_length", MAX_REQUEST_BYTES),)
_OPTIONS: Final = tuple(
    {**dict(SERVER_OPTIONS), **dict(KEEPALIVE), **dict(SERVER_PINGS), **dict(_SIZES)}.items()
)
log = structlog.get_logger()


class Reader(Protocol):
    """Open recipe or stage file; see `stages.weights.virtual_stages`."""

    size_bytes: int

    def read(self, at: int, count: int) -> bytes:
        """Up to `count` bytes from `at` on; empty at the end."""

    def close(self) -> None:
        """Close the file."""


class _Text:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size_bytes = len(data)

    def read(self, at: int, count: int) -> bytes:
        return self._data[at : at + count]

    def close(self) -> None:
        """Does nothing."""


class StageSender:
    """Opens and sends what hosts request.

    Args:
        cache: Stage files.
        rate: Bandwidth of all transfers together.
    """

    def __init__(self, cache: StageCache, rate: RateLimit) -> None:
        self._cache = cache
        self._rate = rate

    def open(self, request: wire.FetchRequest) -> Reader:
        """Open what a request names.

        Raises:
            ModelError: If there is no such stage, or its model was changed or is not on this host.
        """
        if request.recipe:
            recipe = self._cache.recipe(request.sha256)
            if recipe is not None:
                return _Text(recipe.to_bytes())
        else:
            stage = self._cache.open(request.sha256)
            if stage is not None:
                return stage
        raise InvalidModel(f"the head has no stage {request.sha256[:12]}; start `mesh serve` again")

    async def send(self, request: wire.FetchRequest, reader: Reader) -> AsyncIterator[bytes]:
        """The requested bytes, within the bandwidth.

        Raises:
            InvalidModel: If the model cannot be read any more.
        """
        wanted = [(each.start, each.num_bytes) for each in request.ranges]
        with ThreadPoolExecutor(1, "send") as thread:
            reading = CancellableWork(thread)
            for start, count in wanted or [(request.offset, reader.size_bytes)]:
                at, stop = start, min(start + count, reader.size_bytes)
                while at < stop:
                    data = await reading.run(partial(reader.read, at, min(_CHUNK_BYTES, stop - at)))
                    await self._rate.take(len(data))
                    yield data
                    at += len(data)


@dataclass(frozen=True)
class RayAccess:
    """Access of a host's Ray node to the head's."""

    address: str
    """`host:port`."""
    token: str = field(repr=False)
    """Ray's auth token."""
    identity: Identity | None = field(default=None, repr=False, compare=False)
    """TLS identity of this host's Ray processes, new at each join; None for plain text."""


@dataclass(frozen=True)
class _AdmittedHost:
    """A host that was admitted."""

    member: Member
    """The host."""
    certificate: bytes
    """Certificate for its links, PEM."""
    ray_certificate: bytes
    """Certificate for its Ray node, PEM; empty for plain text."""
    rejoin_secret: str = field(repr=False)
    """Secret by which it may join again."""


class MembershipServer:
    """The service on a TLS port."""

    def __init__(self, service: MembershipService, certificate: Certificate) -> None:
        self._service = service
        self._server = grpc.aio.server(options=_OPTIONS)
        rpc.add_MembershipServicer_to_server(service, self._server)
        self._credentials = server_credentials(certificate)

    async def start(self, host: str, port: int, ports: Sequence[int] = ()) -> int:
        """Listen.

        Args:
            host: Address of this host.
            port: The port, or 0 to choose one.
            ports: Ports to choose from, the first free one; empty for any.

        Returns:
            The port.

        Raises:
            PortInUse: If that cannot be done.
        """
        try:
            bound = listen_within(
                host,
                (port,) if port else ports,
                lambda address: self._server.add_secure_port(address, self._credentials),
            )
        except RuntimeError as error:
            place = join_address(host, port) if port or not ports else f"{host}, ports {ports[0]}-{ports[-1]}"
            raise PortInUse(f"cannot listen on {place}; choose another port") from error
        await self._server.start()
        return bound

    async def stop(self) -> None:
        """Release the hosts and stop."""
        await self._service.dismiss_all()
        await self.kill()

    async def kill(self) -> None:
        """Stop without notice to the hosts."""
        await self._server.stop(grace=0)


def _since_boot_s() -> float:
    """Seconds since this machine started, its sleep included; elsewhere than on Linux since some moment."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class MembershipService(rpc.MembershipServicer):
    """Membership service, in the event loop that uses it.

    Args:
        admissions: Join token, and hosts that earlier heads admitted or evicted.
        ray: Address and token of the Ray cluster.
        members: Kept up to date.
        cache: Stage files that `FetchStage` sends.
        versions: Versions of the head.
        authority: Signs the keys of admitted hosts.
        clock_s: Wall clock, Unix seconds.
        steady_s: Clock that only runs, seconds.
        rate: Bandwidth for stage files, to all hosts together; None for no limit.
        port_range: Ports that the head may listen on; None for any free ones.
        token_lifetime_s: Longest validity of the join token, and that of one that replaces it.

    Attributes:
        link_secret: Secret of the members' echo services.
    """

    def __init__(
        self,
        *,
        admissions: Admissions,
        ray: RayAccess,
        members: Members,
        cache: StageCache,
        versions: Versions,
        authority: Authority,
        clock_s: Callable[[], float] = time.time,
        steady_s: Callable[[], float] = _since_boot_s,
        rate: RateLimit | None = None,
        port_range: PortRange | None = None,
        token_lifetime_s: float = DAY_S,
    ) -> None:
        self._admission = AdmissionControl(admissions, token_lifetime_s, clock_s=clock_s, steady_s=steady_s)
        # Hosts admitted before and after an eviction measure their links: they need a common secret.
        self.link_secret = admissions.token.secret
        self._ray = ray
        self._members = members
        self._sender = StageSender(cache, rate or RateLimit(None))
        self._versions = versions
        self._authority = authority
        self._port_range = port_range
        self._outboxes: dict[str, asyncio.Queue[wire.HeadReport]] = {}
        self._orders: dict[tuple[str, int], asyncio.Future[wire.LinkReport]] = {}
        self._ping_ids = itertools.count(_FIRST_PING_ID)

    @property
    def token(self) -> JoinToken:
        """Current join token."""
        return self._admission.token

    @property
    def admissions(self) -> Admissions:
        """Join token, and hosts that are admitted or refused, for the next head."""
        return self._admission.admissions

    @property
    def fetch_secret(self) -> str:
        """Current secret by which stages fetch their files."""
        return self._admission.fetch_secret

    def listens_at(self, *addresses: str) -> None:
        """Set the addresses of the service, `host:port`, the preferred one first, for the token."""
        self._admission.listens_at(*addresses)

    def reached_by(self, member: Member) -> str:
        """Address of the service, `host:port`, at which a member reaches it."""
        first, *others = self.token.addresses
        return next((each for each in others if split_address(each)[0] == member.head_address), first)

    async def answers(self, name: str, timeout_s: float) -> bool:
        """Whether a host is a member and its `mesh join` replies in time."""
        try:
            async with asyncio.timeout(timeout_s):
                # It measures no link, and replies at once.
                await self.ask_links(name, wire.LinkOrder(id=next(self._ping_ids)))
        except (HostUnreachable, TimeoutError):
            return False
        return True

    def dismiss(self, name: str, state: str) -> None:
        """Ask a host to leave for good; no effect if it has left.

        Args:
            name: The host.
            state: Reason, for its log.
        """
        outbox = self._outboxes.get(name)
        if outbox is not None:
            outbox.put_nowait(wire.HeadReport(is_closing=True, state=state))

    def evict(self, name: str) -> None:
        """Disconnect a host, refuse it from now on, and replace the join token.

        A host that is away can be evicted as long as it could rejoin.

        Raises:
            JoinError: If it is neither connected nor has a rejoin secret, or is the head itself.
        """
        is_away = self._members.find(name) is None and self._admission.can_rejoin(name)
        if name not in self._outboxes and not is_away:
            raise JoinError(f"no host named {name!r} has joined; `mesh status` lists those that have")
        self._admission.evict(name, self._outboxes.keys())
        self.announce(name, "evicted")
        self._members.remove(name)
        log.warning("host_evicted", host=name)

    async def ask_links(self, name: str, order: wire.LinkOrder) -> wire.LinkReport:
        """Order a host to measure links.

        Raises:
            HostUnreachable: If it is no member, or leaves in the meantime.
        """
        outbox = self._outboxes.get(name)
        if outbox is None:
            raise HostUnreachable(f"host {name} is not in the mesh")
        answer: asyncio.Future[wire.LinkReport] = asyncio.get_running_loop().create_future()
        self._orders[name, order.id] = answer
        outbox.put_nowait(wire.HeadReport(measure=order))
        try:
            return await answer
        finally:
            del self._orders[name, order.id]

    def announce(self, name: str, state: str) -> None:
        """Send a host the current state, for its log; no effect if it has left."""
        outbox = self._outboxes.get(name)
        if outbox is not None:
            outbox.put_nowait(wire.HeadReport(state=state))

    def announce_to_all(self, state: str) -> None:
        """Send every host the current state, for its log."""
        for name in self._outboxes:
            self.announce(name, state)

    async def dismiss_all(self) -> None:
        """Ask every host to leave, and wait briefly until they have left."""
        for outbox in self._outboxes.values():
            outbox.put_nowait(wire.HeadReport(is_closing=True, state="the head closed the mesh"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISMISSAL_TIMEOUT_S):
                while self._outboxes:
                    await self._members.changed()

    async def Join(  # noqa: N802 - the service's name for it
        self,
        request_iterator: AsyncIterator[wire.HostReport],
        context: grpc.aio.ServicerContext[wire.HostReport, wire.HeadReport],
    ) -> AsyncIterator[wire.HeadReport]:
        """Membership of one host, until it leaves."""
        reports = aiter(request_iterator)
        try:
            admitted = await self._admit(reports)
        except MeshError as error:
            log.warning("host_refused", peer=context.peer(), reason=error.message)
            await abort(context, error)
            return
        member = admitted.member
        outbox: asyncio.Queue[wire.HeadReport] = asyncio.Queue()
        self._outboxes[member.name] = outbox
        listener = asyncio.create_task(self._listen(member.name, reports))
        try:
            yield wire.HeadReport(
                protocol_version=PROTOCOL_VERSION,
                software_version=SOFTWARE_VERSION,
                ray_address=self._ray_address(member),
                ray_token=self._ray.token,
                state="admitted",
                certificate=admitted.certificate,
                ray_certificate=admitted.ray_certificate,
                link_secret=self.link_secret,
                port_range=ports_message(self._port_range),
                rejoin_secret=admitted.rejoin_secret,
            )
            async for report in _until_done(outbox, listener):
                if self._admission.is_evicted(member.name):
                    await abort(context, eviction(member.name))
                if report.is_closing:
                    # It leaves for good: to come back it needs a token, as any other host. Not after the
                    # report, since a host that hangs up at once ends this call.
                    self._admission.forget(member.name)
                yield report
        finally:
            listener.cancel()
            del self._outboxes[member.name]
            for (name, _), answer in self._orders.items():
                if name == member.name and not answer.done():
                    answer.set_exception(HostUnreachable(f"host {name} left the mesh"))
            self._members.remove(member.name)
            log.info("host_left", host=member.name, num_hosts=len(self._members))

    async def FetchStage(  # noqa: N802 - the service's name for it
        self,
        request: wire.FetchRequest,
        context: grpc.aio.ServicerContext[wire.FetchRequest, wire.FetchChunk],
    ) -> AsyncIterator[wire.FetchChunk]:
        """A stage's recipe, or bytes of its file."""
        try:
            self._admission.check_fetch(request.secret)
            reader = await in_own_thread(self._sender.open, request)
        except MeshError as error:
            log.warning("fetch_refused", peer=context.peer(), reason=error.message)
            await abort(context, error)
            return
        num_bytes = 0
        try:
            async for data in self._sender.send(request, reader):
                yield wire.FetchChunk(data=data, total_bytes=reader.size_bytes)
                num_bytes += len(data)
        except MeshError as error:
            log.warning("fetch_failed", peer=context.peer(), reason=error.message)
            await abort(context, error)
        finally:
            reader.close()
            if not request.recipe:
                log.info("stage_sent", sha256=request.sha256[:12], num_bytes=num_bytes)

    async def _admit(self, reports: AsyncIterator[wire.HostReport]) -> _AdmittedHost:
        try:
            async with asyncio.timeout(_REPORT_TIMEOUT_S):
                report = await anext(reports)
        except (TimeoutError, StopAsyncIteration):
            raise JoinError("the host sent nothing") from None
        self._admission.check(report, self._versions)
        member = member_of(report)
        await check_reachable_back(
            report.address,
            tuple(dict.fromkeys((report.check_port, *report.check_ports)))[:_MOST_CHECK_PORTS],
            report.check_nonce,
            port_range=member.port_range,
            timeout_s=_DIAL_BACK_TIMEOUT_S,
        )
        # An eviction may have voided what the host showed: the host decides how long the check takes. Until
        # its outbox is registered, by which it can be evicted itself, nothing must be awaited from here on.
        self._admission.check(report, self._versions)
        self._members.admit(member)
        whose = (report.certificate_request, member.name, member.address)
        try:
            certificate = self._authority.sign(*whose)
            ray_certificate = b"" if self._ray.identity is None else self._authority.sign_for_ray(*whose)
        except MeshError:
            self._members.remove(member.name)
            raise
        facts = member.facts
        log.info(
            "host_joined",
            host=member.name,
            address=member.address,
            memory_bytes=facts.memory_bytes,
            threads=facts.num_threads,
            speed_gb_per_s=round(facts.speed_gb_per_s, 1),
            gpus=[gpu.name for gpu in facts.gpus],
            num_hosts=len(self._members),
        )
        if facts.versions.llama_cpp != self._versions.llama_cpp:
            log.warning(
                "llama_cpp_differs",
                host=member.name,
                there=facts.versions.llama_cpp,
                here=self._versions.llama_cpp,
            )
        return _AdmittedHost(member, certificate, ray_certificate, self._admission.rejoin_secret(report))

    async def _listen(self, name: str, reports: AsyncIterator[wire.HostReport]) -> None:
        async for report in reports:
            if report.HasField("links"):
                answer = self._orders.get((name, report.links.id))
                if answer is not None and not answer.done():
                    answer.set_result(report.links)
            if report.certificate_request:
                self._renew(name, report.certificate_request)
            if changes := changes_of(report):
                self._members.update(name, **changes)
            if report.is_leaving:
                self._on_leaving(name)
            if report.ray_is_running:
                log.info("host_ready", host=name)

    def _ray_address(self, member: Member) -> str:
        """Address of the Ray cluster for a host, which may reach the head by another than its first."""
        reached = self.reached_by(member)
        if reached == self.token.addresses[0]:
            return self._ray.address
        return join_address(split_address(reached)[0], split_address(self._ray.address)[1])

    def _on_leaving(self, name: str) -> None:
        log.info("host_wants_to_leave", host=name)
        member = self._members.find(name)
        if member is not None and not member.layers:
            self.dismiss(name, "no layers of the mesh are on this host")

    def _renew(self, name: str, request_pem: bytes) -> None:
        for member in self._members:
            if member.name == name:
                try:
                    certificate = self._authority.sign(request_pem, name, member.address)
                except MeshError as error:
                    log.warning("certificate_refused", host=name, reason=error.message)
                else:
                    self._outboxes[name].put_nowait(wire.HeadReport(certificate=certificate))


async def _until_done(
    outbox: asyncio.Queue[wire.HeadReport], listener: asyncio.Task[None]
) -> AsyncIterator[wire.HeadReport]:
    """Items of `outbox`, until the host disconnects or is released."""
    while True:
        waiting = asyncio.ensure_future(outbox.get())
        try:
            await asyncio.wait({waiting, listener}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                return
        finally:
            waiting.cancel()
        report = waiting.result()
        yield report
        if report.is_closing:
            return
