"""The identity of a head in a file: private, checked, and the same at the next start."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from mesh.cluster.addresses import free_port
from mesh.cluster.admission import Admissions
from mesh.cluster.join_token import encode
from mesh.cluster.membership_client import Membership, find_head
from mesh.serve.head import _join_port
from mesh.serve.head_identity import (
    HeadIdentity,
    IdentityFile,
    new_identity,
    open_identity,
    starting_identity,
)
from mesh.serve.head_state import HeadState, HeadStateFile, HeadStateWriter, open_head_state
from spanmesh_proto.addresses import PortRange
from spanmesh_proto.errors import ClusterError, HostUnreachable, InvalidJoinToken
from tests.mesh.cluster.test_membership import HOST, head, until
from tests.mesh.cluster.test_membership_rejoin import Host
from tests.mesh.serve.test_head_state import STATE
from tests.support.on_demand import head_options

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.cluster.certificates import Certificate

NOW_S = 1_700_000_000.0
HOUR_S = 3600.0


def identity_with(**changes: Any) -> HeadIdentity:
    identity = new_identity(NOW_S, HOUR_S)
    admissions = Admissions(identity.admissions.token, {"studio": "r" * 43}, ("attic",))
    return dataclasses.replace(identity, admissions=admissions, **changes)


IDENTITY = identity_with(join_port=7000, term=3)
OTHER = identity_with(term=5)


def state_of(identity: HeadIdentity, **changes: Any) -> HeadState:
    """State of a head with this identity."""
    token = identity.admissions.token
    state = dataclasses.replace(
        STATE,
        secret=token.secret,
        expires_at_s=token.expires_at_s,
        certificate_pem=identity.certificate.certificate_pem.decode(),
        private_key_pem=identity.certificate.private_key_pem.decode(),
        rejoin_secrets=dict(identity.admissions.rejoin_secrets),
        evicted=identity.admissions.evicted,
        join_port=identity.join_port,
        term=identity.term,
    )
    return dataclasses.replace(state, **changes)


def start(
    path: Path | None, former: HeadIdentity | None = None, *, now_s: float = NOW_S, term: int = 9
) -> HeadIdentity:
    """What a head starts with."""
    with open_identity(path) as file:
        return starting_identity(file, former, term=term, now_s=now_s, token_lifetime_s=HOUR_S)


def test_it_is_read_as_it_was_written_and_private(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    with IdentityFile(path) as file:
        assert file.identity is None
        file.save(IDENTITY)
        file.save(IDENTITY)
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "identity.lock").stat().st_mode & 0o777 == 0o600
    with IdentityFile(path) as file:
        assert file.identity == IDENTITY
        file.save(OTHER)
    with IdentityFile(path) as file:
        assert file.identity == OTHER
    assert sorted(each.name for each in tmp_path.iterdir()) == ["identity", "identity.lock"]


def test_a_state_has_the_identity_that_it_was_made_of() -> None:
    state = state_of(IDENTITY)
    assert state.identity == IDENTITY
    assert IDENTITY.is_of(state.certificate_pem)
    assert not OTHER.is_of(state.certificate_pem)
    for secret in (state.secret, "r" * 43, "PRIVATE"):
        assert secret not in repr(state)
        assert secret not in repr(state.identity)


def test_two_heads_do_not_share_it(tmp_path: Path) -> None:
    with IdentityFile(tmp_path / "identity"), pytest.raises(ClusterError, match="another `mesh serve` uses"):
        IdentityFile(tmp_path / "identity")
    start(tmp_path / "identity")


def test_all_names_of_a_file_exclude_each_other(tmp_path: Path) -> None:
    path, link = tmp_path / "identity", tmp_path / "elsewhere" / "name"
    link.parent.mkdir()
    link.symlink_to(path)
    # Also before the file is there.
    for _ in range(2):
        for one, other in ((path, link), (link, path)):
            with IdentityFile(one) as file:
                with pytest.raises(ClusterError, match="another `mesh serve` uses"):
                    IdentityFile(other)
                start_with = file.identity
        with IdentityFile(link) as file:
            file.save(IDENTITY)
    assert start_with == IDENTITY
    assert link.is_symlink()
    assert not path.is_symlink()
    path.unlink()
    path.symlink_to(link)
    with pytest.raises(ClusterError, match="cannot"):
        IdentityFile(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_what_others_may_have_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "identity"
    start(path)
    path.chmod(mode)
    with pytest.raises(ClusterError, match=rf"not private to this user.*mode {mode:o}.*chmod 600") as refused:
        start(path)
    assert refused.value.param == "--identity"
    path.chmod(0o600)
    start(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    start(path)
    os.chown(path, 12345, -1)
    with pytest.raises(ClusterError, match="it is user 12345's"):
        start(path)


def damaged(text: str) -> dict[str, str]:
    content = json.loads(text)
    secret = content["identity"]["secret"]
    changed = "a" if secret[0] != "a" else "b"
    without = {name: value for name, value in content.items() if name != "sha256"}
    return {
        "empty": "",
        "cut off": text[: len(text) // 2],
        "no object": "[]",
        "a string": '"identity"',
        "binary": "\x00\xff" * 100,
        "one character": text.replace(secret, changed + secret[1:]),
        "no checksum": json.dumps(without),
        "nothing in it": json.dumps({"format": 1, "sha256": content["sha256"]}),
    }


@pytest.mark.parametrize("harm", list(damaged(json.dumps({"identity": {"secret": "x"}, "sha256": ""}))))
def test_a_damaged_file_is_named_with_a_remedy_and_kept(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "identity"
    secret = start(path).admissions.token.secret
    harmed = damaged(path.read_text())[harm]
    path.write_text(harmed)
    with pytest.raises(ClusterError, match=r"identity is damaged, .* restore it from a copy") as refused:
        start(path)
    assert secret[1:] not in refused.value.message
    assert path.read_text() == harmed


def test_nothing_is_left_beside_a_file_that_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("named by mistake")
    path.chmod(0o600)
    with pytest.raises(ClusterError, match="no identity of a head"):
        IdentityFile(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_of_another_version_is_named_with_both(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    start(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(
        ClusterError, match=r"has format 2, this version of spanmesh reads 1: use the version"
    ):
        start(path)


def test_places_where_nothing_can_be_kept_are_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="missing/identity: No such file"):
        start(tmp_path / "missing" / "identity")
    with pytest.raises(ClusterError, match="is not a regular file"):
        start(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ClusterError, match="is not a regular file"):
        start(tmp_path / "pipe")


def test_without_a_file_every_start_is_a_new_mesh() -> None:
    first, second = start(None), start(None)
    assert first.certificate != second.certificate
    assert first.admissions.token.secret != second.admissions.token.secret
    assert first.admissions.token.expires_at_s == int(NOW_S + HOUR_S)


def test_with_a_file_the_next_start_is_the_same_mesh(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    first = start(path, term=9)
    assert start(path, term=10) == dataclasses.replace(first, term=10)
    # It is on disk before anybody is told of it.
    with IdentityFile(path) as file:
        assert file.identity == dataclasses.replace(first, term=10)


def test_an_expired_token_is_replaced_and_all_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    with IdentityFile(path) as file:
        file.save(IDENTITY)
    later_s = NOW_S + 5 * HOUR_S
    for former in (None, IDENTITY):
        renewed = start(path if former is None else None, former, now_s=later_s)
        assert renewed.certificate == IDENTITY.certificate
        token = renewed.admissions.token
        assert token.expires_at_s == int(later_s + HOUR_S)
        assert token.secret != IDENTITY.admissions.token.secret
        assert renewed.admissions == dataclasses.replace(IDENTITY.admissions, token=token)
        assert renewed.join_port == 7000


def test_of_a_file_and_a_crashed_head_the_newer_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "identity"

    def started(kept: HeadIdentity, former: HeadIdentity) -> HeadIdentity:
        with IdentityFile(path) as file:
            file.save(kept)
        return start(path, former)

    bare = dataclasses.replace(IDENTITY, admissions=Admissions(IDENTITY.admissions.token))
    # Of the same head: the file is written before the state.
    assert started(IDENTITY, bare).admissions == IDENTITY.admissions
    # A head without the file has gone on with the mesh meanwhile.
    newer = dataclasses.replace(bare, term=4)
    assert started(IDENTITY, newer).admissions == bare.admissions
    assert started(newer, IDENTITY).admissions == bare.admissions
    # What crashed was another mesh.
    assert started(IDENTITY, OTHER).certificate == IDENTITY.certificate
    # There is no file yet.
    path.unlink()
    assert start(path, OTHER).certificate == OTHER.certificate
    assert start(path).certificate == OTHER.certificate


def test_it_outlives_an_orderly_end_and_a_state_does_not(tmp_path: Path) -> None:
    path, state_path = tmp_path / "identity", tmp_path / "state.json"
    options = head_options(state_path=state_path, identity_path=path, linger_wanted_s=60.0)

    async def one_head() -> None:
        with open_identity(options.identity_path) as file, open_head_state(options, file) as writer:
            assert writer.former is None
            identity = starting_identity(file, None, term=3, now_s=NOW_S, token_lifetime_s=HOUR_S)
            seen = dataclasses.replace(identity.admissions, rejoin_secrets={"b": "s"}, evicted=("c",))
            state = state_of(dataclasses.replace(identity, admissions=seen, join_port=7000))
            writing = asyncio.create_task(writer.keep_written(lambda: state))
            await writer.written()
            assert state_path.exists()
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    asyncio.run(one_head())
    assert not state_path.exists()
    with IdentityFile(path) as file:
        assert file.identity is not None
        assert file.identity.admissions.rejoin_secrets == {"b": "s"}
        assert file.identity.admissions.evicted == ("c",)
        assert file.identity.join_port == 7000


async def test_an_eviction_is_answered_when_it_is_in_every_file(tmp_path: Path) -> None:
    state, more = state_of(IDENTITY), state_of(IDENTITY, evicted=("attic", "studio"))
    now = [state]
    with HeadStateFile(tmp_path / "state.json") as file, IdentityFile(tmp_path / "identity") as identity_file:
        for state_file in (file, None):
            writer = HeadStateWriter(state_file, None, 3, identity_file=identity_file)
            writing = asyncio.create_task(writer.keep_written(lambda: now[0]))
            for each in (state, more):
                now[0] = each
                await writer.written()
                assert identity_file.identity == each.identity
                assert state_file is None or state_file.load() == each
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)


class Full(IdentityFile):
    """On a disk that has no room while `is_full`."""

    is_full = False

    def save(self, identity: HeadIdentity) -> None:
        if self.is_full and identity != self.identity:
            raise OSError(28, "No space left on device")
        super().save(identity)


EVICTED = ("attic", "studio")


async def test_an_eviction_while_the_head_ends_is_saved_before_it_is_answered(tmp_path: Path) -> None:
    now = [state_of(IDENTITY)]
    with IdentityFile(tmp_path / "identity") as file:
        writer = HeadStateWriter(None, None, 3, identity_file=file)
        writing = asyncio.create_task(writer.keep_written(lambda: now[0]))
        await writer.written()
        # One waits when the writer is cancelled, the other comes later: the API closes last.
        now[0] = state_of(IDENTITY, evicted=("attic", "b"))
        asked = asyncio.create_task(writer.written())
        await asyncio.sleep(0)
        writing.cancel()
        await asked
        assert file.identity == now[0].identity
        await asyncio.gather(writing, return_exceptions=True)
        now[0] = state_of(IDENTITY, evicted=EVICTED)
        await writer.written()
    with IdentityFile(tmp_path / "identity") as again:
        assert again.identity is not None
        assert again.identity.admissions.evicted == EVICTED


async def test_an_eviction_that_a_full_disk_does_not_take_is_not_answered_as_saved(tmp_path: Path) -> None:
    options = head_options(identity_path=tmp_path / "identity", linger_wanted_s=0.0)
    refusal = (
        r"not saved .*\(No space left on device\), which would undo it: free space for .*identity; writing"
    )
    now = [state_of(IDENTITY)]
    with Full(tmp_path / "identity") as file:
        with open_head_state(options, file) as writer:
            writing = asyncio.create_task(writer.keep_written(lambda: now[0]))
            await writer.written()
            file.is_full = True
            now[0] = state_of(IDENTITY, evicted=EVICTED)
            asked = asyncio.create_task(writer.written())
            await asyncio.sleep(0.05)
            assert not asked.done()
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            for refused in (asked, writer.written()):
                with pytest.raises(ClusterError, match=refusal):
                    await refused
            assert file.identity == IDENTITY
            # There is room when the head closes.
            file.is_full = False
        assert file.identity == now[0].identity
        now[0] = state_of(IDENTITY)
        with pytest.raises(ClusterError, match="not saved"):
            await writer.written()


async def test_secrets_of_hosts_that_the_head_dismisses_at_its_end_are_not_kept(tmp_path: Path) -> None:
    """As in `mesh serve`: the writer ends first, then the hosts are dismissed, last the files are closed."""
    path, address = tmp_path / "identity", f"127.0.0.1:{free_port('127.0.0.1')}"
    options = head_options(identity_path=path, linger_wanted_s=0.0)
    away = dataclasses.replace(HOST, name="attic", ray_node_name="attic.1")
    with IdentityFile(path) as file:
        identity = starting_identity(file, None, term=3, now_s=time.time(), token_lifetime_s=HOUR_S)
        with open_head_state(options, file) as writer:
            async with head(tmp_path, former=at(address, identity)) as side:
                service = side.service
                secret = side.token.secret

                def read() -> HeadState:
                    return state_of(dataclasses.replace(identity, admissions=service.admissions))

                writing = asyncio.create_task(writer.keep_written(read))
                async with Membership(await find_head(side.token), secret, away) as left:
                    await left.join()
                host = Host(side)
                await until(side.members, 1)
                await writer.written()
                assert file.identity is not None
                assert set(file.identity.admissions.rejoin_secrets) == {"studio", "attic"}
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
            await host.outcome()
    with IdentityFile(path) as file:
        assert file.identity is not None
        # This one was away, and may not know that the head ended.
        assert file.identity.admissions.rejoin_secrets == {"attic": left.rejoin_secret}
        assert file.identity.admissions.token.secret == secret


def test_a_port_that_tokens_name_is_used_again_unless_another_is_wanted() -> None:
    def port(former: HeadState | None = None, identity: HeadIdentity = IDENTITY, **changes: Any) -> int:
        return _join_port(head_options(**changes), identity, former)

    assert port() == 7000
    assert port(join_port=7001) == 7001
    assert port(identity=OTHER) == 0
    assert port(port_range=PortRange(6900, 7050)) == 7000
    # Only these are let through now.
    assert port(port_range=PortRange(20000, 20099)) == 0
    assert port(state_of(IDENTITY, join_port=7002), join_port=7001) == 7002
    assert port(state_of(OTHER, join_port=7002)) == 7000


def at(address: str, identity: HeadIdentity) -> tuple[Certificate, Admissions]:
    """What a head at this address starts with."""
    admissions = identity.admissions
    token = dataclasses.replace(admissions.token, addresses=(address,))
    return identity.certificate, dataclasses.replace(admissions, token=token)


async def test_a_host_that_was_sent_home_joins_the_next_head_with_the_same_token(tmp_path: Path) -> None:
    """As services do: `mesh join` ends with the mesh, is started again, and waits for the head."""
    path, address = tmp_path / "identity", f"127.0.0.1:{free_port('127.0.0.1')}"
    async with head(tmp_path, former=at(address, start(path, now_s=time.time()))) as side:
        line = encode(side.token)
        host = Host(side)
        await until(side.members, 1)
        # The head ends in an orderly way.
    await host.outcome()
    # It is away: who is started now ends with an error, and is started again.
    with pytest.raises(HostUnreachable, match="cannot reach the head"):
        await Host(side).outcome()
    async with head(tmp_path, former=at(address, start(path, now_s=time.time()))) as side:
        assert encode(side.token) == line
        host = Host(side)
        await until(side.members, 1)
        side.service.dismiss("studio", "goodbye")
        await host.outcome()


async def test_a_host_that_was_cut_off_joins_the_next_head_whose_token_is_another(tmp_path: Path) -> None:
    path, now_s = tmp_path / "identity", time.time()
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    first = start(path, now_s=now_s)
    async with head(tmp_path, former=at(address, first)) as side:
        async with Membership(await find_head(side.token), side.token.secret, HOST) as membership:
            await membership.join()
            secret = membership.rejoin_secret
        while len(side.members):
            await side.members.changed()
        old, seen = side.token, side.service.admissions
    with IdentityFile(path) as file:
        file.save(
            dataclasses.replace(first, admissions=dataclasses.replace(seen, token=first.admissions.token))
        )
    renewed = start(path, now_s=now_s + 2 * HOUR_S)
    async with head(tmp_path, former=at(address, renewed)) as side:
        assert side.token.secret != old.secret
        with pytest.raises(InvalidJoinToken, match="not this mesh's"):
            async with Membership(await find_head(old), old.secret, HOST) as membership:
                await membership.join()
        async with Membership(await find_head(old), old.secret, HOST, rejoin_secret=secret) as membership:
            await membership.join()
