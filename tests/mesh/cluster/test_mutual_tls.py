"""Who gets to talk to a stage: real servers and real handshakes on loopback; only the model is left out."""

from __future__ import annotations

import asyncio
import datetime as dt
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import pytest
import structlog

from mesh.cluster.certificates import Authority, Certificate, make_certificate
from spanmesh_proto import PROTOCOL_VERSION
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto import windows_pb2_grpc as rpc
from spanmesh_proto.errors import MeshError
from stages.serving.server import StageService
from stages.transport.channels import SERVER_OPTIONS, Identity, NewKey, add_port
from stages.transport.links import StageLink
from tests.support.fake_stage import FakeRuntime
from tests.support.ring_harness import MESH_ID, MESH_KEY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

NOW = dt.datetime.now(dt.UTC)
HEAD = make_certificate(NOW - dt.timedelta(days=60))
AUTHORITY = Authority(HEAD)
STAGE = AUTHORITY.own_identity(["studio"], "127.0.0.1")
COORDINATOR = AUTHORITY.own_identity(["coordinator"], "127.0.0.1")
STRANGER = Authority(make_certificate(NOW)).own_identity(["coordinator"], "127.0.0.1")
# What a refusal may take.
PATIENCE_S = 5


def signed(authority: Authority) -> Identity:
    key = NewKey()
    certificate = authority.sign(key.request_pem(), "studio", "127.0.0.1")
    return key.identity(certificate, HEAD.certificate_pem)


def expired() -> Identity:
    return signed(Authority(HEAD, clock=lambda: NOW - dt.timedelta(days=40)))


def signed_by_a_host() -> Identity:
    """A member of the mesh passes itself off as the authority."""
    made = signed(Authority(Certificate(STAGE.certificate_pem, STAGE.private_key_pem)))
    return Identity(made.certificate_pem + STAGE.certificate_pem, made.private_key_pem, made.authority_pem)


@asynccontextmanager
async def stage(
    shown: Callable[[], Identity] | None = lambda: STAGE, *, patience_s: float = 0.2
) -> AsyncIterator[str]:
    """One stage; gives its address."""
    service = StageService(
        FakeRuntime(0, 1),  # type: ignore[arg-type]  # a fake has all that a stage uses
        stage_index=0,
        mesh_id=MESH_ID,
        mesh_key=MESH_KEY,
    )
    service.handshakes._patience_s = patience_s
    server = grpc.aio.server(interceptors=[service.key_check], options=SERVER_OPTIONS)
    rpc.add_StageServicer_to_server(service, server)
    port = add_port(server, "127.0.0.1:0", shown, service.handshakes.connected)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
        await service.close()


async def greet(
    address: str, identity: Identity | None, *, host: str = "studio", mesh_key: str = MESH_KEY
) -> int:
    """Shake hands as the coordinator does; gives the stage's protocol version."""
    hello = wire.Hello(protocol_version=PROTOCOL_VERSION, mesh_id=MESH_ID, sender="test")
    link = StageLink(address, hello, mesh_key, lambda _error: None, host=host, identity=identity)
    async with asyncio.timeout(PATIENCE_S):
        try:
            return (await link.open()).protocol_version
        finally:
            await link.close()


async def test_members_of_a_mesh_hear_each_other() -> None:
    async with stage() as address:
        assert await greet(address, COORDINATOR) == PROTOCOL_VERSION
        assert await greet(address, signed(AUTHORITY)) == PROTOCOL_VERSION


@pytest.mark.parametrize(
    "identity",
    [
        pytest.param(None, id="plain text"),
        pytest.param(STRANGER, id="another mesh"),
        pytest.param(
            Identity(STRANGER.certificate_pem, STRANGER.private_key_pem, HEAD.certificate_pem),
            id="another mesh that knows this one's authority",
        ),
        pytest.param(expired(), id="an expired certificate"),
        pytest.param(signed_by_a_host(), id="a certificate signed by a host"),
    ],
)
async def test_who_is_no_member_is_turned_away_even_with_the_mesh_key_and_that_is_logged(
    identity: Identity | None,
) -> None:
    with structlog.testing.capture_logs() as logs:
        async with stage() as address:
            with pytest.raises(MeshError, match="does not answer"):
                await greet(address, identity)
            # Nobody else suffers.
            assert await greet(address, COORDINATOR) == PROTOCOL_VERSION
            async with asyncio.timeout(PATIENCE_S):
                while "handshake_without_call" not in [entry["event"] for entry in logs]:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)


async def test_whoever_calls_is_no_stranger_and_one_who_does_not_is_told_apart_from_ten_who_do() -> None:
    with structlog.testing.capture_logs() as logs:
        async with stage(patience_s=2.0) as address:
            for _ in range(10):
                await greet(address, COORDINATOR)
            with pytest.raises(MeshError, match="mesh key is missing or wrong"):
                await greet(address, COORDINATOR, mesh_key="of the ring before")
            await asyncio.sleep(2.2)
            assert [entry for entry in logs if entry["event"] == "handshake_without_call"] == []
            _, writer = await asyncio.open_connection(*address.split(":"))
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            for _ in range(10):
                await greet(address, COORDINATOR)
            for _ in range(600):
                if "handshake_without_call" in [entry["event"] for entry in logs]:
                    break
                await asyncio.sleep(0.1)
            await asyncio.sleep(0.5)
            writer.close()
    assert [entry["event"] for entry in logs].count("handshake_without_call") == 1


async def test_whoever_only_trusts_but_shows_nothing_is_turned_away() -> None:
    async with stage() as address:
        channel = grpc.aio.secure_channel(
            address,
            grpc.ssl_channel_credentials(HEAD.certificate_pem),
            options=(("grpc.ssl_target_name_override", "studio"),),
        )
        async with channel, asyncio.timeout(PATIENCE_S):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await rpc.StageStub(channel).Link().read()
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_member_without_the_key_of_this_ring_is_refused_and_that_is_logged() -> None:
    with structlog.testing.capture_logs() as logs:
        async with stage() as address:
            with pytest.raises(MeshError, match="mesh key is missing or wrong"):
                await greet(address, COORDINATOR, mesh_key="of the ring before")
    (entry,) = [entry for entry in logs if entry["event"] == "peer_refused"]
    assert entry["peer"].startswith("ipv4:127.0.0.1:")


async def test_another_host_at_the_address_of_a_stage_is_not_taken_for_it() -> None:
    async with stage() as address:
        with pytest.raises(MeshError, match="does not answer"):
            await greet(address, COORDINATOR, host="attic")


@pytest.mark.parametrize("shown", [None, lambda: STRANGER, expired], ids=["plain", "foreign", "expired"])
async def test_a_stage_that_is_no_member_is_not_talked_to(shown: Callable[[], Identity] | None) -> None:
    async with stage(shown) as address:
        with pytest.raises(MeshError, match="does not answer"):
            await greet(address, COORDINATOR)


async def test_a_renewed_certificate_counts_from_the_next_connection() -> None:
    shown = [expired()]
    async with stage(lambda: shown[-1]) as address:
        with pytest.raises(MeshError, match="does not answer"):
            await greet(address, COORDINATOR)
        shown.append(signed(AUTHORITY))
        assert await greet(address, COORDINATOR) == PROTOCOL_VERSION
