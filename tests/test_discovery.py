"""Heads in the local network: announced and found by real mDNS, on this host's loopback."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from mesh.cluster.discovery import HeadFound, announced, discover_heads, head_found, with_found
from mesh.cluster.join_token import JoinToken
from spanmesh_proto.errors import ClusterError

TOKEN = JoinToken(("10.0.0.9:1234",), "a-secret-that-stays-here", bytes(range(32)), 2_000_000_000)
HEAD = head_found("alpha", replace(TOKEN, addresses=("127.0.0.1:4321",)))


async def test_a_head_that_is_announced_is_found_and_gone_afterwards() -> None:
    pytest.importorskip("zeroconf")
    async with announced(HEAD, is_wanted=True):
        heads = await discover_heads(seconds=1.5, interfaces=["127.0.0.1"])
    assert HEAD in heads
    assert HEAD not in await discover_heads(seconds=0.5, interfaces=["127.0.0.1"])


async def test_a_head_that_is_not_to_be_found_announces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    async with announced(HEAD, is_wanted=False):
        pass
    with pytest.raises(ClusterError, match=r"pip install 'spanmesh\[discover\]'"):
        await discover_heads(seconds=0.1)
    with pytest.raises(ClusterError, match="mDNS needs the package zeroconf"):
        async with announced(HEAD, is_wanted=True):
            pass


def test_only_a_tokens_own_head_adds_an_address() -> None:
    stranger = HeadFound("alpha", "10.0.0.66:1", "f" * 16)
    moved = HeadFound("alpha", "10.0.0.7:99", TOKEN.fingerprint.hex()[:16])
    found = with_found(TOKEN, [stranger, moved])
    assert found.addresses == ("10.0.0.7:99", "10.0.0.9:1234")
    assert replace(found, addresses=TOKEN.addresses) == TOKEN
    assert with_found(TOKEN, [stranger]) == TOKEN


def test_nothing_secret_is_announced() -> None:
    assert TOKEN.secret not in repr(HEAD)
    assert len(HEAD.fingerprint) == 16
