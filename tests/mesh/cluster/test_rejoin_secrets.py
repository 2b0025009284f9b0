"""Hosts that were admitted once come back without a valid token: over real TLS and gRPC on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from mesh.cluster.addresses import free_port
from mesh.cluster.admission import AdmissionControl, Admissions, new_secret
from mesh.cluster.certificates import make_certificate
from mesh.cluster.join_token import JoinToken
from mesh.cluster.members import report_of
from mesh.cluster.membership_client import Membership, find_head
from mesh.cluster.membership_server import MembershipServer
from mesh.cluster.port_plan import CheckListener
from spanmesh_proto.errors import HostUnreachable, InvalidJoinToken, JoinError
from stages.weights.disk_cache import StageStore
from stages.weights.fetch import fetch_stage
from tests.mesh.cluster.test_membership import HOST, VERSIONS, HeadSide, head, until
from tests.mesh.cluster.test_membership_rejoin import Host

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.cluster.members import Member
    from spanmesh_proto import membership_pb2 as wire

HOUR_S = 3600
DAY_S = 24 * HOUR_S
OTHER = dataclasses.replace(HOST, name="attic", ray_node_name="attic.1")


@dataclass
class Clock:
    """A wall clock that is put forward."""

    now_s: float

    def __call__(self) -> float:
        return self.now_s


def a_clock() -> Clock:
    return Clock(time.time())


def admission_at(clock: Clock, admissions: Admissions) -> AdmissionControl:
    return AdmissionControl(admissions, HOUR_S, clock_s=clock, steady_s=clock)


def in_a_day(clock: Clock) -> int:
    return int(clock.now_s + DAY_S)


async def admitted(side: HeadSide, member: Member = HOST, *, secret: str = "", rejoin: str = "") -> str:
    """Join and leave; returns the secret for the next time."""
    token = side.token
    membership = Membership(await find_head(token), secret or token.secret, member, rejoin_secret=rejoin)
    async with membership:
        await membership.join()
        return membership.rejoin_secret


async def refused(side: HeadSide, reason: str, member: Member = HOST, **shown: str) -> None:
    with pytest.raises(InvalidJoinToken, match=reason):
        await admitted(side, member, **shown)


async def until_gone(side: HeadSide) -> None:
    async with asyncio.timeout(20):
        while len(side.members):
            await side.members.changed()


async def test_a_host_comes_back_when_the_token_has_expired_and_others_do_not(tmp_path: Path) -> None:
    clock = a_clock()
    async with head(tmp_path, in_a_day(clock), clock_s=clock) as side:
        secret = await admitted(side)
        await until_gone(side)
        clock.now_s += 2 * DAY_S
        await refused(side, "expired at")
        await refused(side, "expired at", rejoin="a guess")
        # Its secret is of no use under another name, and neither is another host's.
        await refused(side, "expired at", OTHER, rejoin=secret)
        # The same again, as often as it likes, whatever became of the token that it knows.
        for shown in ("", "of another day"):
            assert await admitted(side, secret=shown, rejoin=secret) == secret
            await until_gone(side)
        # A clock that is set back changes nothing.
        clock.now_s -= 30 * DAY_S
        assert await admitted(side, secret="of another day", rejoin=secret) == secret


async def test_every_host_has_a_secret_of_its_own(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        secrets = {await admitted(side), await admitted(side, OTHER)}
        assert len(secrets) == 2
        assert min(map(len, secrets)) >= 43
        # A process that was started again has only the token, and voids what the one before it was given.
        await until_gone(side)
        first = side.service.admissions.rejoin_secrets["studio"]
        assert await admitted(side) not in secrets
        assert side.service.admissions.rejoin_secrets["studio"] != first


async def test_a_host_that_is_refused_for_its_name_voids_no_secret(tmp_path: Path) -> None:
    async with head(tmp_path) as side, Membership(await find_head(side.token), "secret", HOST) as first:
        await first.join()
        with pytest.raises(JoinError, match="in the mesh already"):
            await admitted(side)
        assert side.service.admissions.rejoin_secrets == {"studio": first.rejoin_secret}


async def test_an_eviction_voids_secrets_of_hosts_that_are_away_and_renews_the_token(tmp_path: Path) -> None:
    clock = a_clock()
    third = dataclasses.replace(HOST, name="cellar", ray_node_name="cellar.1")
    async with (
        head(tmp_path, in_a_day(clock), clock_s=clock) as side,
        Membership(await find_head(side.token), "secret", HOST) as bad,
        Membership(await find_head(side.token), "secret", OTHER) as good,
    ):
        # Whoever has the token may have joined under several names, for later.
        stashed = await admitted(side, third)
        await bad.join()
        await good.join()
        clock.now_s += 10 * DAY_S
        side.service.evict("studio")
        assert side.service.token.expires_at_s == pytest.approx(clock.now_s + DAY_S, abs=1)
        new = side.service.token.secret
        assert new != side.token.secret
        await refused(side, "studio was evicted", rejoin=bad.rejoin_secret)
        await refused(side, "studio was evicted", secret=new, rejoin=bad.rejoin_secret)
        await refused(side, "not this mesh's", third, rejoin=stashed)
        # The new token admits, and the host that stayed keeps its place.
        await admitted(side, third, secret=new)
        assert side.service.admissions.rejoin_secrets["attic"] == good.rejoin_secret
        assert side.service.admissions.evicted == ("studio",)


class HeldBack(CheckListener):
    """Answers the head's check of a joining host's port when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.is_dialled, self.may_answer = asyncio.Event(), asyncio.Event()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.is_dialled.set()
        await self.may_answer.wait()
        await super()._answer(reader, writer)


