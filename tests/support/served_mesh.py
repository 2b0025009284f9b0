"""A real mesh for clients that block: two stages, exact mode, n-gram speculation, the API; in a thread."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest

from mesh.api.api_keys import ApiKeys, KeyRecord, digest_of
from mesh.coordinator.coordinator import PendingEngine
from mesh.serve.pipeline import Pipeline
from mesh.serve.status import MeshState, stage_counts
from mesh.text.tokenizer import Tokenizer
from speculative.lookup_proposers import NgramProposer
from stages.runtime.stage_runtime import RuntimeOptions
from stages.slicing.model_facts import read_model_facts
from tests.support.api_harness import KEY, running_api
from tests.support.ring_harness import running_coordinator, running_stages

NUM_SLOTS, CTX_SIZE = 3, 1024
POOR_KEY = "sk-of-bob"


@contextmanager
def served_mesh(model: Path, cache_dir: Path) -> Iterator[str]:
    """The URL of its API, which Alice's key opens without end, and Bob's once a minute."""
    url: Future[str] = Future()
    loop = asyncio.new_event_loop()
    over = asyncio.Event()

    async def serve() -> None:
        keys = ApiKeys([KeyRecord("alice", digest_of(KEY)), KeyRecord("bob", digest_of(POOR_KEY), 1)])
        options = RuntimeOptions(num_slots=NUM_SLOTS, ctx_size=CTX_SIZE, exact=True)
        tokenizer, pending = Tokenizer(model), PendingEngine(CTX_SIZE)
        state = MeshState(
            read_model_facts(model), pending, Pipeline(), numeric_mode="exact", speculation_mode="ngram"
        )
        async with (
            running_stages(model, (15,), options, cache_dir) as stages,
            running_coordinator(
                stages,
                context_length=CTX_SIZE,
                num_slots=NUM_SLOTS,
                make_proposers=lambda _request: [NgramProposer()],
                token_texts=tokenizer.texts,
            ) as coordinator,
            running_api(
                coordinator,
                tokenizer,
                keys=keys,
                status=state.as_dict,
                stage_counts=lambda: stage_counts(pending),
            ) as api,
        ):
            pending.coordinator, state.phase = coordinator, "serving"
            url.set_result(api.url)
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
def mesh_url(smollm2_path: Path, stage_cache_dir: Path) -> Iterator[str]:
    """Such as `http://127.0.0.1:8000`; a test file that binds this name has it."""
    with served_mesh(smollm2_path, stage_cache_dir) as url:
        yield url
