"""A mesh with its API, in one process: real stages that are repaired for real, certificates, page; no Ray.

For tests of clients that block, `mesh_url` runs it in a thread.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from mesh.api.api_keys import ApiKeys, KeyRecord, digest_of
from mesh.coordinator.coordinator import PendingEngine
from mesh.placement.memory_estimate import Workload
from mesh.serve.allocations import HostAllocations
from mesh.serve.pipeline import Pipeline
from mesh.serve.proposers import Proposers
from mesh.serve.status import MeshState, stage_counts
from mesh.text.tokenizer import Tokenizer
from stages.slicing.model_facts import read_model_facts
from tests.support.api_harness import KEY, running_api
from tests.support.serve_harness import WORKLOAD, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from mesh.serve.pictures import ServedPictures
    from mesh.serve.recording import OpenRecorder
    from mesh.serve.status import HeadParts
    from tests.support.api_harness import Api
    from tests.support.serve_harness import Serving

POOR_KEY = "sk-of-bob"
CLIENT_WORKLOAD = Workload(ctx_size=1024, num_slots=3, is_exact=True)
NUM_STAGES = 3


@dataclass
class MeshInProcess:
    """A mesh and its API."""

    api: Api
    """What serves the page."""
    mesh: Serving
    """The stages behind it."""
    state: MeshState
    """What the status is made of."""


@asynccontextmanager
async def mesh_in_process(
    model: Path,
    *,
    keys: ApiKeys | None = None,
    hosts: tuple[str, ...] = ("attic", "cellar", "desk"),
    proposers: Proposers | None = None,
    workload: Workload = WORKLOAD,
    recording: OpenRecorder | None = None,
    pictures: ServedPictures | None = None,
) -> AsyncIterator[MeshInProcess]:
    """Three stages on the first three hosts; the others stand by. Without `proposers`, n-grams propose."""
    proposers = proposers or Proposers("ngram")
    facts, engine, tokenizer = read_model_facts(model), PendingEngine(workload.ctx_size), Tokenizer(model)
    state = MeshState(
        facts,
        engine,
        Pipeline(),
        numeric_mode="exact",
        speculation_mode="ngram",
        describe_pictures=None if pictures is None else pictures.describe,
    )

    def say(phase: str) -> None:
        state.phase = phase

    async with serving(
        model,
        dict.fromkeys(hosts, 9.0),
        make_proposers=proposers,
        feature_needs=proposers.feature_needs if recording is None else recording.needs,
        recorder=None if recording is None else recording.recorder,
        token_texts=tokenizer.texts,
        say=say,
        workload=workload,
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
            tokenizer,
            keys=keys,
            status=state.status,
            ready=lambda: engine.coordinator is not None,
            is_whole=lambda: engine.is_ready,
            refusal=lambda: engine.refusal,
            stage_counts=lambda: stage_counts(engine),
            host_admin=lambda: mesh.host_draining,
            records=recording is not None,
            pictures=None if pictures is None else pictures.pictures,
        ) as api:
            yield MeshInProcess(api, mesh, state)


@contextmanager
def _in_thread(model: Path) -> Iterator[str]:
    url: Future[str] = Future()
    loop = asyncio.new_event_loop()
    over = asyncio.Event()

    async def serve() -> None:
        keys = ApiKeys([KeyRecord("alice", digest_of(KEY)), KeyRecord("bob", digest_of(POOR_KEY), 1)])
        async with mesh_in_process(model, keys=keys, workload=CLIENT_WORKLOAD) as served:
            url.set_result(served.api.url)
            await over.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as error:
            if not url.done():
                url.set_exception(error)
            raise

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield url.result(60)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30)
        loop.close()


@pytest.fixture(scope="module")
def mesh_url(smollm2_path: Path, cut_stages: None) -> Iterator[str]:
    """Such as `http://127.0.0.1:8000`, which Alice's key opens without end, and Bob's once a minute.

    A test file that binds it has it.
    """
    with _in_thread(smollm2_path) as url:
        yield url
