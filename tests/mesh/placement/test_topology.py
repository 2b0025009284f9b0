"""A locked placement: read, checked, and never left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mesh.placement.host_capacity import HostCapacity
from mesh.placement.memory_estimate import StageSizes
from mesh.placement.topology import LockedStage, Topology, read_topology
from spanmesh_proto.errors import ClusterError, ModelDoesNotFit, NotEnoughHosts, UncuttableModel
from stages.layers import LayerRange
from tests.mesh.placement.test_planner import WORKLOAD, model

if TYPE_CHECKING:
    from pathlib import Path

LOCKED = Topology(
    (
        LockedStage("alpha", LayerRange(0, 10)),
        LockedStage("beta", LayerRange(10, 20)),
        LockedStage("alpha", LayerRange(20, 30)),
    )
)
SIZES = StageSizes(model(), WORKLOAD)


def host(name: str, *parts: LayerRange) -> HostCapacity:
    """One that has room for these stages, to the byte."""
    return HostCapacity(name, sum(SIZES.memory(part).total_bytes for part in parts), 10.0)


ALPHA = host("alpha", LayerRange(0, 10), LayerRange(20, 30))
BETA, GAMMA = host("beta", LayerRange(10, 20)), host("gamma", LayerRange(0, 30))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "topology.toml"
    path.write_text(text)
    return path


def test_a_file_says_who_holds_what(tmp_path: Path) -> None:
    text = "\n".join(
        f'[[stage]]\nhost = "{stage.host}"\nlayers = "{stage.layers.start}:{stage.layers.stop}"'
        for stage in LOCKED.stages
    )
    assert read_topology(written(tmp_path, text)) == LOCKED
    assert LOCKED.hosts == ("alpha", "beta")
    assert LOCKED.missing(["beta"]) == ("alpha",)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "names no stage"),
        ("stage = 1", "names no stage"),
        ("[[stages]]", "it has 'stages'"),
        ('[[stage]]\nhost = "a"', "host and layers and nothing else"),
        ('[[stage]]\nhost = "a"\nlayers = "3:3"', "layers '3:3'"),
        ('[[stage]]\nhost = "a"\nlayers = [0, 3]', "layers [0, 3]"),
        ('[[stage]]\nhost = "a"\nlayers = "1:3"', "must start at 0"),
        ('[[stage]]\nhost = "a"\nlayers = "0:3"\n[[stage]]\nhost = "b"\nlayers = "4:5"', "must start at 3"),
        ("[[stage]", "not TOML"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ClusterError, match="cannot be used") as caught:
        read_topology(written(tmp_path, text))
    assert reason in caught.value.message
    assert caught.value.param == "--topology"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"none\.toml cannot be used: No such file"):
        read_topology(tmp_path / "none.toml")


def test_it_must_suit_the_model() -> None:
    LOCKED.check(model())
    with pytest.raises(UncuttableModel, match="places 30 layers; model has 31"):
        LOCKED.check(model(31))
    with pytest.raises(UncuttableModel, match="cannot be cut at layer 10"):
        LOCKED.check(model(cuts=(20,)))
    with pytest.raises(UncuttableModel, match="no stage of model can have 10 layers: ten are another model"):
        LOCKED.check(model(refused_lengths={10: "ten are another model"}))


def test_the_plan_is_what_it_says_whoever_else_is_there() -> None:
    found = LOCKED.plan(SIZES, [GAMMA, BETA, ALPHA])
    assert [(stage.host, stage.layers) for stage in found.stages] == [
        (stage.host, stage.layers) for stage in LOCKED.stages
    ]


def test_a_host_that_is_missing_or_too_small_is_named() -> None:
    with pytest.raises(NotEnoughHosts, match=r"locks layers \[10, 20\) to host beta"):
        LOCKED.plan(SIZES, [ALPHA, GAMMA])
    small = HostCapacity("alpha", ALPHA.memory_bytes - 1, 10.0)
    with pytest.raises(ModelDoesNotFit, match="host alpha"):
        LOCKED.plan(SIZES, [small, BETA, GAMMA])


def test_a_lost_stage_comes_back_on_its_own_host_only() -> None:
    stages = LOCKED.plan(SIZES, [ALPHA, BETA]).stages
    decision = LOCKED.replan(SIZES, stages, {1}, [GAMMA, BETA, ALPHA])
    assert [new.placement.host for new in decision.stages] == ["alpha", "beta", "alpha"]
    assert [new.kept for new in decision.stages] == [0, None, 2]
    with pytest.raises(NotEnoughHosts, match="host beta, which is not ready"):
        LOCKED.replan(SIZES, stages, {1}, [GAMMA, ALPHA])
    # What is on the host already counts.
    small = HostCapacity("alpha", ALPHA.memory_bytes - 1, 10.0)
    with pytest.raises(ModelDoesNotFit, match="host alpha"):
        LOCKED.replan(SIZES, stages, {2}, [BETA, small])
