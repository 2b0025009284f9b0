"""Embedding models for tests of the API: the real engine, and vectors that need no model."""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import numpy as np

from mesh.coordinator.heartbeat import longest_batch_s
from mesh.embedding.engine import EmbeddingEngine
from mesh.embedding.link import ComputedBatch
from mesh.embedding.registry import EmbeddingBackend
from mesh.status import EmbeddingModelStatus, EmbeddingStageStatus, ModelDescription
from stages.embedding.model_file import BatchLimits
from stages.embedding.vectors import normalised

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from numpy.typing import NDArray

    from mesh.text.tokenizer import Tokenizer
    from spanmesh_proto.errors import MeshError

WIDTH, LONGEST = 8, 32
EMBEDDER = "tiny-embedder"


def vector_of(tokens: Sequence[int], width: int = WIDTH) -> NDArray[np.float32]:
    """A vector that depends on nothing but the text."""
    noise = np.random.default_rng(list(tokens))
    (vector,) = normalised(noise.normal(size=(1, width)).astype(np.float32))
    return np.asarray(vector)


class ScriptedLink:
    """Computes batches at once, unless it is told to wait or to fail.

    Attributes:
        batches: Texts of every batch that arrived.
        errors: Raised by the next batches, one each.
        gate: Batches wait until it is set.
        num_cancelled: Batches that were cancelled while they waited.
    """

    def __init__(self, width: int = WIDTH) -> None:
        self.batches: list[list[tuple[int, ...]]] = []
        self.errors: list[MeshError] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_cancelled = 0
        self._width = width

    async def embed(self, texts: Sequence[Sequence[int]]) -> ComputedBatch:
        self.batches.append([tuple(tokens) for tokens in texts])
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.errors:
            raise self.errors.pop(0)
        return ComputedBatch(np.stack([vector_of(tokens, self._width) for tokens in texts]), 0.001)


@asynccontextmanager
async def running_engine(
    limits: BatchLimits | None = None,
    *,
    max_waiting: int = 64,
    patience_s: float = 20.0,
    most_batch_s: Callable[[int, int, float], float] = longest_batch_s,
) -> AsyncIterator[EmbeddingEngine]:
    """An engine without a host."""
    engine = EmbeddingEngine(
        limits or BatchLimits(LONGEST, 64),
        WIDTH,
        max_waiting=max_waiting,
        clock_s=time.monotonic,
        patience_s=patience_s,
        most_batch_s=most_batch_s,
    )
    running = asyncio.create_task(engine.run())
    try:
        yield engine
        assert not running.done(), running.exception()
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def embedding_backend(
    engine: EmbeddingEngine, tokenizer: Tokenizer, *, name: str = EMBEDDER
) -> EmbeddingBackend:
    """What the API serves of an engine."""
    return EmbeddingBackend(
        model_id=name,
        created=1_700_000_000,
        tokenizer=tokenizer,
        embedder=engine,
        width=WIDTH,
        longest=LONGEST,
        status=lambda: EmbeddingModelStatus(
            name=name,
            phase="serving",
            ready=engine.is_ready,
            stages=(EmbeddingStageStatus(host="attic", address="10.0.0.2:1", layers=(0, 2)),),
            model=ModelDescription(name=name, context=LONGEST, numeric_mode="fast"),
            embeddings=engine.statistics.counts(engine.num_waiting),
        ),
    )
