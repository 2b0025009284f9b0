"""How many bytes a stage takes and reads, for any layers of a model. Pure.

What llama.cpp takes was measured, with SmolLM2-135M and Gemma-3-270m from 512 to 131,072 positions. A KV
cache is allocated and cleared at once, layers with a sliding window included: only a full cache can go back
to any position. Buffers for computing grow with the rows of a batch and hold one attention mask, or two if
some layers have a window. There is room for logits of every row that a batch may have.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

from stages.kv_types import KV_TYPES
from stages.layers import LayerRange
from stages.numerics import Numerics, numerics_for
from stages.sent_rows import room_for_sent_rows
from stages.stage_memory import StageMemory

if TYPE_CHECKING:
    from mesh.host_capacity import HostCapacity
    from stages.cutting import ModelFacts

# Python, Ray's worker, gRPC and llama.cpp's code, with some room.
PROCESS_BYTES: Final = 192 * 2**20
_F32_BYTES: Final = 4
_MASK_BYTES: Final = 2
# What llama.cpp knows of each position in a cache: its number, its sequences, and where each sequence has it.
_CELL_BYTES: Final = 100
# llama.cpp lists the vocabulary, even one of ids without texts.
_TOKEN_BYTES: Final = 64
# Logits of a batch: where they are computed, where llama.cpp hands them out, and our copy.
_TAIL_LOGITS: Final = 3


@dataclass(frozen=True)
class Workload:
    """What stages must hold besides weights.

    Attributes:
        ctx_size: Positions of one session.
        num_slots: Sessions at once.
        kv_type: Format of the KV cache, one of `stages.kv_types.KV_TYPES`.
        is_exact: Numeric mode, see `stages.numerics`.
        on_gpu: Whether layers are on a GPU.
    """

    ctx_size: int
    num_slots: int
    kv_type: str = "f16"
    is_exact: bool = False
    on_gpu: bool = False

    @property
    def numerics(self) -> Numerics:
        """Of the mode, as it is with several threads, which takes more."""
        return numerics_for(exact=self.is_exact, num_threads=2, has_gpu=self.on_gpu)

    @property
    def num_cells(self) -> int:
        """Positions in the KV cache."""
        return self.numerics.num_cells(self.ctx_size, self.num_slots)


@dataclass(frozen=True)
class StageSizes:
    """Sizes of any stage of one model under one workload.

    Attributes:
        model: Whose stages.
        workload: What they must hold besides weights.
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

    @cached_property
    def on_gpu(self) -> StageSizes:
        """The same where layers are on a GPU."""
        return replace(self, workload=replace(self.workload, on_gpu=True))

    @cached_property
    def placed(self) -> dict[tuple[LayerRange, HostCapacity], StageMemory | None]:
        """What `mesh.offload` has found out; a plan asks the same again and again."""
        return {}

    @property
    def whole(self) -> LayerRange:
        """All layers."""
        return LayerRange(0, self.model.n_layers)

    def memory(self, layers: LayerRange) -> StageMemory:
        """What the stage takes of its host."""
        return StageMemory(
            self.weight_bytes(layers), self.cache_bytes(layers), self._buffer_bytes(layers), PROCESS_BYTES
        )

    def read_bytes(self, layers: LayerRange) -> int:
        """What is read for each token: of the embedding only a row, the head whole."""
        sums = self._layer_sums
        head = self.model.head_bytes if layers.stop == self.model.n_layers else 0
        return sums[layers.stop] - sums[layers.start] + head

    def weight_bytes(self, layers: LayerRange) -> int:
        """What is loaded."""
        has_it_as_head = self.model.is_tied and layers.stop == self.model.n_layers
        holds_embedding = (layers.start == 0 or self.model.embeds_everywhere) and not has_it_as_head
        return self.read_bytes(layers) + (self.model.embedding_bytes if holds_embedding else 0)

    def cache_bytes(self, layers: LayerRange) -> int:
        """What the KV cache takes, and the state of recurrent layers; of blanks, too."""
        sums, states = self._width_sums, self._state_sums
        num_blanks = self.model.num_blanks if layers.start else 0
        width = sums[layers.stop] - sums[layers.start] + num_blanks * max(self.model.kv_widths, default=0)
        state = (
            states[layers.stop] - states[layers.start] + num_blanks * max(self.model.state_widths, default=0)
        )
        if self.model.state_widths:
            # A stage of one kind of layers has company of the other, see `stages.cutting.rules.company`.
            width = width or max(self.model.kv_widths, default=0)
            state = state or max(self.model.state_widths)
        state_bytes = state * _F32_BYTES * self.workload.num_slots
        return KV_TYPES[self.workload.kv_type].num_bytes(width) * self.workload.num_cells + state_bytes

    def compute_bytes(self, layers: LayerRange) -> int:
        """What llama.cpp computes in, at most, on any one device."""
        is_first, is_tail = layers.start == 0, layers.stop == self.model.n_layers
        vocabulary = self.model.n_vocab if is_first or is_tail else 0
        # The first stage has a vocabulary, so llama.cpp makes room for logits, of which it computes none.
        logits = _TAIL_LOGITS if is_tail else 1
        return (
            self._row_bytes
            + vocabulary * (logits * self.workload.numerics.max_rows * _F32_BYTES + _TOKEN_BYTES)
            + self.workload.num_cells * self._num_masks * _CELL_BYTES
        )

    def _buffer_bytes(self, layers: LayerRange) -> int:
        is_tail = layers.stop == self.model.n_layers
        sent = 0 if is_tail else room_for_sent_rows(self.cache_bytes(layers))
        return self.compute_bytes(layers) + sent + self._packing_bytes(layers)

    def _packing_bytes(self, layers: LayerRange) -> int:
        """What weights take more in the order that fast kernels like."""
        if not self.workload.numerics.use_repacked_weights:
            return 0
        head = self.model.head_packing_bytes if layers.stop == self.model.n_layers else 0
        return sum(self.model.packing_bytes[layers.start : layers.stop]) + head

    @cached_property
    def _row_bytes(self) -> int:
        """What the rows of a batch take: their activations, and their masks over the cache."""
        seen = self.workload.numerics.num_cells_seen(self.workload.ctx_size, self.workload.num_slots)
        of_one = self.model.row_width * _F32_BYTES + seen * self._num_masks * _MASK_BYTES
        return self.workload.numerics.max_rows * of_one

    @property
    def _num_masks(self) -> int:
        return 2 if self.model.has_windows else 1

    @cached_property
    def _layer_sums(self) -> list[int]:
        return list(itertools.accumulate(self.model.layer_bytes, initial=0))

    @cached_property
    def _width_sums(self) -> list[int]:
        return list(itertools.accumulate(self.model.kv_widths, initial=0))

    @cached_property
    def _state_sums(self) -> list[int]:
        widths = self.model.state_widths or (0,) * self.model.n_layers
        return list(itertools.accumulate(widths, initial=0))
