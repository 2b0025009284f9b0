"""A host that comes back: over real TLS and gRPC on loopback, with a stand-in for its Ray node."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.cluster.join import backoff_s, join_mesh
from mesh.cluster.join_token import encode
from mesh.cluster.membership_server import MembershipServer
from mesh.cluster.ray_node import MOST_STARTS
from mesh.options.host import JoinOptions
from mesh.util.tasks import Interruption
from spanmesh_proto.errors import ClusterError, HostUnreachable, InvalidJoinToken, JoinError
from tests.mesh.cluster.test_membership import HeadSide, head, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mesh.cluster.ray_node import RayNodeConfig


class StandIn:
    """Runs until it is told to end."""

    def __init__(self, config: RayNodeConfig, *, starts: bool = True) -> None:
        self.config = config
        self.starts = starts
        self.end = asyncio.Event()

    @property
    def is_running(self) -> bool:
        return not self.end.is_set()

    async def wait_ready(self) -> str:
        if not self.starts:
            self.end.set()
            raise ClusterError("Ray did not start")
        return "127.0.0.1:6379"

    async def ended(self) -> None:
        await self.end.wait()

    def stop(self) -> None:
        self.end.set()


class Host:
    """A `mesh join` in this process."""

    def __init__(
        self,
        side: HeadSide,
        give_up_after_s: float = 600.0,
        num_false_starts: int = 0,
        *,
        name: str = "studio",
        memory_bytes: int = 2**30,
        advertise: str | None = "127.0.0.1",
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self.nodes: list[StandIn] = []
        self.num_false_starts = num_false_starts
        self.interruption = Interruption()
        options = JoinOptions(
            token=encode(side.token),
            name=name,
            advertise=advertise,
            memory_bytes=memory_bytes,
            threads=1,
            give_up_after_s=give_up_after_s,
        )
        self.task = asyncio.create_task(
            join_mesh(
                options,
                self.interruption,
                start_node=self.start_node,
                jitter=lambda: 0.0,
                clock_s=clock_s,
            )
        )
        self.interruption.arm(self.task)

    def start_node(self, config: RayNodeConfig) -> StandIn:
        self.nodes.append(StandIn(config, starts=len(self.nodes) >= self.num_false_starts))
        return self.nodes[-1]

    async def outcome(self) -> None:
        await asyncio.wait_for(self.task, 60)


@given(st.floats(0, 1))
def test_pauses_grow_to_a_bound(jitter: float) -> None:
    pauses = list(itertools.islice(backoff_s(lambda: jitter), 8))
    assert pauses == sorted(pauses)
    assert 0.25 <= pauses[0] <= 0.75
    assert 1 <= pauses[-1] <= 3


async def test_a_host_whose_ray_node_ends_joins_again_with_another(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        host = Host(side)
        await until(side.members, 1)
        host.nodes[0].end.set()
        await until(side.members, 0)
        await until(side.members, 1)
        assert len({node.config.name for node in host.nodes}) == len(host.nodes) == 2
        (member,) = side.members
        assert member.ray_node_name == host.nodes[1].config.name
        side.service.dismiss("studio", "goodbye")
        await host.outcome()
        assert not host.nodes[1].is_running


async def test_a_ray_node_that_does_not_start_at_once_is_started_again(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        host = Host(side, num_false_starts=MOST_STARTS - 1)
        await until(side.members, 1)
        assert len(host.nodes) == MOST_STARTS
        side.service.dismiss("studio", "goodbye")
        await host.outcome()


async def test_a_ray_node_that_never_starts_is_given_up(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        host = Host(side, num_false_starts=MOST_STARTS)
        with pytest.raises(ClusterError, match="Ray did not start"):
            await host.outcome()
        assert len(host.nodes) == MOST_STARTS


async def test_a_host_that_lost_its_head_comes_back_with_the_node_that_it_has(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        host = Host(side)
        await until(side.members, 1)
        await side.server.kill()
        await until(side.members, 0)
        await asyncio.sleep(0.2)
        assert host.nodes[0].is_running
        again = MembershipServer(side.service, side.certificate)
        await again.start("127.0.0.1", int(side.source.address.rpartition(":")[2]))
        await until(side.members, 1)
        side.service.dismiss("studio", "goodbye")
        await host.outcome()
        await again.stop()
        assert len(host.nodes) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one address of loopback only")
async def test_a_host_that_comes_back_with_another_address_starts_its_node_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ["127.0.0.1"]
    monkeypatch.setattr("mesh.cluster.join.primary_address", lambda *_towards: own[-1])
    async with head(tmp_path) as side:
        host = Host(side, advertise=None)
        await until(side.members, 1)
        own.append("127.0.0.2")
        await side.server.kill()
        await until(side.members, 0)
        again = MembershipServer(side.service, side.certificate)
        await again.start("127.0.0.1", int(side.source.address.rpartition(":")[2]))
        await until(side.members, 1)
        (member,) = side.members
        assert member.address == "127.0.0.2"
        assert [node.config.address for node in host.nodes] == own
        assert [node.is_running for node in host.nodes] == [False, True]
        assert member.ray_node_name == host.nodes[1].config.name
        side.service.dismiss("studio", "goodbye")
        await host.outcome()
        await again.kill()


async def test_a_head_that_stays_away_is_given_up(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        host = Host(side, give_up_after_s=0.3)
        await until(side.members, 1)
        await side.server.kill()
        with pytest.raises(HostUnreachable, match=r"does not answer|ended|cannot"):
            await host.outcome()
        assert not host.nodes[0].is_running


async def test_a_token_that_was_replaced_meanwhile_ends_it_at_once(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        host = Host(side)
        await until(side.members, 1)
        side.service.evict("studio")
        with pytest.raises(InvalidJoinToken, match="evicted"):
            await host.outcome()


async def test_a_first_try_that_fails_says_why_at_once(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        first = Host(side)
        await until(side.members, 1)
        with pytest.raises(JoinError, match="in the mesh already"):
            await Host(side).outcome()
        side.service.dismiss("studio", "goodbye")
        await first.outcome()


async def test_ctrl_c_asks_the_head_and_waits_for_its_leave(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        host = Host(side)
        await until(side.members, 1)
        side.members.update("studio", layers="[0, 10)")
        signal.raise_signal(signal.SIGINT)
        await until(side.members, 0)
        await asyncio.sleep(0.1)
        assert not host.task.done()
        side.service.dismiss("studio", "its layers have moved")
        await host.outcome()
        assert host.interruption.received is signal.SIGINT


async def test_a_host_without_layers_may_go_at_once_and_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        host = Host(side)
        await until(side.members, 1)
        signal.raise_signal(signal.SIGTERM)
        await host.outcome()
        host = Host(side)
        await until(side.members, 1)
        side.members.update("studio", layers="[0, 10)")
        signal.raise_signal(signal.SIGINT)
        await until(side.members, 0)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(asyncio.CancelledError):
            await host.outcome()
        assert not host.nodes[0].is_running
