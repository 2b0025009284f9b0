"""Orders to the mesh are not taken from whoever comes through a proxy on the head's machine."""

from __future__ import annotations

import pytest

from tests.support.api_harness import Api, api, engine, tokenizer

__all__ = ["api", "engine", "tokenizer"]

pytestmark = pytest.mark.model

MARKS = ("Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP")


@pytest.mark.parametrize(
    "path",
    ["/mesh/drain", "/mesh/evict", "/mesh/examine", "/mesh/rehearse", "/mesh/load", "/mesh/unload"],
)
async def test_whoever_is_behind_a_proxy_on_the_heads_machine_is_not_there(api: Api, path: str) -> None:
    for mark in MARKS:
        refused = await api.http.post(path, headers={mark: "for=10.0.0.66"})
        assert refused.status_code == 401
        assert "head's own machine" in refused.json()["error"]["message"]
    # Without a mark it is heard: this mesh has nobody yet who could carry it out.
    assert (await api.http.post(path)).status_code == 503
