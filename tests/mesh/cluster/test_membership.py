"""Joining over real TLS and gRPC on loopback: who gets in, who does not and why, and how files travel."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import re
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import pytest
from structlog.testing import capture_logs

from mesh.cluster.addresses import free_port
from mesh.cluster.admission import Admissions
from mesh.cluster.certificates import LIFETIME, Authority, Certificate, make_certificate
from mesh.cluster.host_facts import HostFacts, Versions
from mesh.cluster.join_token import JoinToken
from mesh.cluster.link_probe import measure_link
from mesh.cluster.members import Member, Members
from mesh.cluster.membership_client import HeadEndpoint, Membership, find_head
from mesh.cluster.membership_server import MembershipServer, MembershipService, RayAccess
from mesh.cluster.port_plan import CheckListener, own_part
from mesh.placement.links import LinkProbeOptions
from spanmesh_proto import PROTOCOL_VERSION
from spanmesh_proto import membership_pb2 as wire
from spanmesh_proto import membership_pb2_grpc as rpc
from spanmesh_proto.errors import (
    HostUnreachable,
    InvalidJoinToken,
    JoinError,
    PortInUse,
    ProtocolVersionMismatch,
)
from stages.layers import LayerRange
from stages.weights.fetch import MAX_REQUEST_BYTES, MOST_RANGES, FetchSource, pinned_channel
from stages.weights.virtual_stages import StageCache
from tests.support.port_ranges import free_range
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from spanmesh_proto.addresses import PortRange
    from stages.weights.fetch import RateLimit
    from stages.weights.recipe import Recipe

VERSIONS = Versions("0.1.0", "0.3.36", "2.60.0", "3.11.7", "Linux x86_64")
HOST = Member("studio", "127.0.0.1", HostFacts(8 * 2**30, 4, 20.0, VERSIONS), "studio.1")
RAY = RayAccess("127.0.0.1:6379", "ray-token")
FAR_FUTURE_S = 2**39


@dataclasses.dataclass
class HeadSide:
    """What a test sees of the head."""

    token: JoinToken
    members: Members
    service: MembershipService
    server: MembershipServer
    cache: StageCache
    source: FetchSource
    authority: Authority
    certificate: Certificate


@asynccontextmanager
async def head(
    tmp_path: Path,
    expires_at_s: int = FAR_FUTURE_S,
    lifetime: dt.timedelta = LIFETIME,
    rate: RateLimit | None = None,
    *,
    ray: RayAccess = RAY,
    port_range: PortRange | None = None,
    clock_s: Callable[[], float] = time.time,
    steady_s: Callable[[], float] | None = None,
    former: tuple[Certificate, Admissions] | None = None,
) -> AsyncIterator[HeadSide]:
    """A head, of a new mesh or with what a former one knew, at the address in its token."""
    if former is None:
        certificate = make_certificate(dt.datetime.now(dt.UTC))
        address = f"127.0.0.1:{free_port('127.0.0.1')}"
        admissions = Admissions(JoinToken((address,), "secret", certificate.fingerprint, expires_at_s))
    else:
        certificate, admissions = former
    token = admissions.token
    (address,) = token.addresses
    members, cache = Members(), StageCache(tmp_path / "head")
    authority = Authority(certificate, lifetime=lifetime)
    service = MembershipService(
        admissions=admissions,
        ray=ray,
        members=members,
        cache=cache,
        versions=VERSIONS,
        authority=authority,
        clock_s=clock_s,
        # A clock that is put forward shows that time passes, unless another one shows that.
        steady_s=steady_s or clock_s,
        rate=rate,
        port_range=port_range,
    )
    server = MembershipServer(service, certificate)
    await server.start("127.0.0.1", int(address.rpartition(":")[2]))
    try:
        yield HeadSide(
            token,
            members,
            service,
            server,
            cache,
            FetchSource(address, certificate.certificate_pem, service.fetch_secret),
            authority,
            certificate,
        )
    finally:
        await server.stop()


async def join(token: JoinToken, member: Member = HOST) -> RayAccess:
    """Join and leave."""
    async with Membership(await find_head(token), token.secret, member) as membership:
        return await membership.join()


@asynccontextmanager
async def stranger(greeting: bytes, *, hangs_up: bool) -> AsyncIterator[int]:
    """A TCP server that is no head; gives its port."""
    writers: list[asyncio.StreamWriter] = []

    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(greeting)
        if hangs_up:
            writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)


async def until(members: Members, count: int) -> None:
    async with asyncio.timeout(20):
        while len(members.ready) != count:
            await members.changed()


async def test_an_admitted_host_learns_where_ray_is_and_is_forgotten_when_it_leaves(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        async with Membership(await find_head(side.token), "secret", HOST) as membership:
            assert await membership.join() == RAY
            assert [member.name for member in side.members] == ["studio"]
            assert not side.members.ready
            await membership.report_ready()
            await until(side.members, 1)
            (member,) = side.members
            assert member.echo_port > 0
            assert member == dataclasses.replace(HOST, is_ready=True, echo_port=member.echo_port)
        await until(side.members, 0)
        assert len(side.members) == 0


async def test_the_head_tells_what_goes_on_and_says_goodbye(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        async with Membership(await find_head(side.token), "secret", HOST) as membership:
            await membership.join()
            side.service.announce("studio", "layers [0, 10)")
            side.service.announce("nobody", "layers [10, 20)")
            goodbye = asyncio.create_task(side.service.dismiss_all())
            assert [state async for state in membership.states()] == [
                "layers [0, 10)",
                "the head closed the mesh",
            ]
        await goodbye


async def test_a_host_notices_that_the_head_is_gone(tmp_path: Path) -> None:
    async with head(tmp_path) as side, Membership(await find_head(side.token), "secret", HOST) as membership:
        await membership.join()
        await side.server.kill()
        with pytest.raises(HostUnreachable, match=f"the head at {side.token.addresses[0]}"):
            await anext(membership.states())


async def refused(token: JoinToken, reason: str, member: Member = HOST) -> None:
    """Join in vain: the host hears why within 5 s, and the head's log says it, with the address."""
    with capture_logs() as logs:
        async with asyncio.timeout(20):
            with pytest.raises(InvalidJoinToken, match=reason):
                await join(token, member)
    (entry,) = [entry for entry in logs if entry["event"] == "host_refused"]
    assert re.search(reason, entry["reason"])
    assert entry["peer"].startswith("ipv4:127.0.0.1:")


