"""How many bytes a stage takes and reads, for any layers of a model. Pure."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from stages.layers import LayerRange

if TYPE_CHECKING:
    from stages.cutting import ModelFacts

# What a stage takes besides weights and KV cache: its process, and llama.cpp's compute buffers.
STAGE_OVERHEAD_BYTES: Final = 400 * 2**20
# The tail keeps logits for as many rows as a batch may have.
_LOGIT_ROWS: Final = 128
_F32_BYTES: Final = 4


@dataclass(frozen=True)
class Workload:
    """What the KV caches must hold.

    Attributes:
        ctx_size: Positions of one session.
        num_slots: Sessions at once.
    """

    ctx_size: int
    num_slots: int


@dataclass(frozen=True)
class StageSizes:
    """Sizes of any stage of one model under one workload.

    Attributes:
        model: Whose stages.
        workload: What their KV caches must hold.
        only_cuts: Where stages start, if that is settled; 0 left out.
    """

    model: ModelFacts
    workload: Workload
    only_cuts: tuple[int, ...] | None = None

    @property
    def edges(self) -> tuple[int, ...]:
        """Where a stage may start or stop."""
        cuts = self.model.allowed_cuts if self.only_cuts is None else self.only_cuts
        return (0, *sorted(cuts), self.model.n_layers)

    @property
    def whole(self) -> LayerRange:
        """All layers."""
        return LayerRange(0, self.model.n_layers)

    def weight_bytes(self, layers: LayerRange) -> int:
        """What is loaded."""
        return self.read_bytes(layers) + (self.model.embedding_bytes if layers.start == 0 else 0)

    def read_bytes(self, layers: LayerRange) -> int:
        """What is read for each token: of the embedding only a row, the head whole."""
        sums = self._layer_sums
        head = self.model.head_bytes if layers.stop == self.model.n_layers else 0
        return sums[layers.stop] - sums[layers.start] + head

    def cache_bytes(self, layers: LayerRange) -> int:
        """What the KV cache takes."""
        sums = self._cache_sums
        return (sums[layers.stop] - sums[layers.start]) * self.workload.ctx_size * self.workload.num_slots

    def memory_bytes(self, layers: LayerRange) -> int:
        """What the stage takes of its host."""
        logits = self.model.n_vocab * _F32_BYTES * _LOGIT_ROWS if layers.stop == self.model.n_layers else 0
        return self.weight_bytes(layers) + self.cache_bytes(layers) + logits + STAGE_OVERHEAD_BYTES

    @cached_property
    def _layer_sums(self) -> list[int]:
        return list(itertools.accumulate(self.model.layer_bytes, initial=0))

    @cached_property
    def _cache_sums(self) -> list[int]:
        return list(itertools.accumulate(self.model.kv_bytes_per_token, initial=0))
