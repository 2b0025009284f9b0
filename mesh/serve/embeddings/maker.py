"""Maker of an embedding model's process: its configuration, and the file that its host fetches."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import structlog

from mesh.serve.stage_factory import ServedFiles, described
from mesh.serve.stage_handle import StageHandle, new_ring_credentials
from mesh.util.terminal import progress_bars
from spanmesh_proto.errors import InvalidModel, StageFailed
from stages.embedding.actor import EmbeddingActor
from stages.runtime.stage_runtime import RuntimeOptions
from stages.serving.actor import StageConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mesh.cluster.members import Member
    from mesh.placement.planner import StagePlacement
    from mesh.serve.embeddings.model import EmbeddingModel
    from mesh.serve.head import Head
    from stages.layers import LayerRange
    from stages.runtime.process_memory import StageMemory
    from stages.transport.hidden_codec import HiddenType
    from stages.weights.recipe import Recipe
    from stages.weights.virtual_stages import StageCache


log = structlog.get_logger()


class EmbeddingMaker:
    """Makes the process of one embedding model; see `mesh.serve.reconfiguration.Maker`.

    Args:
        model: The model.
        head: The open head.
        cache: Files of this host, from which other hosts fetch.
    """

    def __init__(self, model: EmbeddingModel, head: Head, cache: StageCache) -> None:
        self._model = model
        self._head = head
        self._cache = cache
        self._files = ServedFiles(model.sizes.model.path, model.known.stamps)
        self._recipe: Recipe | None = None

    async def describe(self, stages: Iterable[tuple[str, LayerRange]]) -> None:
        """Hash the model's file once, unless it stays on this host.

        Args:
            stages: Name of the host, and all layers.

        Raises:
            InvalidModel: If the file is needed, and was replaced since the model was checked.
            ModelError: See `StageCache.describe_whole`.
        """
        hosts = [host for host, _ in stages]
        is_missing = self._recipe is None and not all(map(self._is_here, hosts))
        is_needed = is_missing or any(map(self._is_here, hosts))
        if hosts and await self._files.are_others(self._has_same_hash, is_needed=is_needed):
            if is_needed:
                raise self._files.error()
            # A host that lacks the file is refused another one; other hosts have it in their caches.
            log.warning("model_changed", reason=self._files.error().message)
        if is_missing:
            recipe = await self._described()
            if await self._files.are_touched():
                raise self._files.error()
            self._recipe = recipe

    async def _described(self) -> Recipe:
        path = self._model.sizes.model.path
        with progress_bars() as bars:
            return await described(
                partial(self._cache.describe_whole, path), bars.add(f"hashing {path.name}")
            )

    async def _has_same_hash(self) -> bool | None:
        """Whether the file has the hash of the recipe; None without one."""
        if self._recipe is None:
            return None
        try:
            return (await self._described()).sha256 == self._recipe.sha256
        except InvalidModel:
            return False

    def make(
        self,
        placement: StagePlacement,
        member: Member,
        *,
        wire: HiddenType,
        num_threads: int,
        beside: Sequence[StageMemory] = (),
    ) -> StageHandle:
        """The process, which is not started.

        Args:
            placement: Memory of the model on its host.
            member: Its host.
            wire: Not used: it sends no hidden states.
            num_threads: Threads of the host for the model.
            beside: Memory of what is loaded there at the same time.
        """
        is_own, recipe = self._head.is_own(member), self._recipe
        if not is_own and recipe is None:
            raise StageFailed(f"the file of {self._model.name} was not hashed before it was sent")
        limits = self._model.sizes.limits
        # Random credentials until it serves.
        credentials = new_ring_credentials()
        config = StageConfig(
            stage_index=0,
            layers=placement.layers,
            sha256="" if is_own or recipe is None else recipe.sha256,
            whole=str(self._model.sizes.model.path.absolute()) if is_own else None,
            source=self._head.source_for(member),
            options=RuntimeOptions(
                num_slots=limits.most_texts,
                ctx_size=limits.longest,
                num_threads=num_threads,
                gpu_layers=placement.memory.gpu_layers,
            ),
            host=member.name,
            memory=placement.memory,
            beside_bytes=sum(other.loading_bytes for other in beside),
            mesh_id=credentials.mesh_id,
            mesh_key=credentials.mesh_key,
            hidden_type=wire,
        )
        return StageHandle(
            self._head.driver,
            self._head.authority,
            config,
            member,
            on_transfer=self._model.transfers.note,
            kind=EmbeddingActor,
        )

    def _is_here(self, host: str) -> bool:
        member = self._head.members.find(host)
        return member is not None and self._head.is_own(member)
