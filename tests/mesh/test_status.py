"""The status as one set of classes: what it writes, what it reads, and that nobody reads it otherwise."""

from __future__ import annotations

import ast
import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mesh.status import (
    ChatModelStatus,
    EmbeddingCounts,
    EmbeddingModelStatus,
    EmbeddingStageStatus,
    FeatureStatus,
    HostStatus,
    KvDiskStatus,
    MeshStatus,
    ModelDescription,
    ProposerStatus,
    SessionsStatus,
    SpeculationStatus,
    StageStatus,
    TailDraftStatus,
    as_json,
    copied,
    read_status,
)
from spanmesh_proto.errors import ClusterError
from tests.contracts.documents import recorded
from tests.contracts.normal_form import KEYED
from tests.support.serve_harness import host

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PLACES = ("mesh", "meshbench")


def example(shape: Any) -> Any:
    """JSON of a recorded shape."""
    if isinstance(shape, dict):
        return {key: _example_of(key, each) for key, each in shape.items()}
    if isinstance(shape, list):
        # Ranges have two ends.
        return [example(each) for each in shape] * 2
    return {"str": "text", "number": 3, "bool": True, "NoneType": None}[shape]


def _example_of(key: str, shape: Any) -> Any:
    if key in KEYED:
        return {str(number): example(each) for number, each in enumerate(shape)}
    return example(shape)


def test_every_key_of_the_contract_is_a_field() -> None:
    """A key that no class has would be lost on the way."""
    body = example(recorded("status"))
    assert len(body["stages"]) == len(body["models"]) == 2
    status = read_status(body)
    assert as_json(status) == body
    assert read_status(json.loads(json.dumps(as_json(status)))) == status


def test_parts_that_are_not_in_the_contract_come_back_too() -> None:
    """Those that a small mesh does not have."""
    status = MeshStatus(
        sessions=SessionsStatus(groups_found={4: 2}),
        kv_disk=KvDiskStatus(on=True, stages=(None,)),
        speculation=SpeculationStatus(
            mode="auto",
            proposers={"mtp": ProposerStatus(drafted_per_depth=(3, 2), acceptance_per_depth=(0.5,))},
            features=FeatureStatus(wanted=4, off="a stage went away"),
            tail_drafts=TailDraftStatus(drafts=2, tokens=5, off="the assistant failed"),
        ),
        models=(
            ChatModelStatus(name="a", kind="chat", ready=True, stages=(StageStatus(rows=3),)),
            EmbeddingModelStatus(
                name="b",
                model=ModelDescription(dimensions=384, pooling="mean"),
                stages=(EmbeddingStageStatus(layers=(0, 6), threads=4),),
                embeddings=EmbeddingCounts(waiting=2),
            ),
        ),
        hosts=(HostStatus(name="attic", copies=("[0, 3)",)),),
    )
    assert read_status(json.loads(json.dumps(as_json(status)))) == status


def test_what_is_unset_is_left_out_and_what_is_known_to_be_nothing_is_null() -> None:
    starting, serving = as_json(MeshStatus()), as_json(MeshStatus(sessions=SessionsStatus()))
    of_ring = {"lost": None, "kv_disk": None}
    assert starting["plan"] is starting["state_not_written"] is None
    assert serving.items() >= of_ring.items()
    assert not starting.keys() & {*of_ring, "name", "kind", "ready", "sessions", "tokens", "library"}
    plain = as_json(SpeculationStatus())
    assert plain["features"] is plain["draft_ms_per_token"] is None
    assert not plain.keys() & {"mode", "reason", "policy", "depth"}
    assert as_json(SpeculationStatus(mode="off"))["reason"] is None
    controlled = as_json(SpeculationStatus(policy="auto", width=0))
    assert (controlled["width"], controlled["depth"], controlled["measured_tokens_per_s"]) == (0, None, None)


@pytest.mark.parametrize("kind", ["chat", "something new"])
def test_heads_of_other_versions_are_understood(kind: str) -> None:
    body = {"ready": True, "moons": 4, "models": [{"name": "a", "kind": kind, "ready": True, "orbit": {}}]}
    (model,) = read_status(body).models
    assert isinstance(model, ChatModelStatus)
    assert (model.name, model.kind, model.ready) == ("a", kind, True)
    assert read_status({}) == MeshStatus()


@pytest.mark.parametrize(
    ("body", "where"), [([], "all of it"), ({"hosts": [{"memory_bytes": "much"}]}, "hosts.0.memory_bytes")]
)
def test_an_answer_that_is_no_status_is_refused(body: object, where: str) -> None:
    with pytest.raises(ClusterError, match=f"does not tell its state as a mesh does: {where}: "):
        read_status(body)


def test_facts_of_a_host_are_copied_by_their_names() -> None:
    member = host("attic", 9)
    found = copied(HostStatus, member, member.facts, member.facts.versions, threads=member.facts.num_threads)
    assert (found.name, found.memory_bytes) == ("attic", member.facts.memory_bytes)
    assert (found.threads, found.platform) == (member.facts.num_threads, member.facts.versions.platform)
    assert found.held_bytes == 0


def is_status(node: ast.expr) -> bool:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Call(func=ast.Attribute(attr=name)):
            return name == "status"
        case ast.Call(func=ast.Name(id=name)):
            return name in {"read_status", "get_status"}
    return False


def reads_by_key(source: str) -> Iterator[int]:
    """Lines that take a part of a status by a string."""
    names = {each.name for each in fields(MeshStatus)}
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Subscript(value=value, slice=ast.Constant(value=str())) if is_status(value):
                yield node.lineno
            case ast.Call(func=ast.Attribute(value=value, attr="get")) if is_status(value):
                yield node.lineno
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=key), *_]):
                if is_status(value) and key in names:
                    yield node.lineno


def test_nobody_takes_a_part_of_the_status_by_a_string() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for place in PLACES
        for path in (ROOT / place).rglob("*.py")
        if (lines := list(reads_by_key(path.read_text(encoding="utf-8"))))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("status['hosts']", [1]),
        ("bed.mesh.status()['stages']", [1]),
        ("snapshot.status.get('hosts')", [1]),
        ("read_status(body)['hosts']", [1]),
        ("status.hosts[0]", []),
        ("answer['hosts']", []),
    ],
)
def test_reads_by_key_are_found(source: str, lines: list[int]) -> None:
    assert list(reads_by_key(source)) == lines
