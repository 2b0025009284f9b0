"""Hosts that go, and hosts that are shown out, over real TLS and gRPC on loopback."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

import pytest

from mesh.cluster.admission import AdmissionControl, Admissions
from mesh.cluster.membership_client import Membership, find_head
from spanmesh_proto.errors import InvalidJoinToken, JoinError
from stages.weights.disk_cache import StageStore
from stages.weights.fetch import fetch_stage
from tests.mesh.cluster.test_membership import HOST, HeadSide, head, join, put, until

if TYPE_CHECKING:
    from pathlib import Path

OTHER = dataclasses.replace(HOST, name="attic", ray_node_name="attic.1")


async def joined(side: HeadSide, membership: Membership) -> None:
    before = len(side.members.ready)
    await membership.join()
    await membership.report_ready()
    await until(side.members, before + 1)


async def test_a_host_that_wants_to_leave_stays_until_it_is_let_go(tmp_path: Path) -> None:
    async with (
        head(tmp_path) as side,
        Membership(await find_head(side.token), "secret", HOST) as membership,
    ):
        await joined(side, membership)
        side.members.update("studio", layers="[0, 10)")
        states = membership.states()
        await membership.report_leaving()
        await until(side.members, 0)
        (member,) = side.members
        assert (member.is_ready, member.is_leaving) == (True, True)
        side.service.dismiss("studio", "its layers have moved")
        async with asyncio.timeout(20):
            assert [state async for state in states][-1] == "its layers have moved"


async def test_a_host_is_asked_whether_it_is_there(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        assert not await side.service.answers("studio", 5)
        async with Membership(await find_head(side.token), "secret", HOST) as membership:
            await joined(side, membership)
            # It answers while it listens to what the head has to say, and only then.
            assert not await side.service.answers("studio", 0.1)
            states = asyncio.ensure_future(anext(membership.states()))
            assert await side.service.answers("studio", 5)
            states.cancel()


async def test_an_evicted_host_is_cut_off_and_its_token_admits_nobody(tmp_path: Path) -> None:
    async with (
        head(tmp_path) as side,
        Membership(await find_head(side.token), "secret", HOST) as bad,
        Membership(await find_head(side.token), "secret", OTHER) as good,
    ):
        await joined(side, bad)
        await joined(side, good)
        side.service.evict("studio")
        assert [member.name for member in side.members] == ["attic"]
        with pytest.raises(InvalidJoinToken, match="studio was evicted"):
            await asyncio.wait_for(anext(bad.states()), 5)
        new = dataclasses.replace(side.token, secret=side.service.token.secret)
        with pytest.raises(InvalidJoinToken, match="not this mesh's"):
            await join(side.token, dataclasses.replace(HOST, name="cellar"))
        with pytest.raises(InvalidJoinToken, match="studio was evicted"):
            await join(new)
        await join(new, dataclasses.replace(HOST, name="cellar"))
        # Who was in keeps its place, and stage files are sent for the new secret only.
        assert side.members.find("attic") is not None
        recipe = put(side.cache, tmp_path)
        for secret in (side.source.secret, side.token.secret, new.secret, ""):
            with pytest.raises(InvalidJoinToken, match="its secret differs"):
                await fetch_stage(
                    StageStore(tmp_path / "bad"),
                    recipe.sha256,
                    dataclasses.replace(side.source, secret=secret),
                )
        source = dataclasses.replace(side.source, secret=side.service.fetch_secret)
        fetched = await fetch_stage(StageStore(tmp_path / "good"), recipe.sha256, source)
        assert fetched.path.exists()


async def test_only_a_host_that_has_joined_can_be_evicted(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        with pytest.raises(JoinError, match="no host named 'nobody' has joined"):
            side.service.evict("nobody")
        assert side.service.token.secret == side.token.secret


async def test_a_replaced_secret_differs(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        admission = AdmissionControl(
            Admissions(side.token), 3600.0, clock_s=lambda: 1000.0, steady_s=lambda: 0.0
        )
        admission.evict("a", ())
        first = admission.token.secret
        admission.evict("b", ())
        assert len({side.token.secret, first, admission.token.secret}) == 3
        assert admission.token.fingerprint == side.token.fingerprint
