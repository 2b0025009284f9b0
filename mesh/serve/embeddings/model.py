"""Embedding model that is served: the checks of its file, its engine, state and host."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from mesh.embedding.engine import EmbeddingEngine
from mesh.embedding.registry import EmbeddingBackend
from mesh.placement.embedding_host import EmbeddingSizes
from mesh.serve.failures import Incidents
from mesh.serve.head_state import fingerprint
from mesh.serve.pipeline import Pipeline
from mesh.status import EmbeddingModelStatus, EmbeddingStageStatus, ModelDescription
from mesh.text.text_service import text_bytes_of
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto import PROTOCOL_VERSION, SOFTWARE_VERSION
from spanmesh_proto.errors import ModelNotFound
from stages.embedding.model_file import limits_of, read_embedding_facts
from stages.gguf import part_paths
from stages.weights.hashing import stamps_of

if TYPE_CHECKING:
    from mesh.options.model import LoadRequest
    from mesh.serve.stage_factory import Transfers
    from stages.weights.hashing import FileStamp

_POLL_S: Final = 0.1

log = structlog.get_logger()


@dataclass(frozen=True)
class EmbeddingPreflight:
    """Results of the checks before any work begins."""

    sizes: EmbeddingSizes
    """Sizes of the model, and limits of its batches."""
    tokenizer: Tokenizer
    """Tokenizer of the model."""
    setup: str
    """Fingerprint of all settings that it is loaded with."""
    stamps: tuple[FileStamp, ...]
    """Stamps of the model's files when they were read."""
    text_bytes: int
    """Memory of the vocabulary in all processes for texts on the head's host."""


@dataclass
class EmbeddingState:
    """State of one embedding model, for `/mesh/status`."""

    phase: str = "starting"
    """Current step, in a few words."""
    plan_reason: str | None = None
    """Reason of the placement, once it is known."""
    incidents: Incidents = field(default_factory=lambda: Incidents(time.time))
    """Recent failures."""


@dataclass(frozen=True, eq=False)
class EmbeddingModel:
    """One embedding model, from the check of its file to the end of its process."""

    name: str
    """Model name for clients."""
    load_request: LoadRequest
    """Request of `mesh load`."""
    known: EmbeddingPreflight
    """Results of the checks."""
    engine: EmbeddingEngine
    """Engine of the API; answers once the model is loaded."""
    state: EmbeddingState
    """State for `/mesh/status`."""
    pipeline: Pipeline
    """All layers as one stage."""
    transfers: Transfers
    """Record of weights sent to hosts."""

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """All that it has on hosts."""
        return (self.pipeline,)

    @property
    def setup(self) -> str:
        """Fingerprint of all settings that it is loaded with."""
        return self.known.setup

    @property
    def sizes(self) -> EmbeddingSizes:
        """Sizes of the model."""
        return self.known.sizes

    def backend(self, created_s: float) -> EmbeddingBackend:
        """Backend of the API.

        Args:
            created_s: When the model was loaded, Unix seconds.
        """
        return EmbeddingBackend(
            model_id=self.name,
            created=int(created_s),
            tokenizer=self.known.tokenizer,
            embedder=self.engine,
            width=self.sizes.model.width,
            longest=self.sizes.limits.longest,
            status=self.status,
        )

    def status(self) -> EmbeddingModelStatus:
        """What `/mesh/status` says of it."""
        facts, limits = self.sizes.model, self.sizes.limits
        return EmbeddingModelStatus(
            name=self.name,
            model=ModelDescription(
                name=facts.name,
                architecture=facts.architecture,
                layers=facts.n_layers,
                file_bytes=facts.file_bytes,
                context=limits.longest,
                numeric_mode="fast",
                dimensions=facts.width,
                pooling=facts.pooling,
            ),
            phase=self.state.phase,
            ready=self.engine.is_ready,
            plan=self.state.plan_reason,
            stages=tuple(
                EmbeddingStageStatus(
                    host=handle.member.name,
                    address=handle.serves_at,
                    layers=(handle.config.layers.start, handle.config.layers.stop),
                    threads=handle.config.options.num_threads,
                )
                for handle in self.pipeline.handles
            ),
            embeddings=self.engine.statistics.counts(self.engine.num_waiting),
            failures=self.state.incidents.failures,
            repairs=self.state.incidents.repairs,
        )

    async def drained(self, wait_s: float) -> int:
        """Wait for requests to end, then refuse all others.

        Args:
            wait_s: Longest wait, in seconds.

        Returns:
            Number of requests that were ended.
        """
        deadline_s = time.monotonic() + wait_s
        while (num_left := self.engine.num_requests) and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        if num_left:
            log.warning("requests_ended", model=self.name, requests=num_left, after_s=wait_s)
        self.engine.give_up(ModelNotFound(f"the model `{self.name}` was unloaded", param="model"))
        return num_left


def check_embedding_model(load_request: LoadRequest) -> EmbeddingPreflight:
    """Check a model and its options; blocks for a moment.

    Raises:
        InvalidModel: If the file is no GGUF or truncated, has no vocabulary, or makes no vectors of texts.
        ClusterError: If the model was not trained for texts of the requested length.
    """
    path = Path(load_request.model)
    facts = read_embedding_facts(path)
    sizes = EmbeddingSizes(facts, limits_of(facts, load_request.ctx_size))
    stamps = stamps_of(part_paths(path))
    setup = fingerprint(
        kind="embeddings",
        model=str(path.resolve()),
        files=[(stamp.size_bytes, stamp.mtime_ns) for stamp in stamps],
        limits=sizes.limits,
        software=(SOFTWARE_VERSION, PROTOCOL_VERSION),
    )
    return EmbeddingPreflight(sizes, Tokenizer(path), setup, stamps, text_bytes_of(path))


def new_embedding_model(
    name: str, load_request: LoadRequest, known: EmbeddingPreflight, transfers: Transfers
) -> EmbeddingModel:
    """A model before it has a host.

    Args:
        name: Model name for clients.
        load_request: Request of `mesh load`.
        known: Results of the checks.
        transfers: Record of weights sent to hosts.
    """
    engine = EmbeddingEngine(
        known.sizes.limits,
        known.sizes.model.width,
        max_waiting=load_request.max_waiting,
        clock_s=time.monotonic,
    )
    return EmbeddingModel(name, load_request, known, engine, EmbeddingState(), Pipeline(), transfers)