@pytest.mark.parametrize(
    ("member", "shown", "reason"),
    [
        (OTHER, "token", "not this mesh's"),
        (OTHER, "rejoin secret", "not this mesh's"),
        (HOST, "token", "studio was evicted"),
    ],
)
async def test_an_eviction_refuses_a_host_that_is_joining_by_what_it_voids(
    tmp_path: Path, member: Member, shown: str, reason: str
) -> None:
    async with head(tmp_path) as side:
        rejoin = await admitted(side, OTHER) if shown == "rejoin secret" else ""
        await until_gone(side)
        async with (
            Membership(await find_head(side.token), "secret", HOST) as bad,
            Membership(
                await find_head(side.token), "" if rejoin else "secret", member, rejoin_secret=rejoin
            ) as late,
        ):
            await bad.join()
            # The joining host decides how long the head waits between its first check and the admission.
            late._check = held = HeldBack()
            joining = asyncio.create_task(late.join())
            async with asyncio.timeout(20):
                await held.is_dialled.wait()
            side.service.evict("studio")
            held.may_answer.set()
            with pytest.raises(InvalidJoinToken, match=reason):
                await joining
            assert late.rejoin_secret == rejoin
            assert side.service.admissions.rejoin_secrets == {}
            assert side.members.find("attic") is None


