"""Makes stages: the file is cut, the rest is said to whoever is to load it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from mesh.serve.cutting import cut_stages
from mesh.serve.mesh_keys import new_mesh_keys
from mesh.serve.stage_handle import StageHandle
from stages.actor import StageConfig
from stages.runtime import RuntimeOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.cluster.members import Member
    from mesh.planner import StagePlacement
    from mesh.serve.head import Head
    from mesh.serve.options import ServeOptions
    from mesh.serve.preflight import Preflight
    from stages.cutting import StageCache, StageFile
    from stages.hidden_codec import HiddenType
    from stages.layers import LayerRange
    from stages.stage_memory import StageMemory


class StageMaker:
    """Knows all that stages of one model have in common.

    Args:
        options: What the user says.
        known: What was found out beforehand.
        head: Open.
        cache: Of this host: hosts fetch from it.
    """

    def __init__(self, options: ServeOptions, known: Preflight, head: Head, cache: StageCache) -> None:
        self._options = options
        self._known = known
        self._head = head
        self._cache = cache
        self._files: dict[LayerRange, StageFile] = {}

    async def cut(self, parts: Sequence[LayerRange]) -> None:
        """Have the files of these layers ready; those that are take no time.

        Raises:
            ModelError: See `StageCache.cut`.
        """
        missing = [layers for layers in parts if not self._has(layers)]
        if missing:
            for file in await cut_stages(self._cache, self._options.model, missing):
                self._files[file.layers] = file

    def make(
        self,
        placement: StagePlacement,
        member: Member,
        *,
        wire: HiddenType,
        num_threads: int,
        beside: Sequence[StageMemory] = (),
    ) -> StageHandle:
        """A stage whose file was cut; nothing of it runs yet.

        Args:
            placement: Which layers, and what they take.
            member: Its host.
            wire: How its hidden states travel.
            num_threads: Of the host's, for this stage.
            beside: What other stages are to take there at the same time.
        """
        file, workload = self._files[placement.layers], self._known.workload
        # Until it joins a ring it is in none: nobody knows these.
        keys = new_mesh_keys()
        config = StageConfig(
            stage_index=0,
            layers=file.layers,
            sha256=file.sha256,
            size_bytes=file.size_bytes,
            source=self._head.source,
            options=RuntimeOptions(
                num_slots=workload.num_slots,
                ctx_size=workload.ctx_size,
                num_threads=num_threads,
                exact=self._options.is_exact,
                kv_type=workload.kv_type,
                gpu_layers=placement.memory.gpu_layers,
            ),
            host=member.name,
            memory=placement.memory,
            beside_bytes=sum(other.loading_bytes for other in beside),
            beside_gpu_bytes=_on_gpus(beside),
            mesh_id=keys.mesh_id,
            mesh_key=keys.mesh_key,
            hidden_type=wire,
        )
        return StageHandle(self._head.driver, self._head.authority, config, member)

    def _has(self, layers: LayerRange) -> bool:
        """A file that was damaged or removed meanwhile is to be cut again."""
        file = self._files.get(layers)
        return file is not None and self._cache.find(file.sha256) is not None


def _on_gpus(stages: Sequence[StageMemory]) -> dict[str, int]:
    """What stages take of each GPU together."""
    taken = Counter[str]()
    for stage in stages:
        taken.update({share.device: share.total_bytes for share in stage.gpus})
    return dict(taken)