async def test_a_wrong_secret_is_refused_and_that_is_logged(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        await refused(dataclasses.replace(side.token, secret="guess"), "not this mesh's")
        assert len(side.members) == 0


async def test_an_expired_token_is_refused_by_the_head_whatever_the_host_believes(tmp_path: Path) -> None:
    async with head(tmp_path, expires_at_s=1_000_000_000) as side:
        await refused(side.token, "expired at 2001-09-09 01:46:40 UTC")


@pytest.mark.parametrize("num_bytes", [MAX_REQUEST_BYTES + 1, 8 * MAX_REQUEST_BYTES])
async def test_what_a_stranger_sends_is_small_or_not_read(tmp_path: Path, num_bytes: int) -> None:
    report = wire.HostReport(name="x" * num_bytes)
    request = wire.FetchRequest(secret="x" * num_bytes)
    async with (
        head(tmp_path) as side,
        pinned_channel(side.source.address, side.source.certificate_pem) as channel,
    ):
        stub = rpc.MembershipStub(channel)
        joining = stub.Join()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await joining.write(report)
        for call in (joining, stub.FetchStage(request)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await join(side.token) == RAY


async def test_the_largest_request_of_a_member_is_read(tmp_path: Path) -> None:
    async with (
        head(tmp_path) as side,
        pinned_channel(side.source.address, side.source.certificate_pem) as channel,
    ):
        model = TinyModel("llama").write(tmp_path / "model.gguf")
        recipe = side.cache.describe(model, LayerRange(0, 1))
        far = wire.ByteRange(start=2**64 - 1, num_bytes=2**63)
        request = wire.FetchRequest(
            secret=side.source.secret,
            sha256=recipe.sha256,
            ranges=[wire.ByteRange(start=0, num_bytes=8), *[far] * (MOST_RANGES - 1)],
        )
        chunks = [chunk.data async for chunk in rpc.MembershipStub(channel).FetchStage(request)]
    assert b"".join(chunks)[:4] == b"GGUF"
    assert request.ByteSize() < MAX_REQUEST_BYTES


async def test_a_token_replayed_after_an_eviction_is_refused_under_any_name_and_that_is_logged(
    tmp_path: Path,
) -> None:
    async with head(tmp_path) as side:
        seen = side.token
        async with Membership(await find_head(seen), seen.secret, HOST) as membership:
            await membership.join()
            side.service.evict("studio")
        await refused(seen, "studio was evicted")
        mini = dataclasses.replace(HOST, name="mini")
        await refused(seen, "not this mesh's", mini)
        assert await join(side.service.token, mini) == RAY


async def test_another_certificate_is_refused_before_the_secret_is_sent(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        with pytest.raises(InvalidJoinToken, match="certificate differs"):
            await find_head(dataclasses.replace(side.token, fingerprint=bytes(32)))


async def test_a_channel_trusts_the_pinned_certificate_only(tmp_path: Path) -> None:
    other = make_certificate(dt.datetime.now(dt.UTC))
    async with (
        head(tmp_path) as side,
        Membership(
            HeadEndpoint(side.token.addresses[0], other.certificate_pem), "secret", HOST
        ) as membership,
    ):
        with pytest.raises(HostUnreachable):
            await membership.join()
        assert len(side.members) == 0


async def test_a_host_without_a_certificate_request_is_refused_and_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.transport.channels.NewKey.request_pem", lambda _: b"")
    async with head(tmp_path) as side:
        with pytest.raises(JoinError, match="'studio' sent an invalid certificate request"):
            await join(side.token)
        assert len(side.members) == 0


async def test_a_host_renews_its_certificate_while_it_is_a_member(tmp_path: Path) -> None:
    async with (
        head(tmp_path, lifetime=dt.timedelta(seconds=1.5)) as side,
        Membership(await find_head(side.token), "secret", HOST) as membership,
    ):
        await membership.join()
        await membership.report_ready()
        listening = asyncio.ensure_future(anext(membership.states()))
        await until(side.members, 1)
        (member,) = side.members
        address = f"127.0.0.1:{member.echo_port}"
        own = side.authority.own_identity(["head"], "127.0.0.1")
        options = LinkProbeOptions(hidden_bytes=64, num_probes=1)
        for _ in range(2):
            async with asyncio.timeout(20):
                failure = "not asked yet"
                # On a busy machine a certificate may end before the next is there; without one it stays so.
                while failure:
                    link = await measure_link(
                        "head", "studio", address, options, secret="secret", identity=own
                    )
                    failure = link.failure
            # Longer than the first certificate lives.
            await asyncio.sleep(1.6)
        listening.cancel()


async def test_another_protocol_version_is_refused_with_both_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.cluster.members.PROTOCOL_VERSION", 99)
    async with head(tmp_path) as side:
        with pytest.raises(
            ProtocolVersionMismatch, match=rf"version 99 .* the head speaks {PROTOCOL_VERSION}"
        ):
            await join(side.token)


@pytest.mark.parametrize(("name", "version"), [("ray", "2.59.0"), ("python", "3.12.1")])
async def test_another_ray_or_python_is_refused_with_both_named(
    tmp_path: Path, name: str, version: str
) -> None:
    versions = dataclasses.replace(VERSIONS, **{name: version})
    member = dataclasses.replace(HOST, facts=dataclasses.replace(HOST.facts, versions=versions))
    async with head(tmp_path) as side:
        with pytest.raises(JoinError, match=f"{version}.*{getattr(VERSIONS, name)}"):
            await join(side.token, member)


async def test_another_patch_release_of_python_is_welcome(tmp_path: Path) -> None:
    versions = dataclasses.replace(VERSIONS, python="3.11.99")
    member = dataclasses.replace(HOST, facts=dataclasses.replace(HOST.facts, versions=versions))
    async with head(tmp_path) as side:
        assert await join(side.token, member) == RAY


async def test_a_second_host_of_the_same_name_is_refused(tmp_path: Path) -> None:
    async with head(tmp_path) as side, Membership(await find_head(side.token), "secret", HOST) as first:
        await first.join()
        with pytest.raises(JoinError, match="named 'studio' is in the mesh already"):
            await join(side.token)
        assert await join(side.token, dataclasses.replace(HOST, name="mini")) == RAY


@pytest.mark.parametrize("name", ["", "a b", "-x", "x" * 64, "naïve"])
async def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    async with head(tmp_path) as side:
        with pytest.raises(JoinError, match="cannot be a host's name"):
            await join(side.token, dataclasses.replace(HOST, name=name))


async def test_a_host_that_cannot_be_reached_back_hears_which_address_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = free_port("127.0.0.1")

    async def listen_elsewhere(_self: object, _address: str, _range: object) -> tuple[int, ...]:
        return (nobody,)

    monkeypatch.setattr(CheckListener, "open", listen_elsewhere)
    async with head(tmp_path) as side:
        with pytest.raises(HostUnreachable, match=rf"back at 127\.0\.0\.1:{nobody}: "):
            await join(side.token)


async def test_another_machine_at_the_advertised_address_does_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with head(tmp_path) as side, stranger(b"", hangs_up=True) as port:

        async def listen_elsewhere(_self: object, _address: str, _range: object) -> tuple[int, ...]:
            return (port,)

        monkeypatch.setattr(CheckListener, "open", listen_elsewhere)
        with pytest.raises(HostUnreachable, match="another machine answers"):
            await join(side.token)


async def test_an_address_of_no_interface_is_refused_at_once(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        with pytest.raises(JoinError, match=r"cannot listen on 203\.0\.113\.9"):
            await join(side.token, dataclasses.replace(HOST, address="203.0.113.9"))


def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def test_a_host_listens_in_its_range_and_the_head_knows_it(tmp_path: Path) -> None:
    port_range = free_range()
    host = dataclasses.replace(HOST, port_range=port_range)
    async with head(tmp_path) as side, Membership(await find_head(side.token), "secret", host) as membership:
        assert await membership.join() == RAY
        await membership.report_ready()
        await until(side.members, 1)
        (member,) = side.members
        assert member.port_range == port_range
        assert member.echo_port in own_part(port_range)


@pytest.mark.parametrize("num_closed", [1, 8])
async def test_a_host_whose_ports_do_not_all_get_through_hears_which_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_closed: int
) -> None:
    port_range = free_range()
    opened = CheckListener.open

    async def open_some(self: CheckListener, address: str, found: PortRange | None) -> tuple[int, ...]:
        ports = await opened(self, address, found)
        for server in self._servers[-num_closed:]:
            server.close()
        return ports

    monkeypatch.setattr(CheckListener, "open", open_some)
    async with head(tmp_path) as side:
        with pytest.raises(HostUnreachable) as refused:
            await join(side.token, dataclasses.replace(HOST, port_range=port_range))
        assert len(side.members) == 0
    said = refused.value.message
    first_closed = port_range.last if num_closed == 1 else port_range.first
    assert f"the head cannot reach this host back at 127.0.0.1:{first_closed}: " in said
    assert f"let all TCP to {port_range} through the firewall of 127.0.0.1" in said
    assert "--advertise" in said
    if num_closed == 1:
        assert f"of --port-range {port_range} it reached {port_range.first}, " in said
        assert f" and not {port_range.last}: let" in said
    else:
        assert f"of --port-range {port_range} it tried {port_range.first}, " in said


async def test_a_range_in_which_others_listen_is_refused_at_once(tmp_path: Path) -> None:
    port_range = free_range()
    host = dataclasses.replace(HOST, port_range=port_range)
    listeners = [await asyncio.start_server(hang_up, "127.0.0.1", port) for port in port_range.ports]
    try:
        async with head(tmp_path) as side:
            with pytest.raises(JoinError, match=f"listen on the ports of --port-range {port_range}"):
                await join(side.token, host)
            # Some of them may be taken.
            for listener in listeners[:-3]:
                listener.close()
            await asyncio.sleep(0)
            assert await join(side.token, host) == RAY
    finally:
        for listener in listeners:
            listener.close()


async def test_a_host_that_cannot_reach_ray_of_the_head_hears_which_ports_to_open(tmp_path: Path) -> None:
    port_range = free_range()
    ray = RayAccess(f"127.0.0.1:{port_range.first}", "ray-token")
    async with head(tmp_path, ray=ray, port_range=port_range) as side:
        with pytest.raises(HostUnreachable) as refused:
            await join(side.token)
        assert f"cannot reach Ray of the head at {ray.address}: " in refused.value.message
        assert f"let TCP to {port_range}, which are the head's --port-range" in refused.value.message
        listener = await asyncio.start_server(hang_up, "127.0.0.1", port_range.first)
        assert await join(side.token) == ray
        listener.close()


async def test_a_head_takes_the_first_free_port_of_its_range(tmp_path: Path) -> None:
    ports = own_part(free_range())
    async with head(tmp_path) as side:
        servers = [MembershipServer(side.service, side.certificate) for _ in range(2)]
        assert [await server.start("127.0.0.1", 0, ports) for server in servers] == [*ports[:2]]
        with pytest.raises(PortInUse, match=f"127.0.0.1:{ports[0]}; choose another"):
            await MembershipServer(side.service, side.certificate).start("127.0.0.1", ports[0], ports)
        for server in servers:
            await server.kill()


@pytest.mark.quiet
async def test_an_unreachable_head_is_named_within_5_s() -> None:
    nobody = free_port("127.0.0.1")
    start_s = time.monotonic()
    with pytest.raises(HostUnreachable, match=f"127.0.0.1:{nobody}: "):
        await find_head(JoinToken((f"127.0.0.1:{nobody}",), "s", bytes(32), FAR_FUTURE_S))
    async with stranger(b"", hangs_up=False) as port:
        with pytest.raises(HostUnreachable, match=f"127.0.0.1:{port} within 1.8 s"):
            await find_head(JoinToken((f"127.0.0.1:{port}",), "s", bytes(32), FAR_FUTURE_S))
    assert time.monotonic() - start_s < 5


async def test_the_address_that_answers_is_used(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        nobody = f"127.0.0.1:{free_port('127.0.0.1')}"
        found = await find_head(dataclasses.replace(side.token, addresses=(nobody, *side.token.addresses)))
        assert found.address == side.token.addresses[0]


async def test_a_host_uses_the_address_of_the_head_that_it_reached(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        (reached,) = side.token.addresses
        port = reached.rpartition(":")[2]
        side.service.listens_at(f"192.0.2.9:{port}", reached)
        assert (await join(side.token)).address == RAY.address
        from_there = dataclasses.replace(HOST, head_address="127.0.0.1")
        for ray_address in ("127.0.0.1:6379", "192.0.2.9:6379"):
            side.service._ray = dataclasses.replace(RAY, address=ray_address)
            assert (await join(side.token, from_there)).address == "127.0.0.1:6379"
        assert side.service.reached_by(HOST) == f"192.0.2.9:{port}"
        assert side.service.reached_by(from_there) == reached
        # What a host tells counts only if it is the head's.
        liar = dataclasses.replace(HOST, head_address="203.0.113.9")
        assert side.service.reached_by(liar) == f"192.0.2.9:{port}"


def test_a_member_with_several_addresses_is_reached_by_that_which_its_peer_knows() -> None:
    own = dataclasses.replace(HOST, address="10.8.0.6", other_addresses=("192.168.7.1",))
    peers = {"": "10.8.0.6", "10.8.0.6": "10.8.0.6", "192.168.7.1": "192.168.7.1", "203.0.113.9": "10.8.0.6"}
    for head_address, at in peers.items():
        assert own.address_for(dataclasses.replace(HOST, head_address=head_address)) == at
        assert HOST.address_for(dataclasses.replace(HOST, head_address=head_address)) == HOST.address
    assert (own.bind_address, HOST.bind_address) == ("0.0.0.0", HOST.address)


async def test_what_speaks_no_tls_is_no_head() -> None:
    async with stranger(b"220 mail.example ready\r\n" * 10, hangs_up=False) as port:
        with pytest.raises(HostUnreachable, match="not a mesh head"):
            await find_head(JoinToken((f"127.0.0.1:{port}",), "s", bytes(32), FAR_FUTURE_S))


async def test_garbage_on_the_port_does_no_harm(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        host, port = side.token.addresses[0].split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n\r\n" * 100)
        await writer.drain()
        writer.close()
        assert await join(side.token) == RAY


def put(cache: StageCache, folder: Path) -> Recipe:
    """Let the head know a stage."""
    return cache.describe(TinyModel("llama").write(folder / "model.gguf"), LayerRange(2, 5))
