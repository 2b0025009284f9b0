"""What a browser meets: the real API and page over real stages that are repaired for real, in one process."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from mesh.coordinator.coordinator import PendingEngine
from mesh.serve.allocations import HostAllocations
from mesh.serve.pipeline import Pipeline
from mesh.serve.proposers import Proposers
from mesh.serve.status import MeshState, stage_counts
from mesh.text.tokenizer import Tokenizer
from stages.slicing.model_facts import read_model_facts
from tests.support.api_harness import running_api
from tests.support.serve_harness import WORKLOAD, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from mesh.api.api_keys import ApiKeys
    from mesh.serve.status import HeadParts
    from tests.support.api_harness import Api
    from tests.support.serve_harness import Serving


@dataclass
class PageMesh:
    """A mesh and its page.

    Attributes:
        api: What serves the page.
        mesh: The stages behind it.
        state: What the status is made of.
    """

    api: Api
    mesh: Serving
    state: MeshState


@asynccontextmanager
async def page_mesh(
    model: Path,
    *,
    keys: ApiKeys | None = None,
    hosts: tuple[str, ...] = ("attic", "cellar", "desk"),
    proposers: Proposers | None = None,
) -> AsyncIterator[PageMesh]:
    """Three stages on the first three hosts; the others stand by. Without `proposers`, n-grams propose."""
    proposers = proposers or Proposers("ngram")
    facts, engine = read_model_facts(model), PendingEngine(WORKLOAD.ctx_size)
    state = MeshState(facts, engine, Pipeline(), numeric_mode="exact", speculation_mode="ngram")

    def say(phase: str) -> None:
        state.phase = phase

    async with serving(
        model,
        dict.fromkeys(hosts, 9.0),
        make_proposers=proposers,
        feature_needs=proposers.feature_needs,
        say=say,
    ) as mesh:
        allocations = HostAllocations(lambda _member: False)
        allocations.open("page", mesh.pipeline)
        state.incidents, state.pipeline = mesh.incidents, mesh.pipeline
        state.head = cast(
            "HeadParts",
            SimpleNamespace(
                members=mesh.members, allocations=allocations, state_writer=SimpleNamespace(failure=None)
            ),
        )
        engine.coordinator, state.phase = mesh.coordinator, "serving"
        for stage in mesh.pipeline.stages:
            mesh.members.update(stage.placement.host, layers=str(stage.placement.layers))
        async with running_api(
            engine,
            Tokenizer(model),
            keys=keys,
            status=state.as_dict,
            ready=lambda: engine.coordinator is not None,
            is_whole=lambda: engine.is_ready,
            refusal=lambda: engine.refusal,
            stage_counts=lambda: stage_counts(engine),
            host_admin=lambda: mesh.host_draining,
        ) as api:
            yield PageMesh(api, mesh, state)
