"""Stage sizes: bytes of a stage for a workload, split over CPU and GPUs.

The memory that llama.cpp takes was measured, with SmolLM2-135M and Gemma-3-270m from 512 to 131,072
positions. A KV cache is allocated and cleared at once, layers with a sliding window included: only a full
cache can go back to any position. Compute buffers grow with the rows of a batch and hold one attention mask,
or two if some layers have a window. Logits are allocated for every row of a batch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from stages.layers import LayerRange
from stages.runtime.kv_types import KV_TYPES
from stages.runtime.numerics import Numerics, numerics_for
from stages.runtime.process_memory import StageMemory
from stages.serving.sent_rows import LEAST_SENT_BYTES, SHARE_OF_CACHE, max_sent_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from mesh.placement.host_capacity import HostCapacity
    from stages.slicing.model_facts import ModelFacts

# Python, Ray's worker, gRPC and llama.cpp's code, with some room.
PROCESS_BYTES: Final = 192 * 2**20
_F32_BYTES: Final = 4
MASK_BYTES: Final = 2
# llama.cpp's record of each position in a cache: its number, its sequences, and the place of each sequence.
CELL_BYTES: Final = 100
# llama.cpp lists the vocabulary, even one of ids without texts; bytes per token.
_TOKEN_BYTES: Final = 64
# Copies of a batch's logits: where they are computed, llama.cpp's output, and ours.
_TAIL_LOGITS: Final = 3

Bytes: TypeAlias = "NDArray[np.int64]"


@dataclass(frozen=True)
class Workload:
    """Contents of stages besides weights."""

    ctx_size: int
    """Positions of one session."""
    num_slots: int
    """Concurrent sessions."""
    kv_type: str = "f16"
    """Format of the KV cache, one of `stages.runtime.kv_types.KV_TYPES`."""
    is_exact: bool = False
    """Numeric mode, see `stages.runtime.numerics`."""
    on_gpu: bool = False
    """Whether layers are on a GPU."""
    num_checkpoints: int = 0
    """Checkpoints of each session's recurrent state; 0 for models without one."""
    repacks: bool = True
    """Whether weights may be repacked for faster kernels."""
    most_at_once: int = 0
    """Most rows that have to be computed at once, see `RuntimeOptions`; 0 for none."""

    @property
    def max_rows(self) -> int:
        """Most rows of a batch."""
        return max(self.numerics.max_rows, self.most_at_once)

    @property
    def num_states(self) -> int:
        """Recurrent states, checkpoints included."""
        return self.num_slots * (1 + self.num_checkpoints)

    @property
    def numerics(self) -> Numerics:
        """Numerics of the mode, for several threads, which take more memory than one."""
        return numerics_for(exact=self.is_exact, num_threads=2, has_gpu=self.on_gpu, repacks=self.repacks)

    @property
    def num_cells(self) -> int:
        """Positions in the KV cache."""
        return self.numerics.num_cells(self.ctx_size, self.num_slots)


