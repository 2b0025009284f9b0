"""Links between hosts: measured over real gRPC streams on loopback, asked for by the head."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import pytest

from mesh.api.admin import MAX_PROBES
from mesh.cluster import link_probe
from mesh.cluster.addresses import free_port, is_free_everywhere
from mesh.cluster.certificates import Authority, make_certificate
from mesh.cluster.link_probe import (
    MAX_ANSWER_BYTES,
    EchoServer,
    LinkSurvey,
    carry_out,
    echo_key,
    links_of,
    measure_link,
    order_of,
)
from mesh.cluster.membership_client import Membership, find_head
from mesh.cluster.port_plan import CheckListener, own_part
from mesh.placement.link_choices import round_times
from mesh.placement.links import Link, LinkProbeOptions, Links
from spanmesh_proto import links_pb2 as wire
from spanmesh_proto import links_pb2_grpc as rpc
from spanmesh_proto import membership_pb2 as membership
from stages.transport.channels import key_metadata, open_channel
from stages.weights.fetch import MAX_REQUEST_BYTES
from tests.mesh.cluster.test_membership import HOST, head, until
from tests.support.port_ranges import free_range

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from spanmesh_proto.addresses import PortRange

PROBE_OPTIONS = LinkProbeOptions(hidden_bytes=2304, num_probes=5)


def new_authority() -> Authority:
    return Authority(make_certificate(dt.datetime.now(dt.UTC)))


AUTHORITY = new_authority()
A = AUTHORITY.own_identity(["a"], "127.0.0.1")


@asynccontextmanager
async def echo(
    secret: str = "secret",
    host: str = "b",
    authority: Authority = AUTHORITY,
    *,
    port_range: PortRange | None = None,
) -> AsyncIterator[str]:
    identity = authority.own_identity([host], "127.0.0.1")
    server = EchoServer(secret, lambda: identity)
    port = await server.start("127.0.0.1", port_range)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop()


async def test_round_trips_and_bandwidth_of_a_real_link() -> None:
    options = dataclasses.replace(PROBE_OPTIONS, bulk_bytes=3_000_001)
    async with echo() as address:
        link = await measure_link("a", "b", address, options, secret="secret", identity=A)
    assert (link.source, link.target, link.failure) == ("a", "b", "")
    assert len(link.small_ms) == len(link.hidden_ms) == 5
    assert min(link.small_ms) > 0
    assert link.hop_ms is not None
    assert link.bytes_per_s is not None
    # A loopback that moves less than a megabyte a second is none.
    assert link.bytes_per_s > 1e6
    assert link.as_dict()["rtt_ms"]["p50"] == sorted(link.small_ms)[2]


async def test_ports_of_a_range_are_tried_by_several_hosts_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port_range = free_range()
    options = dataclasses.replace(PROBE_OPTIONS, checks_ports=True)
    order = order_of(1, {}, options)

    async def measured(address: str) -> Link:
        order_for = type(order).FromString(order.SerializeToString())
        order_for.targets.add(name="b", address=address)
        (link,) = links_of("a", await carry_out(order_for, "a", "secret", A))
        assert link.failure == ""
        return link

    async with echo(port_range=port_range) as address:
        assert int(address.rpartition(":")[2]) in own_part(port_range)
        links = await asyncio.gather(*(measured(address) for _ in range(3)))
        assert {(link.ports, link.closed_ports) for link in links} == {(str(port_range), ())}
        assert links[0].as_dict()["ports"] == str(port_range)
        # Afterwards nobody listens there.
        deadline_s = asyncio.get_running_loop().time() + 5
        while not is_free_everywhere(port_range.first):
            assert asyncio.get_running_loop().time() < deadline_s
            await asyncio.sleep(0.02)

        opened = CheckListener.open

        async def open_some(self: CheckListener, host: str, found: PortRange | None) -> tuple[int, ...]:
            ports = await opened(self, host, found)
            self._servers[0].close()
            return ports

        monkeypatch.setattr(CheckListener, "open", open_some)
        link = await measured(address)
        assert (link.ports, link.closed_ports) == (str(port_range), (port_range.first,))
    async with echo() as address:
        link = await measured(address)
        assert (link.ports, link.closed_ports, link.as_dict()["ports"]) == ("", (), None)


async def test_whoever_does_not_know_the_secret_has_no_port_opened() -> None:
    async with echo(port_range=free_range()) as address, open_channel(address, "b", A) as channel:
        call = rpc.EchoStub(channel).OpenPorts(wire.PortCheck(), metadata=key_metadata(echo_key("guess")))
        with pytest.raises(grpc.aio.AioRpcError, match="mesh key"):
            await call.read()


async def test_whoever_does_not_know_the_secret_gets_no_answer() -> None:
    async with echo() as address:
        link = await measure_link("a", "b", address, PROBE_OPTIONS, secret="guess", identity=A)
    assert "mesh key" in link.failure
    assert link.hop_ms is None


async def test_a_host_that_is_not_there_is_named() -> None:
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    link = await measure_link("a", "b", address, PROBE_OPTIONS, secret="secret", identity=A)
    assert address in link.failure


async def test_nobody_can_have_huge_answers_made() -> None:
    async with echo() as address, open_channel(address, "b", A) as channel:
        call = rpc.EchoStub(channel).Bounce(metadata=key_metadata(echo_key("secret")))
        await call.write(wire.Probe(answer_bytes=MAX_ANSWER_BYTES + 1))
        with pytest.raises(grpc.aio.AioRpcError, match=f"{MAX_ANSWER_BYTES} at most"):
            await call.read()


async def test_the_head_has_every_host_measure_every_other(tmp_path: Path) -> None:
    other = dataclasses.replace(HOST, name="attic", ray_node_name="attic.1")
    async with (
        head(tmp_path) as side,
        echo(host="head", authority=side.authority) as own_address,
    ):
        port = int(own_address.rpartition(":")[2])
        own = dataclasses.replace(HOST, name="head", ray_node_name="head.1", echo_port=port)
        survey = LinkSurvey(
            own,
            side.members,
            side.service,
            "secret",
            side.authority.own_identity(["head"], "127.0.0.1"),
        )
        async with (
            Membership(await find_head(side.token), "secret", HOST) as one,
            Membership(await find_head(side.token), "secret", other) as two,
        ):
            await one.join()
            await two.join()
            await one.report_ready()
            await two.report_ready()
            await until(side.members, 2)
            listening = [asyncio.create_task(listen(member)) for member in (one, two)]
            links = await survey.measure(PROBE_OPTIONS)
            side.service.announce_to_all("ready")
            await side.service.dismiss_all()
            # What is measured does not show up among reported by the head.
            assert [await task for task in listening] == [["ready", "the head closed the mesh"]] * 2
    names = {"head", "studio", "attic"}
    assert {(link.source, link.target) for link in links.links} == {
        (a, b) for a in names for b in names if a != b
    }
    assert links.is_complete
    assert links.knows(names)


def test_a_report_of_as_many_probes_as_may_be_ordered_is_read() -> None:
    link = membership.MeasuredLink(
        target="x" * 63,
        small_ms=[1e3] * MAX_PROBES,
        hidden_ms=[1e3] * MAX_PROBES,
        bytes_per_s=1e9,
        failure="no answer " * 100,
    )
    report = membership.HostReport(links=membership.LinkReport(id=2**63, links=[link]))
    assert report.ByteSize() < MAX_REQUEST_BYTES


async def test_a_host_that_leaves_in_the_middle_is_told_of(tmp_path: Path) -> None:
    async with (
        head(tmp_path) as side,
        echo(host="head", authority=side.authority) as own_address,
    ):
        port = int(own_address.rpartition(":")[2])
        own = dataclasses.replace(HOST, name="head", ray_node_name="head.1", echo_port=port)
        survey = LinkSurvey(
            own,
            side.members,
            side.service,
            "secret",
            side.authority.own_identity(["head"], "127.0.0.1"),
        )
        async with Membership(await find_head(side.token), "secret", HOST) as one:
            await one.join()
            await one.report_ready()
            await until(side.members, 1)
            # It is a member, but does not listen.
            measuring = asyncio.create_task(survey.measure(PROBE_OPTIONS))
            await asyncio.sleep(0.2)
        links = await measuring
    failures = {(link.source, link.target): link.failure for link in links.links}
    assert failures["studio", "head"] == "host studio left the mesh"
    assert not links.is_complete


@asynccontextmanager
async def silent() -> AsyncIterator[tuple[int, asyncio.Event]]:
    """A port that takes connections and says nothing, and whether one came."""
    came = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def take(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        came.set()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1]), came
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)


@pytest.mark.parametrize("bulk_bytes", [0, 1000])
async def test_a_run_that_is_cancelled_measures_no_further_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bulk_bytes: int
) -> None:
    monkeypatch.setattr(link_probe, "_CONNECT_TIMEOUT_S", 0.5)
    async with head(tmp_path) as side, silent() as (attic, attic_asked), silent() as (head_port, head_asked):
        own = dataclasses.replace(HOST, name="head", ray_node_name="head.1", echo_port=head_port)
        identity = side.authority.own_identity(["head"], "127.0.0.1")
        survey = LinkSurvey(own, side.members, side.service, "secret", identity)
        other = dataclasses.replace(HOST, name="attic", ray_node_name="attic.1")
        async with (
            Membership(await find_head(side.token), "secret", HOST) as one,
            Membership(await find_head(side.token), "secret", other) as two,
        ):
            await one.join()
            await two.join()
            two._echo_port = attic
            await one.report_ready()
            await two.report_ready()
            await until(side.members, 2)
            # The first is asked for its links to attic, then to the head; attic itself hears nothing.
            listening = asyncio.create_task(listen(one))
            measuring = asyncio.create_task(survey.measure(LinkProbeOptions(2304, 5, bulk_bytes)))
            await attic_asked.wait()
            measuring.cancel()
            await asyncio.wait([measuring])
            await asyncio.sleep(1.5)
            assert not head_asked.is_set()
            listening.cancel()
            await asyncio.wait([listening])


async def listen(member: Membership) -> list[str]:
    return [state async for state in member.states()]


def link(source: str, target: str, hop_ms: float) -> Link:
    return Link(source, target, (2 * hop_ms,), (2 * hop_ms,))


def test_a_round_is_reckoned_from_what_either_end_measured() -> None:
    links = Links(
        (
            link("head", "a", 5.0),
            link("head", "b", 5.0),
            link("c", "head", 5.0),
            link("a", "b", 40.0),
            link("b", "c", 5.0),
            link("c", "a", 5.0),
            Link("b", "a", failure="no"),
        )
    )
    found = round_times(["a", "b", "b", "c"], "head", links)
    assert found is not None
    assert (found.order, found.order_ms) == (("a", "b", "c"), 55.0)
    assert found.best[1] == "c"
    assert found.best_ms == 20.0
    assert round_times(["a", "d"], "head", links) is None
    assert round_times([], "head", links) is None


def test_a_hop_is_what_the_hidden_states_take_there() -> None:
    # 1 ms each way for little, and 3 ms more for a row of hidden states.
    assert Link("a", "b", (2.0, 2.0, 9.0), (5.0, 5.0, 5.0)).hop_ms == 4.0
    assert Link("a", "b").hop_ms is None
