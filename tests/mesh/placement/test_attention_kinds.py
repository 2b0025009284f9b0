"""In exact mode, the hosts of a model compute attention alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh.placement.host_capacity import HostCapacity, in_one_kind
from mesh.placement.planner import plan
from spanmesh_proto.errors import ModelDoesNotFit
from tests.mesh.placement.test_planner import MIB, WORKLOAD
from tests.mesh.placement.test_planner import model as model_of

MODEL = model_of()
EXACT = replace(WORKLOAD, is_exact=True)
# Each holds half of the model or so.
HOSTS = tuple(
    HostCapacity(name, 2000 * MIB, 20.0, attention_version=version)
    for name, version in (("a", 108), ("b", 116), ("c", 0), ("d", 116))
)


def test_the_kind_with_most_room_computes() -> None:
    kept = in_one_kind(HOSTS)
    assert [host.name for host in kept if not host.is_apart] == ["b", "d"]
    assert {stage.host for stage in plan(MODEL, kept, EXACT).stages} == {"b", "d"}
    large = replace(HOSTS[2], memory_bytes=9000 * MIB)
    assert [host.is_apart for host in in_one_kind((*HOSTS, large))] == [True, True, False, True, False]
    assert in_one_kind(()) == ()


def test_a_model_that_one_kind_cannot_hold_is_refused_with_the_reason() -> None:
    two = HOSTS[:2]
    assert len(plan(MODEL, two, EXACT).stages) == 2
    with pytest.raises(
        ModelDoesNotFit, match=r"nothing on a \(--exact: attention is computed by spanmesh 1, 256 bits"
    ):
        plan(MODEL, in_one_kind(two), EXACT)