async def test_a_host_that_is_away_can_be_evicted(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        secret = await admitted(side)
        await until_gone(side)
        with pytest.raises(JoinError, match="no host named 'attic' has joined"):
            side.service.evict("attic")
        assert side.service.token.secret == side.token.secret
        side.service.evict("studio")
        assert side.service.admissions.evicted == ("studio",)
        await refused(side, "studio was evicted", rejoin=secret)
        with pytest.raises(JoinError, match="no host named 'studio' has joined"):
            side.service.evict("studio")


async def test_a_head_is_not_evicted_for_a_host_that_had_its_name(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        await admitted(side)
        await until_gone(side)
        # As `mesh serve` admits itself, on a machine that was another head's host.
        side.members.admit(HOST)
        with pytest.raises(JoinError, match="no host named 'studio' has joined"):
            side.service.evict("studio")
        assert side.members.find("studio") is not None


async def test_a_host_that_was_sent_away_for_good_needs_a_token(tmp_path: Path) -> None:
    clock = a_clock()
    async with head(tmp_path, in_a_day(clock), clock_s=clock) as side:
        async with Membership(await find_head(side.token), "secret", HOST) as membership:
            await membership.join()
            side.service.dismiss("studio", "its layers have moved")
            async with asyncio.timeout(20):
                assert [state async for state in membership.states()] == ["its layers have moved"]
                while side.service.admissions.rejoin_secrets:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        await until_gone(side)
        clock.now_s += 2 * DAY_S
        await refused(side, "expired at", rejoin=membership.rejoin_secret)


async def test_the_next_head_goes_on_with_what_the_one_before_knew(tmp_path: Path) -> None:
    clock = a_clock()
    async with head(tmp_path, in_a_day(clock), clock_s=clock) as former:
        secret = await admitted(former)
        async with Membership(await find_head(former.token), "secret", OTHER) as bad:
            await bad.join()
            former.service.evict("attic")
        # The eviction has voided it.
        await until_gone(former)
        secret = await admitted(former, secret=former.service.token.secret)
        await until_gone(former)
        clock.now_s += 10 * DAY_S
        known = former.certificate, former.service.admissions
    async with head(tmp_path, clock_s=clock, former=known) as side:
        await refused(side, "expired at")
        await refused(side, "attic was evicted", OTHER, rejoin=bad.rejoin_secret)
        assert await admitted(side, rejoin=secret) == secret


async def test_a_mesh_join_outlasts_its_token_over_a_loss_of_the_head(tmp_path: Path) -> None:
    clock = a_clock()
    async with head(tmp_path, in_a_day(clock), clock_s=clock) as side:
        host = Host(side, clock_s=clock)
        await until(side.members, 1)
        clock.now_s += 2 * DAY_S
        await side.server.kill()
        await until(side.members, 0)
        again = MembershipServer(side.service, side.certificate)
        await again.start("127.0.0.1", int(side.source.address.rpartition(":")[2]))
        await until(side.members, 1)
        assert len(host.nodes) == 1
        # A process that begins now is told of the expiry.
        with pytest.raises(InvalidJoinToken, match="expired at"):
            await Host(side, clock_s=clock).outcome()
        side.service.dismiss("studio", "goodbye")
        await host.outcome()
        await again.stop()


def report(name: str, *, secret: str = "", rejoin_secret: str = "") -> wire.HostReport:
    return report_of(
        dataclasses.replace(HOST, name=name),
        secret=secret,
        rejoin_secret=rejoin_secret,
        check_ports=(1,),
        check_nonce=b"",
        certificate_request=b"",
    )


def test_only_so_many_secrets_are_kept_the_latest_ones() -> None:
    admission = admission_at(a_clock(), Admissions(JoinToken((), "s", bytes(32), 2**39)))
    first = admission.rejoin_secret(report("host-0", secret="s"))
    for number in range(1, 1024):
        admission.rejoin_secret(report(f"host-{number}", secret="s"))
    # It was here again, so that another is the oldest.
    assert admission.rejoin_secret(report("host-0", rejoin_secret=first)) == first
    admission.rejoin_secret(report("host-1024", secret="s"))
    kept = admission.admissions.rejoin_secrets
    assert len(kept) == 1024
    assert "host-0" in kept
    assert "host-1" not in kept


def test_an_empty_secret_is_none() -> None:
    admissions = Admissions(JoinToken((), "s", bytes(32), 1000), {"studio": "r"})
    clock = Clock(999.0)
    admission = admission_at(clock, admissions)
    admission.check(report("studio", secret="s"), VERSIONS)
    with contextlib.suppress(InvalidJoinToken):
        admission.check(report("attic", rejoin_secret="r"), VERSIONS)
        pytest.fail("another host's secret admitted a host")
    clock.now_s = 2000.0
    for shown in ("", "s", "r "):
        with pytest.raises(InvalidJoinToken):
            admission.check(report("studio", rejoin_secret=shown), VERSIONS)
    admission.check(report("studio", rejoin_secret="r"), VERSIONS)
    with pytest.raises(InvalidJoinToken, match="expired"):
        admission.check(report("studio", secret="s"), VERSIONS)


def test_a_token_lives_by_a_clock_that_only_runs() -> None:
    wall, steady = Clock(1000.0), Clock(50.0)
    token = JoinToken((), "s", bytes(32), int(1000 + HOUR_S))
    admission = AdmissionControl(Admissions(token), HOUR_S, clock_s=wall, steady_s=steady)
    assert admission.token == token
    # The clock is set right, from 1970.
    wall.now_s, steady.now_s = 1.9e9, 50.0 + HOUR_S / 2
    admission.check(report("studio", secret="s"), VERSIONS)
    # What is kept for the next head is right by the new time.
    assert admission.admissions.token.expires_at_s == int(1.9e9 + HOUR_S / 2)
    # It is set back, and the token ends all the same.
    wall.now_s, steady.now_s = 5000.0, 50.0 + HOUR_S
    with pytest.raises(InvalidJoinToken, match=r"expired at 1970-01-01 01:23:20 UTC, 0 seconds ago"):
        admission.check(report("studio", secret="s"), VERSIONS)


def test_no_clock_makes_a_token_live_longer_than_it_may() -> None:
    wall, steady = Clock(1000.0), Clock(50.0)
    token = JoinToken((), "s", bytes(32), int(1.9e9))
    admission = AdmissionControl(Admissions(token), HOUR_S, clock_s=wall, steady_s=steady)
    steady.now_s += HOUR_S
    with pytest.raises(InvalidJoinToken, match="expired"):
        admission.check(report("studio", secret="s"), VERSIONS)


async def test_a_host_joins_whatever_its_clock_says_of_the_token(tmp_path: Path) -> None:
    """The head's clock counts; that of a host is named only if the host does not get in."""
    late = Clock(time.time() + 2 * DAY_S)
    async with head(tmp_path, int(time.time() + DAY_S)) as side:
        host = Host(side, clock_s=late)
        await until(side.members, 1)
        side.service.dismiss("studio", "goodbye")
        await host.outcome()
    with pytest.raises(
        HostUnreachable, match=r"by this host's clock the join token expired at .*, 24 hours ago"
    ):
        await Host(side, clock_s=late).outcome()


async def test_no_log_shows_a_secret(tmp_path: Path) -> None:
    clock = a_clock()
    certificate = make_certificate(dt.datetime.now(dt.UTC))
    first = new_secret()
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    admissions = Admissions(JoinToken((address,), first, certificate.fingerprint, in_a_day(clock)))
    shown = [first]
    with capture_logs() as logs:
        async with head(tmp_path, clock_s=clock, former=(certificate, admissions)) as side:
            shown.append(await admitted(side))
            await until_gone(side)
            await admitted(side, rejoin=shown[-1])
            shown.append(await admitted(side, OTHER))
            await until_gone(side)
            guess = new_secret()
            await refused(side, "not this mesh's", secret=guess, rejoin=guess)
            fetch = dataclasses.replace(side.source, secret=guess)
            with pytest.raises(InvalidJoinToken, match="its secret differs"):
                await fetch_stage(StageStore(tmp_path / "guest"), "0" * 64, fetch)
            shown += (guess, side.service.fetch_secret)
            side.service.evict("attic")
            await refused(side, "attic was evicted", OTHER, rejoin=shown[2])
            shown += (side.service.token.secret, side.service.fetch_secret)
            clock.now_s += 2 * DAY_S
            await refused(side, "expired at", secret=side.service.token.secret)
            described = repr(side.service.admissions)
    events = [each["event"] for each in logs]
    assert [
        events.count(each) for each in ("host_joined", "host_refused", "fetch_refused", "host_evicted")
    ] == [*(3, 3, 1, 1)]
    written = repr(logs) + described
    for secret in shown:
        assert len(secret) >= 43
        assert secret not in written