@dataclass(frozen=True)
class StageSizes:
    """Sizes of the stages of one model under one workload."""

    model: ModelFacts
    """Facts of the model."""
    workload: Workload
    """Contents of stages besides weights."""
    only_cuts: tuple[int, ...] | None = None
    """First layers of the stages if they are fixed, 0 left out; None for all allowed cuts."""

    @property
    def edges(self) -> tuple[int, ...]:
        """Layers where a stage may start or stop."""
        cuts = self.model.allowed_cuts if self.only_cuts is None else self.only_cuts
        return (0, *sorted(cuts), self.model.n_layers)

    @cached_property
    def on_gpu(self) -> StageSizes:
        """The same with layers on a GPU."""
        return replace(self, workload=replace(self.workload, on_gpu=True))

    @cached_property
    def placed(self) -> dict[tuple[LayerRange, HostCapacity], StageMemory | None]:
        """Cache of `memory_on`: a plan asks for the same again and again."""
        return {}

    @cached_property
    def _layers_bytes(self) -> dict[tuple[int, int], int]:
        return {}

    @cached_property
    def _memories(self) -> dict[LayerRange, StageMemory]:
        return {}

    @property
    def whole(self) -> LayerRange:
        """All layers."""
        return LayerRange(0, self.model.n_layers)

    def memory(self, layers: LayerRange) -> StageMemory:
        """Memory of the stage on its host."""
        memory = self._memories.get(layers)
        if memory is None:
            cache_bytes = self.cache_bytes(layers)
            memory = self._memories[layers] = StageMemory(
                self.weight_bytes(layers), cache_bytes, self._buffer_bytes(layers, cache_bytes), PROCESS_BYTES
            )
        return memory

    def read_bytes(self, layers: LayerRange) -> int:
        """Bytes read for each token: of the embedding only a row, the head whole."""
        sums = self._layer_sums
        head = self.model.head_bytes if layers.stop == self.model.n_layers else 0
        return sums[layers.stop] - sums[layers.start] + head

    def weight_bytes(self, layers: LayerRange) -> int:
        """Bytes of the stage's weights."""
        has_it_as_head = self.model.is_tied and layers.stop == self.model.n_layers
        holds_embedding = (layers.start == 0 or self.model.embeds_everywhere) and not has_it_as_head
        return self.read_bytes(layers) + (self.model.embedding_bytes if holds_embedding else 0)

    def cache_bytes(self, layers: LayerRange) -> int:
        """Bytes of the KV cache and the states of recurrent layers; blanks and checkpoints included."""
        sums, states = self._width_sums, self._state_sums
        most_width, most_state = self._most_widths
        num_blanks = self.model.num_blanks if layers.start else 0
        width = sums[layers.stop] - sums[layers.start] + num_blanks * most_width
        state = states[layers.stop] - states[layers.start] + num_blanks * most_state
        if self.model.state_widths:
            # A stage with layers of one kind gets blanks of the other, see
            # `stages.slicing.architectures.layer_patterns`.
            width = width or most_width
            state = state or most_state
        state_bytes = state * _F32_BYTES * self.workload.num_states
        return KV_TYPES[self.workload.kv_type].num_bytes(width) * self._num_cells + state_bytes

    def position_values(self, layers: LayerRange) -> int:
        """Numbers of K and V that a row reads for each position before it, where no window hides them."""
        return self._width_sums[layers.stop] - self._width_sums[layers.start]

    def total_bytes(self, starts: Bytes, stops: Bytes) -> Bytes:
        """Memory of many stages on a host without GPUs, as `memory` gives it for one; arrays of int64.

        A search over all stages of a model needs thousands at once.

        Args:
            starts: First layers.
            stops: Last layers plus one, each above its start.
        """
        model = self.model
        is_first, is_tail = starts == 0, stops == model.n_layers
        cache_bytes = self._cache_bytes(starts, stops)
        middle, first, tail = self._compute_bytes
        compute_bytes = np.select([is_tail, is_first], [tail, first], middle)
        sent_bytes = np.where(is_tail, 0, np.maximum(LEAST_SENT_BYTES, cache_bytes // SHARE_OF_CACHE))
        holds_embedding = (is_first | model.embeds_everywhere) & ~(is_tail & model.is_tied)
        packing_bytes = _between(self._packing_sums, starts, stops) + is_tail * model.head_packing_bytes
        taken_bytes: Bytes = (
            self.many_read_bytes(starts, stops)
            + holds_embedding * model.embedding_bytes
            + cache_bytes
            + compute_bytes
            + sent_bytes
            + packing_bytes * self._numerics.use_repacked_weights
            + PROCESS_BYTES
        )
        return taken_bytes

    def many_read_bytes(self, starts: Bytes, stops: Bytes) -> Bytes:
        """Bytes that many stages read for each token, see `read_bytes` and `total_bytes`."""
        is_tail = stops == self.model.n_layers
        read_bytes: Bytes = _between(self._layer_sums, starts, stops) + is_tail * self.model.head_bytes
        return read_bytes

    def many_layer_bytes(self, starts: Bytes, stops: Bytes) -> Bytes:
        """Bytes of layers on their device, weights and cache, see `layer_bytes` and `total_bytes`."""
        return self.many_read_bytes(starts, stops) + self._cache_bytes(starts, stops)

    def _cache_bytes(self, starts: Bytes, stops: Bytes) -> Bytes:
        most_width, most_state = self._most_widths
        num_blanks = np.where(starts > 0, self.model.num_blanks, 0)
        width = _between(self._width_sums, starts, stops) + num_blanks * most_width
        state = _between(self._state_sums, starts, stops) + num_blanks * most_state
        if self.model.state_widths:
            width, state = np.where(width, width, most_width), np.where(state, state, most_state)
        kv_type = KV_TYPES[self.workload.kv_type]
        row_bytes = width // kv_type.block_width * kv_type.block_bytes
        cache_bytes: Bytes = row_bytes * self._num_cells + state * _F32_BYTES * self.workload.num_states
        return cache_bytes

    def layer_bytes(self, start: int, stop: int) -> int:
        """Bytes of layers `[start, stop)` on their device, weights and cache."""
        if (start, stop) not in self._layers_bytes:
            layers = LayerRange(start, stop)
            self._layers_bytes[start, stop] = self.read_bytes(layers) + self.cache_bytes(layers)
        return self._layers_bytes[start, stop]

    def expert_bytes(self, start: int, stop: int) -> int:
        """Bytes of the experts of layers `[start, stop)`; 0 for an empty range."""
        sums = self._expert_sums
        return sums[stop] - sums[start] if start < stop else 0

    def idle_head_bytes(self, layers: LayerRange) -> int:
        """Bytes of a head with which the stage computes nothing, where its last layer is."""
        is_first_of_several = layers.start == 0 and layers.stop < self.model.n_layers
        return self.model.idle_head_bytes if is_first_of_several else 0

    def compute_bytes(self, layers: LayerRange) -> int:
        """Upper bound of llama.cpp's compute buffers on any one device."""
        middle, first, tail = self._compute_bytes
        return tail if layers.stop == self.model.n_layers else middle if layers.start else first

    @cached_property
    def _compute_bytes(self) -> tuple[int, int, int]:
        """Compute buffers of a middle stage, of the first, and of the tail (which may be the first)."""
        middle = self._row_bytes + self._num_cells * self._num_masks * CELL_BYTES

        def with_logits(copies: int) -> int:
            of_one_token = copies * self.workload.max_rows * _F32_BYTES + _TOKEN_BYTES
            return middle + self.model.n_vocab * of_one_token

        # The first stage has a vocabulary, so llama.cpp allocates logits, though it computes none.
        return middle, with_logits(1), with_logits(_TAIL_LOGITS)

    def _buffer_bytes(self, layers: LayerRange, cache_bytes: int) -> int:
        is_tail = layers.stop == self.model.n_layers
        sent = 0 if is_tail else max_sent_bytes(cache_bytes)
        return self.compute_bytes(layers) + sent + self._packing_bytes(layers)

    def _packing_bytes(self, layers: LayerRange) -> int:
        """Bytes that weights take more in the layout of fast kernels."""
        if not self._numerics.use_repacked_weights:
            return 0
        sums = self._packing_sums
        head = self.model.head_packing_bytes if layers.stop == self.model.n_layers else 0
        return sums[layers.stop] - sums[layers.start] + head

    @cached_property
    def _row_bytes(self) -> int:
        """Bytes of a batch's rows: their activations, and their masks over the cache."""
        seen = self._numerics.num_cells_seen(self.workload.ctx_size, self.workload.num_slots)
        of_one = self.model.row_width * _F32_BYTES + seen * self._num_masks * MASK_BYTES
        return self.workload.max_rows * of_one

    @property
    def _num_masks(self) -> int:
        return 2 if self.model.has_windows else 1

    @cached_property
    def _numerics(self) -> Numerics:
        return self.workload.numerics

    @cached_property
    def _num_cells(self) -> int:
        return self.workload.num_cells

    @cached_property
    def _most_widths(self) -> tuple[int, int]:
        """Largest widths of a KV cache and of a recurrent state among the layers."""
        return max(self.model.kv_widths, default=0), max(self.model.state_widths, default=0)

    @cached_property
    def _packing_sums(self) -> list[int]:
        widths = self.model.packing_bytes or (0,) * self.model.n_layers
        return list(itertools.accumulate(widths, initial=0))

    @cached_property
    def _layer_sums(self) -> list[int]:
        return list(itertools.accumulate(self.model.layer_bytes, initial=0))

    @cached_property
    def _expert_sums(self) -> list[int]:
        widths = self.model.expert_bytes or (0,) * self.model.n_layers
        return list(itertools.accumulate(widths, initial=0))

    @cached_property
    def _width_sums(self) -> list[int]:
        return list(itertools.accumulate(self.model.kv_widths, initial=0))

    @cached_property
    def _state_sums(self) -> list[int]:
        widths = self.model.state_widths or (0,) * self.model.n_layers
        return list(itertools.accumulate(widths, initial=0))


def _between(sums: Sequence[int], starts: Bytes, stops: Bytes) -> Bytes:
    """Sums between layers, from the sums of all before each."""
    before = np.array(sums, np.int64)
    between: Bytes = before[stops] - before[starts]
    return between
