"""Host of an embedding model: memory that the whole model takes, and the choice among hosts.

Where llama.cpp does the same as for a stage, the formulas are those of `mesh.placement.memory_estimate`. A
batch has a mask of all its rows by all its rows, and llama.cpp reserves a row of logits for each token of the
largest batch so far, even for models that compute none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

from mesh.placement.gpu_layers import ALL, GPU_PROCESS_BYTES
from mesh.placement.memory_estimate import MASK_BYTES, PROCESS_BYTES
from mesh.placement.planner import SPEED_NOISE, Plan, StagePlacement
from spanmesh_proto.errors import ModelDoesNotFit, NotEnoughHosts
from stages.layers import LayerRange
from stages.runtime.kv_types import KV_TYPES
from stages.runtime.process_memory import GpuShare, StageMemory
from stages.units import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.placement.host_capacity import HostCapacity
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
        wanted = self.model.n_layers if host.gpu_layers in {None, ALL} else host.gpu_layers or 0
        if host.uses_gpus and wanted >= self.model.n_layers:
            for gpu in sorted(host.gpus, key=lambda gpu: (-gpu.speed_gb_per_s, -gpu.free_bytes)):
                share = GpuShare(
                    gpu.name,
                    self.model.n_layers,
                    # The processor looks tokens up.
                    self.model.weight_bytes - self.model.lookup_bytes,
                    self._cache_bytes,
                    self._compute_bytes + GPU_PROCESS_BYTES,
                    gpu.shares_host_memory,
                )
                memory = replace(self.memory, gpus=(share,))
                if share.total_bytes <= gpu.free_bytes and memory.total_bytes <= host.memory_bytes:
                    return memory
        return self.memory if self.memory.total_bytes <= host.memory_bytes else None

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
    """The best host for an embedding model: with a GPU for it, else a fast one, with the most memory left.

    Args:
        sizes: Sizes of the model.
        hosts: Capacities, in the order in which the hosts joined.

    Returns:
        A plan of one stage.

    Raises:
        NotEnoughHosts: If there is no host.
        ModelDoesNotFit: With the memory that is needed and that each host has left.
    """
    if not hosts:
        raise NotEnoughHosts(
            f"no host can hold {sizes.model.name}: none is ready; see `mesh status`, or join one with "
            "`mesh join`"
        )
    fitting = [(host, memory) for host in hosts if (memory := sizes.memory_on(host)) is not None]
    if not fitting:
        raise ModelDoesNotFit(
            f"{sizes.model.name} does not fit on one host: it needs {format_size(sizes.memory.total_bytes)} "
            f"({sizes.memory}); free are {', '.join(map(str, hosts))}; lower --ctx-size, unload another "
            "model, or join a host with more memory"
        )
    if any(memory.gpus for _, memory in fitting):
        fitting = [(host, memory) for host, memory in fitting if memory.gpus]
    least = max(_speed(host, memory) for host, memory in fitting) / (1 + SPEED_NOISE)
    quick = [(host, memory) for host, memory in fitting if _speed(host, memory) >= least]
    host, memory = max(quick, key=lambda found: found[0].memory_bytes)
    where = f"the {memory.gpus[0].device} of {host.name}" if memory.gpus else host.name
    return Plan((StagePlacement(host.name, sizes.layers, memory),), f"{where} holds the whole model")


def _speed(host: HostCapacity, memory: StageMemory) -> float:
    return host.fastest_gb_per_s if memory.gpus else host.speed_gb_per_s
