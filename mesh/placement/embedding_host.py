"""Host of an embedding model: memory that the whole model takes there.

Where llama.cpp does the same as for a stage, the formulas are those of `mesh.placement.memory_estimate`. A
batch has a mask of all its rows by all its rows, and llama.cpp reserves a row of logits for each token of the
largest batch so far, even for models that compute none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from mesh.placement.gpu_layers import GPU_PROCESS_BYTES
from mesh.placement.memory_estimate import MASK_BYTES, PROCESS_BYTES
from mesh.placement.one_host import memory_on_one, place_on_one
from stages.layers import LayerRange
from stages.runtime.kv_types import KV_TYPES
from stages.runtime.process_memory import GpuShare, StageMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.placement.host_capacity import HostCapacity
    from mesh.placement.planner import Plan
    from stages.embedding.model_file import BatchLimits, EmbeddingFacts

_KV_TYPE: Final = "f16"
_F32_BYTES: Final = 4
# llama.cpp's record of each position in a cache.
_CELL_BYTES: Final = 100
# llama.cpp's list of the vocabulary, with texts and their index; bytes per token.
_TOKEN_BYTES: Final = 256


@dataclass(frozen=True)
class EmbeddingSizes:
    """Sizes of an embedding model with its batches."""

    model: EmbeddingFacts
    """Facts of the model."""
    limits: BatchLimits
    """Limits of its batches."""

    @property
    def layers(self) -> LayerRange:
        """All layers of the model."""
        return LayerRange(0, self.model.n_layers)

    @cached_property
    def memory(self) -> StageMemory:
        """Memory of the model on a host's processor; an upper bound."""
        return StageMemory(
            self.model.weight_bytes,
            self._cache_bytes,
            self._compute_bytes + self.model.packing_bytes,
            PROCESS_BYTES,
        )

    def memory_on(self, host: HostCapacity) -> StageMemory | None:
        """Memory of the model on a host: on one of its GPUs if it fits there, else on the processor.

        Args:
            host: With the capacity left.

        Returns:
            None if it does not fit.
        """
        share = GpuShare(
            "",
            self.model.n_layers,
            # The processor looks tokens up.
            self.model.weight_bytes - self.model.lookup_bytes,
            self._cache_bytes,
            self._compute_bytes + GPU_PROCESS_BYTES,
        )
        return memory_on_one(host, self.memory, share)

    @property
    def _cache_bytes(self) -> int:
        state_bytes = self.model.state_width * _F32_BYTES * self.limits.most_texts
        return KV_TYPES[_KV_TYPE].num_bytes(self.model.cache_width) * self.limits.most_rows + state_bytes

    @property
    def _compute_bytes(self) -> int:
        model, rows = self.model, self.limits.most_rows
        logits = 2 if model.has_logits else 1
        of_row = model.row_width + logits * model.n_vocab + model.width
        cells = rows * _CELL_BYTES if model.cache_width else 0
        masks = rows * rows * model.num_masks * MASK_BYTES
        return rows * of_row * _F32_BYTES + masks + cells + model.n_vocab * _TOKEN_BYTES


def place_embeddings(sizes: EmbeddingSizes, hosts: Sequence[HostCapacity]) -> Plan:
    """The best host for an embedding model; see `place_on_one`, whose errors it raises."""
    return place_on_one(
        sizes.model.name,
        sizes.layers,
        sizes.memory,
        [(host, sizes.memory_on(host)) for host in hosts],
        what="the whole model",
        remedy="lower --ctx-size, unload another model, or join a host with more memory",
    )
