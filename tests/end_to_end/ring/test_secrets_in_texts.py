"""What is secret shows in no text that is made of the dataclasses that carry it, whatever logs them."""

from __future__ import annotations

import datetime as dt

import pytest

from mesh.cluster.certificates import Authority, make_certificate
from mesh.cluster.join_token import JoinToken
from mesh.cluster.membership_server import RayAccess
from mesh.cluster.ray_node import RayNodeConfig
from mesh.coordinator.ring import RingTerms
from mesh.options.host import JoinOptions
from mesh.serve.stage_handle import RingCredentials
from stages.weights.fetch import FetchSource

SECRET = "hunter2"
NOW = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    "carrier",
    [
        JoinToken(("192.0.2.7:4100",), SECRET, bytes(32), 0),
        RayAccess("192.0.2.7:6379", SECRET),
        RayNodeConfig("192.0.2.7", "studio.1", SECRET),
        RingTerms("mesh", SECRET),
        RingCredentials("mesh", SECRET),
        FetchSource("192.0.2.7:4100", b"", SECRET),
        JoinOptions(token=SECRET, name="studio"),
        make_certificate(NOW),
        Authority(make_certificate(NOW)).own_identity(["studio"], "192.0.2.7"),
    ],
    ids=lambda carrier: type(carrier).__name__,
)
def test_no_text_shows_it(carrier: object) -> None:
    for text in (repr(carrier), str(carrier), f"{(carrier,)}"):
        assert SECRET not in text
        assert "PRIVATE KEY" not in text
