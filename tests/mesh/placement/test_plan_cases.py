"""200 plans, held against those that the planner of commit 430fc7c made of the same cases."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mesh.placement.memory_estimate import Workload
from spanmesh_proto.errors import MeshError
from tests.support.plan_cases import hosts_of_case, model_of, plan_cases, planned, rated

if TYPE_CHECKING:
    from mesh.placement.planner import Plan

LINES = [
    json.loads(line) for line in Path(__file__).with_name("plans_430fc7c.jsonl").read_text().splitlines()
]
# What was refused and is not any more: the old planner had not tried the order in which five hosts suffice.
NEWLY_FOUND = {143}


def test_the_cases_are_those_that_the_old_planner_was_given() -> None:
    assert [line["case"] for line in LINES] == plan_cases()
    assert Counter(len(line["answer"]["stages"]) for line in LINES).keys() == set(range(7))


@pytest.mark.parametrize("start", range(0, len(LINES), 50))
def test_every_plan_is_sound_and_at_least_as_fast_as_the_old_one(start: int) -> None:
    for number, line in enumerate(LINES[start : start + 50], start):
        case, old = line["case"], line["answer"]
        if old["error"] and number not in NEWLY_FOUND:
            with pytest.raises(MeshError) as refused:
                planned(case)
            assert refused.type.__name__ == old["error"]
            continue
        found = planned(case)
        _check_sound(case, found)
        new = rated(case, found)
        assert new.tokens_per_s >= old["tokens_per_s"] * (1 - 1e-9), number
        assert new.full_tokens_per_s >= old["full_tokens_per_s"] * (1 - 1e-9), number


def _check_sound(case: dict[str, Any], found: Plan) -> None:
    model, hosts = model_of(case), {host.name: host for host in hosts_of_case(case)}
    edges = [found.stages[0].layers.start, *(stage.layers.stop for stage in found.stages)]
    assert (edges[0], edges[-1]) == (0, model.n_layers)
    assert all(left.layers.stop == right.layers.start for left, right in itertools.pairwise(found.stages))
    assert set(edges[1:-1]) <= set(model.allowed_cuts)
    lengths = {len(stage.layers) for stage in found.stages if len(found.stages) > 1}
    assert not lengths & set(model.refused_lengths)
    assert case["num_stages"] in {None, len(found.stages)}
    for stage in found.stages:
        hosts[stage.host] = hosts[stage.host].without(stage.memory)
    assert not any(host.is_overdrawn for host in hosts.values())
    assert Workload(**case["workload"]).is_exact <= all(not stage.memory.gpus for stage in found.stages)
