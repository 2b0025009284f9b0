"""Orders to the mesh are taken on the head's machine, and not through a proxy there."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import httpx
import pytest
from starlette.requests import Request

from mesh.api.api_keys import ApiKeys
from mesh.api.auth import is_own_machine
from mesh.api.http_server import serve_api
from mesh.cluster.addresses import primary_address
from spanmesh_proto.addresses import join_address, split_address
from tests.support.api_harness import KEY, Api, ScriptedEngine, api, app_of, engine, tokenizer
from tests.support.ipv6 import needs_ipv6

if TYPE_CHECKING:
    from mesh.text.tokenizer import Tokenizer

__all__ = ["api", "engine", "tokenizer"]

pytestmark = pytest.mark.model

MARKS = (
    *("Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP"),
    *("CF-Connecting-IP", "True-Client-IP", "X-Client-IP", "X-Envoy-External-Address"),
)
ORDERS = ("/mesh/drain", "/mesh/evict", "/mesh/examine", "/mesh/rehearse", "/mesh/load", "/mesh/unload")


@pytest.mark.parametrize("path", ORDERS)
async def test_whoever_is_behind_a_proxy_on_the_heads_machine_is_not_there(api: Api, path: str) -> None:
    for mark in MARKS:
        refused = await api.http.post(path, headers={mark: "for=10.0.0.66"})
        assert refused.status_code == 401
        assert "head's own machine" in refused.json()["error"]["message"]
    # Without a mark it is heard: this mesh has nobody yet who could carry it out.
    assert (await api.http.post(path)).status_code == 503


@pytest.mark.parametrize(
    ("listens_at", "asked_at"),
    [
        (primary_address(), primary_address()),
        ("0.0.0.0", primary_address("192.0.2.1")),
        ("0.0.0.0", "127.0.0.1"),
        pytest.param("::", "::1", marks=needs_ipv6),
        # The server sees an address of IPv4 that is written as one of IPv6.
        pytest.param("::", primary_address("192.0.2.1"), marks=needs_ipv6),
        pytest.param("::1", "::1", marks=needs_ipv6),
    ],
)
async def test_the_heads_machine_is_known_by_each_of_its_addresses(
    tokenizer: Tokenizer, listens_at: str, asked_at: str
) -> None:
    app = app_of(ScriptedEngine([]), tokenizer, keys=ApiKeys.from_plain({"alice": KEY}))
    async with serve_api(app, listens_at, 0) as url:
        _, port = split_address(url.removeprefix("http://"))
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(
            base_url=f"http://{join_address(asked_at, port)}", headers=headers, trust_env=False
        ) as http:
            for path in ORDERS:
                # It is heard, and nobody can carry it out yet.
                assert (await http.post(path)).status_code == 503, path
                assert (await http.post(path, headers={"Via": "1.1 proxy"})).status_code == 401, path


def request_between(client: str, server: str) -> Request:
    ends = {"client": (client, 50_000), "server": (server, 8000)}
    return Request({"type": "http", "headers": [], **ends})


@pytest.mark.parametrize("own", [primary_address(), "127.0.0.1", "::ffff:127.0.0.1"])
def test_both_ends_of_a_connection_within_the_machine_are_its_own(own: str) -> None:
    is_taken = partial(request_between, server=own)
    assert is_own_machine(is_taken(own))
    for other in ("203.0.113.9", "2001:db8::9", "::ffff:203.0.113.9", "fe80::9%eth0", "host.example", ""):
        assert not is_own_machine(is_taken(other))
    if own == primary_address() != "127.0.0.1":
        assert not is_own_machine(request_between(own, "203.0.113.9"))
