"""Whether one more model fits, by the planner, on memory as it would be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from mesh.cluster.host_facts import HostFacts, read_versions
from mesh.cluster.members import Member, Members
from mesh.options.model import LoadRequest
from mesh.placement.memory_estimate import StageSizes, Workload
from mesh.placement.planner import StagePlacement
from mesh.serve.allocations import HostAllocations
from mesh.serve.on_demand.room import RoomCheck
from mesh.serve.pipeline import Pipeline
from spanmesh_proto.errors import InvalidModel, ModelDoesNotFit, NotEnoughHosts
from stages.layers import LayerRange
from stages.slicing.model_facts import read_model_facts
from tests.support.on_demand import head_options
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.serve.head import Head
    from mesh.serve.served_model import ServedModel


async def test_a_model_fits_where_another_was(tmp_path: Path) -> None:
    path = TinyModel("llama", n_layers=2).write(tmp_path / "tiny.gguf")
    facts, workload = read_model_facts(path), Workload(256, 2)
    needed = StageSizes(facts, workload).memory(LayerRange(0, 2))
    # Room for one and a half.
    host_facts = HostFacts(needed.total_bytes * 3 // 2, 1, 20.0, read_versions())
    own = Member("attic", "127.0.0.1", host_facts, "attic.1", is_ready=True)
    members, allocations, other = (
        Members(),
        HostAllocations(lambda member: member.name == "attic"),
        Pipeline(),
    )
    members.admit(own)
    allocations.open("other", other)
    head = cast("Head", SimpleNamespace(own=own, members=members))
    options = head_options(library=(tmp_path,))
    first = SimpleNamespace(options=options, known=SimpleNamespace(facts=host_facts))
    room = RoomCheck(cast("ServedModel", first), head, allocations)
    asked = LoadRequest.model_validate({"model": str(path), "ctx_size": 256, "parallel": 2})

    assert await room.shortage(asked, ()) is None
    before = room.layout()
    assert room.layout() == before
    other.intended = (StagePlacement("attic", LayerRange(0, 2), needed),)
    assert room.layout() != before
    shortage = await room.shortage(asked, ())
    assert isinstance(shortage, ModelDoesNotFit)
    assert "of other models" in shortage.message
    assert await room.shortage(asked, frozenset({"other"})) is None
    # Options count: a longer context needs more.
    assert await room.shortage(asked.model_copy(update={"ctx_size": 10**6}), frozenset({"other"})) is not None
    other.intended = ()
    assert room.layout() == before

    # The file is looked at anew when it has changed.
    path.write_bytes(b"GGUF of nothing at all, but long enough")
    with pytest.raises(InvalidModel):
        await room.shortage(asked, ())
    TinyModel("llama", n_layers=2).write(path)
    members.remove("attic")
    assert isinstance(await room.shortage(asked, ()), NotEnoughHosts)
    assert room.layout() != before
