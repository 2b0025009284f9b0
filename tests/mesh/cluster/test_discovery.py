"""Heads in the local network: announced and found by real mDNS, on this host's loopback."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from mesh.cluster.discovery import SERVICE, HeadFound, announced, discover_heads, heads_found, with_found
from mesh.cluster.join_token import JoinToken
from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable

TOKEN = JoinToken(("10.0.0.9:1234",), "a-secret-that-stays-here", bytes(range(32)), 2_000_000_000)
HEADS = heads_found("alpha", replace(TOKEN, addresses=("127.0.0.1:4321",)))
(HEAD,) = HEADS


async def test_a_head_that_is_announced_is_found_and_gone_afterwards() -> None:
    pytest.importorskip("zeroconf")
    async with announced(HEADS, is_wanted=True):
        heads = await discover_heads(seconds=1.5, interfaces=["127.0.0.1"])
    assert HEAD in heads
    assert HEAD not in await discover_heads(seconds=0.5, interfaces=["127.0.0.1"])


async def test_a_head_that_is_not_to_be_found_announces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    async with announced(HEADS, is_wanted=False):
        pass
    with pytest.raises(ClusterError, match=r"pip install 'spanmesh\[discover\]'"):
        await discover_heads(seconds=0.1)
    with pytest.raises(ClusterError, match="mDNS needs the package zeroconf"):
        async with announced(HEADS, is_wanted=True):
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


async def test_a_head_with_a_long_name_is_found_by_all_of_it() -> None:
    pytest.importorskip("zeroconf")
    head = replace(HEAD, name="a" * 63)
    async with announced([head], is_wanted=True):
        assert head in await discover_heads(seconds=1.5, interfaces=["127.0.0.1"])


async def test_a_name_that_is_none_hides_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio_zeroconf = pytest.importorskip("zeroconf.asyncio")
    zeroconf = pytest.importorskip("zeroconf")
    seen: list[str] = []

    class Browser:
        def __init__(self, _zeroconf: object, _service: str, handlers: list[Callable[..., None]]) -> None:
            own = f"{HEAD.name}.{HEAD.fingerprint}.{SERVICE}"
            for name in (f"bell\x07.{SERVICE}", f"{'x' * 64}.{SERVICE}", own):
                seen.append(name)
                handlers[0](name=name, state_change=zeroconf.ServiceStateChange.Added)

        async def async_cancel(self) -> None:
            pass

    async with announced(HEADS, is_wanted=True):
        monkeypatch.setattr(asyncio_zeroconf, "AsyncServiceBrowser", Browser)
        assert await discover_heads(seconds=0.1, interfaces=["127.0.0.1"]) == (HEAD,)
    assert len(seen) == 3
