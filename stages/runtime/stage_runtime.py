"""Stage runtime: the llama.cpp model and context of one stage, and its batches over numpy memory."""

from __future__ import annotations

import ctypes
import functools
import itertools
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from spanmesh_proto.errors import InvalidWindow, ModelDoesNotFit, StageFailed, UncuttableModel
from spanmesh_proto.row_ids import stray_id
from stages.graph_boundary import GraphBoundary
from stages.runtime.bindings import llama_cpp
from stages.runtime.devices import GpuPlacing
from stages.runtime.hidden_tap import FeatureTaps, LayerTap, StopTap, make_stop_tap
from stages.runtime.kv_types import KV_TYPES
from stages.runtime.llama import init_backend, last_complaint
from stages.runtime.llama_libraries import attention_version, loaded_kernels
from stages.runtime.loaded_model import (
    StageInfo,
    ends_on_rows,
    load_model,
    may_scale_rotations,
    num_position_parts,
    read_metadata,
)
from stages.runtime.numerics import Numerics, numerics_for, prepare_process
from stages.runtime.slot_memory import SlotMemory
from stages.runtime.spans import Span, SpanBatch, SpanBatches

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray


# Inlets that llama.cpp's graph reads embeddings from as they come.
_INPUTS: Final = ("embd", "model.input_embed")


class Batch:
    """A reusable `llama_batch` over numpy memory.

    Args:
        max_rows: Capacity.
        n_embd: Width of hidden states in, or None if token ids go in.
        has_both: Whether token ids go in beside hidden states.
        num_parts: Parts of the position of a row; those of token ids have one.

    Attributes:
        width: As `n_embd`.
    """

    def __init__(
        self, max_rows: int, n_embd: int | None, *, has_both: bool = False, num_parts: int = 1
    ) -> None:
        self.width = n_embd
        self._has_tokens = has_both or n_embd is None
        self._tokens = np.zeros(max_rows, np.int32)
        self._hidden = None if n_embd is None else np.zeros((max_rows, n_embd), np.float32)
        self._has_parts = num_parts > 1
        self._parts = np.zeros((num_parts, max_rows), np.int32)
        self._positions = np.zeros(num_parts * max_rows, np.int32) if self._has_parts else self._parts[0]
        self._num_slots_of_row = np.ones(max_rows, np.int32)
        self._slots = np.zeros(max_rows, np.int32)
        self._outputs = np.zeros(max_rows, np.int8)
        slot_pointer = ctypes.POINTER(ctypes.c_int32)
        self._slot_pointers = (slot_pointer * max_rows)(
            *(ctypes.cast(self._slots.ctypes.data + 4 * row, slot_pointer) for row in range(max_rows))
        )
        self.struct = llama_cpp.llama_batch(
            n_tokens=0,
            token=_pointer(self._tokens, ctypes.c_int32) if self._has_tokens else None,
            embd=None if self._hidden is None else _pointer(self._hidden, ctypes.c_float),
            pos=_pointer(self._positions, ctypes.c_int32),
            n_seq_id=_pointer(self._num_slots_of_row, ctypes.c_int32),
            seq_id=ctypes.cast(self._slot_pointers, ctypes.POINTER(slot_pointer)),
            logits=_pointer(self._outputs, ctypes.c_int8),
        )

    def clear(self) -> None:
        """Remove all rows."""
        self.struct.n_tokens = 0

    def add(
        self,
        slot: int,
        start: int,
        tokens: Sequence[int],
        hidden: NDArray[np.float32] | None,
        first_output: int,
        *,
        parts: NDArray[np.int32] | None = None,
    ) -> None:
        """Append rows of one slot; those from `first_output` on return an output.

        Where hidden states go in, None stands for zeros. Without `parts`, int32 (4, rows), positions are
        consecutive from `start` on, as those of tokens are.
        """
        first = self.struct.n_tokens
        stop = first + len(tokens)
        if self._has_tokens:
            self._tokens[first:stop] = tokens
        if self._hidden is not None:
            self._hidden[first:stop] = 0 if hidden is None else hidden
        if parts is not None:
            self._parts[:, first:stop] = parts[: len(self._parts)]
        elif self._has_parts:
            self._parts[:3, first:stop] = np.arange(start, start + len(tokens))
            self._parts[3:, first:stop] = 0
        else:
            self._positions[first:stop] = np.arange(start, start + len(tokens))
        self._slots[first:stop] = slot
        self._outputs[first : first + first_output] = 0
        self._outputs[first + first_output : stop] = 1
        self.struct.n_tokens = stop

    def lay_out(self) -> llama_cpp.llama_batch:
        """The batch for llama.cpp, which reads each part of all positions before the next one."""
        if self._has_parts:
            laid_out = self._parts[:, : self.struct.n_tokens].reshape(-1)
            self._positions[: laid_out.size] = laid_out
        return self.struct


@dataclass(frozen=True)
class RuntimeOptions:
    """Options of a stage's computation."""

    num_slots: int = 1
    """Number of concurrent sequences."""
    ctx_size: int = 2048
    """Positions of each."""
    num_threads: int = 1
    """Threads of llama.cpp; they wait for one another, so no more than free cores."""
    exact: bool = False
    """Numeric mode, see `stages.runtime.numerics`."""
    kv_type: str = "f16"
    """Format of the KV cache, one of `stages.runtime.kv_types.KV_TYPES`."""
    observe_layers: tuple[int, ...] = ()
    """Layers whose outputs `observed` returns after a decode; for certification."""
    gpu_layers: tuple[tuple[str, int], ...] | None = None
    """Devices, by llama.cpp's names, each with its number of layers, in the order of layers: those before are
    the processor's, and the head goes with the last. None for llama.cpp's default, which puts all on the
    devices. In exact mode only devices count that may compute in it."""
    observe_as: GraphBoundary | None = None
    """Boundary of layers in a file that was never cut; for certification."""
    num_checkpoints: int = 0
    """Most checkpoints of each slot, in models with recurrent layers."""
    repacks: bool = True
    """Whether weights may be repacked for faster kernels."""
    cpu_moe_layers: int = 0
    """First layers of the stage whose experts the processor keeps and computes, though the rest of the layer
    is on a device."""
    has_reader: bool = False
    """Whether the context of another model reads its KV cache, see `StageRuntime.add_reader`. llama.cpp then
    does not choose by itself how attention is computed, which has to be the same for both."""
    most_at_once: int = 0
    """Most rows that have to be computed at once, as of images whose rows see each other, see
    `stages.runtime.row_positions`; 0 for no such rows."""


class StageRuntime:
    """A loaded stage and its KV cache. Not thread-safe: for one thread at a time.

    A GGUF that was never cut is loaded as the single stage of a whole model.

    Args:
        path: The stage file.
        options: Options of its computation.
        progress: Called with the loaded share, 0 to 1.

    Raises:
        InvalidModel: If llama.cpp cannot load the file.
        ModelDoesNotFit: If there is not enough memory for its KV cache and buffers.
        ClusterError: If the numeric mode is impossible in this process, or a device does not exist.

    Attributes:
        info: Facts of the stage.
        memory: Positions that its slots hold.
        input_width: Values of a row that goes in.
        takes_rows: Whether rows that are no tokens go in, at the first stage or again.
        hands_on_rows: Whether they do at a later stage.
        decode_cpu_us: Processor time inside llama.cpp so far.
    """

    def __init__(
        self, path: Path, options: RuntimeOptions, *, progress: Callable[[float], None] | None = None
    ) -> None:
        self._placing = GpuPlacing.find(options.gpu_layers, exact=options.exact)
        init_backend()
        self._numerics: Numerics = numerics_for(
            exact=options.exact,
            num_threads=options.num_threads,
            has_gpu=self._placing.has_gpu,
            repacks=options.repacks,
            attention_version=attention_version(loaded_kernels()),
        )
        self._options = options
        self.decode_cpu_us = 0
        self._context: Any = None
        self._model: Any = None
        self._readers: list[tuple[Any, Any]] = []
        prepare_process(self._numerics)
        self._model = load_model(
            path,
            self._placing,
            progress,
            use_repacked_weights=self._numerics.use_repacked_weights,
            num_cpu_moe=options.cpu_moe_layers,
        )
        self._boundary = self._read_boundary()
        self.info = StageInfo.of_model(self._model, self._boundary.row_width)
        self._tap = self._make_tap()
        try:
            self._context = self._make_context()
        except BaseException:
            self.close()
            raise
        self.memory = SlotMemory(
            self._context,
            self.info,
            num_slots=options.num_slots,
            ctx_size=options.ctx_size,
            has_shared_cache=self._numerics.has_shared_cache,
            num_checkpoints=options.num_checkpoints,
        )
        self._feature_taps = FeatureTaps(
            self._tap, self._context, self.info.layers, n_layers=self.info.n_layers, n_embd=self.info.n_embd
        )
        self._span_batches = SpanBatches(
            self.memory.lengths,
            most_rows=self._numerics.max_rows,
            # Without trimming, padding could not be dropped again.
            min_rows=self._numerics.min_rows if self.info.can_trim else 1,
            ctx_size=options.ctx_size,
            n_ctx_train=self.info.n_ctx_train,
            has_runs=self.computes_runs,
            pads_for_speed=self._numerics.pads_for_speed and self.info.can_trim,
            make_filler=self._filler,
        )
        self.input_width: int = (
            llama_cpp.llama_model_n_embd_inp(self._model) if self.info.is_first else self.info.n_embd
        )
        self.takes_rows = self.info.is_first or self._boundary.takes_rows
        self.hands_on_rows = self._boundary.hands_on_rows
        self._batch = Batch(
            self._numerics.max_rows,
            self.info.n_embd if self._takes_embeddings else None,
            num_parts=num_position_parts(self._model) if self._takes_embeddings else 1,
        )
        self._incoming = np.zeros(
            (0 if not self._has_inlet else self.most_rows, self.info.n_embd), np.float32
        )

    @property
    def max_rows(self) -> int:
        """Most rows of one batch, but for those that have to be computed at once."""
        return self._numerics.max_rows

    @property
    def most_rows(self) -> int:
        """Most rows of any batch."""
        return max(self._numerics.max_rows, self._options.most_at_once)

    @property
    def num_slots(self) -> int:
        """Number of concurrent sequences."""
        return self._options.num_slots

    @property
    def num_threads(self) -> int:
        """Threads of llama.cpp."""
        return self._options.num_threads

    @property
    def devices(self) -> tuple[str, ...]:
        """Descriptions of the devices with layers, the processor left out."""
        return tuple(device.description for device in self._placing.devices)

    @property
    def ctx_size(self) -> int:
        """Positions of each sequence."""
        return self._options.ctx_size

    def check(self, span: Span) -> None:
        """Check that `decode` accepts the span.

        Raises:
            InvalidWindow: Naming the invalid slot, position, size or token id.
        """
        rows = len(span.tokens)
        self.memory.check_slot(span.slot)
        most = self.most_rows if self._is_whole(span) else self.max_rows
        if not 1 <= rows <= most:
            raise InvalidWindow(f"a window has {rows} rows; this stage takes 1 to {most}")
        self.memory.check(span)
        if not 0 <= span.num_outputs <= rows:
            raise InvalidWindow(f"{span.num_outputs} rows to verify in a window of {rows}")
        # Other stages do not use token ids.
        looks_up = self.info.is_first or self.info.is_tail or self._boundary.takes_tokens
        if self._boundary.takes_tokens and span.is_rows:
            self._check_embedded(span)
        images = self.memory.images(span.slot) if span.is_rows else None
        if images is not None and images.has_parts and num_position_parts(self._model) == 1:
            raise InvalidWindow("an image has columns, but positions of this model have one part")
        may_be_rows = span.hidden is not None
        stray = stray_id(span.tokens, self.info.n_vocab, may_be_rows=may_be_rows) if looks_up else None
        if stray is not None:
            raise InvalidWindow(f"token {stray} is outside the vocabulary of {self.info.n_vocab}")
        if self.info.is_first and span.hidden is None:
            return
        if (self.info.is_first or span.is_rows) and ends_on_rows(self._model):
            raise InvalidWindow(
                "llama.cpp takes token ids only of this model: its file has no parts of positions"
            )
        if span.hidden is None or span.hidden.shape != (rows, self.input_width):
            shape = None if span.hidden is None else span.hidden.shape
            raise InvalidWindow(f"hidden states have shape {shape}; expected {(rows, self.input_width)}")

    def _check_embedded(self, span: Span) -> None:
        if not self._boundary.takes_rows:
            raise InvalidWindow(
                f"layers {self.info.layers} look up token ids again: rows that are no tokens do not pass them"
            )
        shape = None if span.embedded is None else span.embedded.shape
        wanted = (len(span.tokens), self._row_batch.width)
        if shape != wanted:
            raise InvalidWindow(
                f"layers {self.info.layers} use the embedding again: rows that are no tokens came with shape "
                f"{shape}, expected {wanted}"
            )

    def tap_features(self, layers: Collection[int]) -> tuple[int, ...]:
        """Set the layers whose outputs are features; returns those that this stage gives, in order.

        Args:
            layers: See `FeatureTaps.set_layers`.
        """
        self._feature_taps.set_layers(layers)
        return self._feature_taps.layers

    def features(self, slot: int) -> tuple[NDArray[np.float32] | None, ...]:
        """Features of a slot's rows in the last decode, see `FeatureTaps.of`."""
        return self._feature_taps.of(slot)

    def decode(self, spans: Sequence[Span], *, is_tapped: bool = False) -> list[NDArray[np.float32]]:
        """Compute spans of different slots together.

        Args:
            spans: At most one for each slot, `max_rows` rows in all.
            is_tapped: Whether to keep the hidden states that `tap_features` names.

        Returns:
            For each span, float32: at the tail logits of shape (num_outputs, n_vocab), elsewhere hidden
            states of shape (rows, n_embd).

        Raises:
            InvalidWindow: If a span does not fit; nothing is computed.
            StageFailed: If llama.cpp fails.
        """
        for span in spans:
            self.check(span)
        num_rows = sum(len(span.tokens) for span in spans)
        most = num_rows if len(spans) == 1 else self.max_rows
        if num_rows > most or len({span.slot for span in spans}) != len(spans):
            raise InvalidWindow(f"{num_rows} rows of {len(spans)} windows do not fit one batch")
        is_tapped = is_tapped and bool(self._feature_taps.layers)
        self._feature_taps.begin(are_wanted=is_tapped)
        outputs: dict[int, NDArray[np.float32]] = {}
        for batch in itertools.chain.from_iterable(map(self._divide, self._by_input(spans))):
            begun_us = self.decode_cpu_us
            try:
                computed = self._decode_batch(batch, is_tapped=is_tapped)
            finally:
                for filler in batch.fillers:
                    self.memory.computed(filler.slot, filler.start, is_padded=True)
            self._span_batches.learn(batch, self.decode_cpu_us - begun_us)
            outputs.update(zip((span.slot for span in batch.spans), computed, strict=True))
        return [outputs[span.slot] for span in spans]

    def run_around(self, slot: int, rows_of: Mapping[int, int]) -> range:
        """See `SpanBatches.run_around`; if `computes_runs`."""
        return self._span_batches.run_around(slot, rows_of)

    @property
    def computes_runs(self) -> bool:
        """Whether only consecutive slots with equally many rows each are computed together.

        So it is without a shared cache. And recurrent layers take as many rows of each sequence at a time as
        the shortest has: with different lengths, rows would leave in another order than they entered.
        """
        return not (self._numerics.has_shared_cache and self.info.can_trim)

    def observed(self, layer: int) -> NDArray[np.float32]:
        """Output of one of `options.observe_layers` in the last decode, float32 (rows, n_embd)."""
        taken = None if self._tap is None else self._tap.take(layer)
        if taken is None:
            raise UncuttableModel(
                f"layer {layer} has no {self._boundary.outlet} tensor in llama.cpp's graph of this "
                "architecture"
            )
        return taken

    @property
    def may_scale_rotations(self) -> bool:
        """Whether its rotations may depend on the size of the context."""
        return may_scale_rotations(self._model, self._options.ctx_size)

    def add_reader(self, path: Path) -> Any:
        """Load a model that reads this stage's KV cache and writes none (llama.cpp's `ctx_other`).

        Its context has the settings of the stage's: llama.cpp computes wrongly, or ends the process, where
        they differ.

        Args:
            path: Its file.

        Returns:
            Its `llama_context`, which takes a row of each slot at a time and is freed with the stage.

        Raises:
            InvalidModel: If llama.cpp cannot load it.
            ModelDoesNotFit: If there is not enough memory for its buffers.
            StageFailed: If a slot holds rows, which llama.cpp would drop, or if the options have no reader.
        """
        if not self._options.has_reader or any(self.memory.lengths):
            raise StageFailed(
                f"{path.name} cannot read the KV cache of layers {self.info.layers}: this is to be said "
                "before they are loaded, and done before they compute"
            )
        model = load_model(
            path,
            self._placing.behind(),
            None,
            use_repacked_weights=self._numerics.use_repacked_weights,
            has_prediction=True,
        )
        params = self._context_params()
        params.n_batch = params.n_ubatch = min(self._options.num_slots, self.max_rows)
        params.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
        params.ctx_other = self._context
        context = llama_cpp.llama_init_from_model(model, params)
        if context is None:
            llama_cpp.llama_model_free(model)
            raise ModelDoesNotFit(
                f"llama.cpp cannot make a context of {path.name} beside layers {self.info.layers}: "
                f"{last_complaint()}"
            )
        self._readers.append((model, context))
        return context

    def close(self) -> None:
        """Free all memory. The runtime is unusable afterwards."""
        for model, context in self._readers:
            llama_cpp.llama_free(context)
            llama_cpp.llama_model_free(model)
        self._readers.clear()
        if self._context is not None:
            llama_cpp.llama_free(self._context)
            self._context = None
        if self._model is not None:
            llama_cpp.llama_model_free(self._model)
            self._model = None

    def _decode_batch(self, batch: SpanBatch, *, is_tapped: bool) -> list[NDArray[np.float32]]:
        """`decode` of checked spans, in one batch of llama.cpp."""
        spans, paddings = batch.spans, batch.paddings
        for span in spans:
            self.memory.prepare(span)
        filled = self._fill(batch)
        num_rows = int(filled.struct.n_tokens)
        incoming = self._incoming[:num_rows] if self._has_inlet else None
        if self._tap is not None:
            self._tap.begin(incoming, is_tapped=is_tapped)
        if len(spans) == 1 and self._is_whole(spans[0]):
            with self._seeing_all():
                self._run(filled)
        else:
            self._run(filled)
        if incoming is not None and not self._has_entered(spans[0], num_rows):
            raise UncuttableModel(
                f"llama.cpp's graph has no tensor {self._boundary.inlet!r} of {num_rows} rows where hidden "
                "states enter"
            )
        if is_tapped:
            self._feature_taps.keep([span.slot for span in spans], batch.num_rows)
        for span, padding in zip(spans, paddings, strict=True):
            self.memory.computed(span.slot, span.start + len(span.tokens), is_padded=padding > 0)
        return self._logits(batch) if self.info.is_tail else self._hidden_by_span(batch)

    @contextmanager
    def _seeing_all(self) -> Iterator[None]:
        """Let rows of one batch attend to all of them: a switch of the context, for all that it computes."""
        llama_cpp.llama_set_causal_attn(self._context, False)  # noqa: FBT003 - its only argument
        try:
            yield
        finally:
            llama_cpp.llama_set_causal_attn(self._context, True)  # noqa: FBT003 - likewise

    def _has_entered(self, span: Span, num_rows: int) -> bool:
        """Whether all rows have entered at the inlet."""
        num_given = 0 if self._tap is None else self._tap.num_given
        # Where nothing is done with an embedding, rows that go in as such are the tensor itself, and no node.
        is_input = span.is_rows and self._boundary.inlet in _INPUTS and not self._scales_embedding
        return num_given == num_rows or (is_input and num_given == 0)

    @functools.cached_property
    def _scales_embedding(self) -> bool:
        architecture = read_metadata(self._model, "general.architecture")
        return float(read_metadata(self._model, f"{architecture}.embedding_scale") or 0) != 0

    def _read_boundary(self) -> GraphBoundary:
        if self._options.observe_as is not None:
            return self._options.observe_as
        read = functools.partial(read_metadata, self._model)
        return GraphBoundary.from_metadata(read, llama_cpp.llama_model_n_embd(self._model))

    @property
    def _has_inlet(self) -> bool:
        return not self.info.is_first and self._boundary.inlet is not None

    @property
    def _takes_embeddings(self) -> bool:
        return not self.info.is_first and self._boundary.inlet is None

    @property
    def _gathers_outputs(self) -> bool:
        """Whether only the rows that are marked as outputs have logits: at the tail of most families."""
        return self.info.is_tail and not self._boundary.marks_all_rows

    def _make_tap(self) -> StopTap | LayerTap | None:
        if not self.info.is_tail:
            return make_stop_tap(len(self.info.layers) - 1, self._boundary, self.most_rows)
        if self._options.observe_layers:
            return LayerTap(self._options.observe_layers, self._boundary, stop=False)
        if self._has_inlet:
            return make_stop_tap(None, self._boundary, self.most_rows)
        try:
            # For features. The tap in Python would slow every decode.
            return StopTap(None, self._boundary, self.most_rows)
        except (ImportError, OSError, AttributeError):
            return None

    def _make_context(self) -> Any:
        options = self._options
        params = self._context_params()
        if self._tap is not None:
            params.cb_eval = self._tap.callback
            params.cb_eval_user_data = self._tap.user_data
        context = llama_cpp.llama_init_from_model(self._model, params)
        if context is None:
            plain = ", or --kv-type f16" if KV_TYPES[options.kv_type].is_quantised else ""
            raise ModelDoesNotFit(
                f"llama.cpp cannot make a context of {options.num_slots} × {options.ctx_size} positions in "
                f"{options.kv_type} for layers {self.info.layers}: {last_complaint()}; try a smaller "
                f"--ctx-size or --parallel{plain}"
            )
        return context

    def _context_params(self) -> Any:
        options = self._options
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = self._numerics.num_cells(options.ctx_size, options.num_slots)
        params.n_batch = params.n_ubatch = self._most_rows_reserved
        params.n_seq_max = options.num_slots
        # In a unified cache rows leave llama.cpp in the order in which they entered, for any spans.
        params.kv_unified = self._numerics.has_shared_cache
        # A pruned sliding-window cache may lack rows that a trim goes back to.
        params.swa_full = True
        params.type_k = params.type_v = KV_TYPES[options.kv_type].number
        params.n_threads = params.n_threads_batch = options.num_threads
        if options.exact and not self.info.can_trim:
            # A lone row, which cannot be padded, would split its attention by threads.
            params.n_threads = 1
        params.flash_attn_type = self._flash_attention
        params.no_perf = True
        return params

    @property
    def _has_experts(self) -> bool:
        architecture = read_metadata(self._model, "general.architecture")
        return int(read_metadata(self._model, f"{architecture}.expert_count") or 0) > 0

    @property
    def _flash_attention(self) -> int:
        if self._options.exact:
            return int(llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED)
        is_on_software = any(device.is_software for device in self._placing.devices)
        if is_on_software and self._has_experts and not KV_TYPES[self._options.kv_type].is_quantised:
            # There its shader ends the process in models with experts (seen with Mesa 22.3). Quantised values
            # cannot do without it.
            return int(llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED)
        if self._options.has_reader:
            return int(llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED)
        return int(llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO)

    @property
    def _most_rows_reserved(self) -> int:
        """Rows of the batch for which llama.cpp reserves memory: at least those of the largest.

        With caches of their own it takes the same number of each sequence, and graphs of some recurrent
        models (kimi-linear in llama-cpp-python 0.3.36) abort where that leaves a rest.
        """
        most, num_slots = self.most_rows, self._options.num_slots
        if self.info.can_trim or self._numerics.has_shared_cache:
            return most
        return -(-most // num_slots) * num_slots

    def _filler(self, slot: int, num_rows: int) -> Span:
        """Padding rows of a slot, behind what it holds."""
        hidden = None if self.info.is_first else np.zeros((num_rows, self.info.n_embd), np.float32)
        num_outputs = num_rows if self.info.is_tail else 0
        return Span(slot, self.memory.length(slot), [0] * num_rows, hidden, num_outputs)

    def _by_input(self, spans: Sequence[Span]) -> Iterable[Sequence[Span]]:
        """The spans by what llama.cpp takes together: ids, or rows; and alone what is computed at once."""
        if not self._any_rows(spans):
            return (spans,)
        whole = [[span] for span in spans if self._is_whole(span)]
        divided = [span for span in spans if not self._is_whole(span)]
        if self._takes_embeddings:
            return filter(None, (divided, *whole))
        with_ids = [span for span in divided if not self._brings_rows(span)]
        with_rows = [span for span in divided if self._brings_rows(span)]
        return filter(None, (with_ids, with_rows, *whole))

    def _divide(self, spans: Sequence[Span]) -> Iterable[SpanBatch]:
        """Spans of one kind of input, in batches."""
        return (SpanBatch(spans, [0]),) if self._is_whole(spans[0]) else self._span_batches.divide(spans)

    def _any_rows(self, spans: Sequence[Span]) -> bool:
        """Whether rows of any go in as rows."""
        return any(map(self._brings_rows, spans))

    def _brings_rows(self, span: Span) -> bool:
        """Whether its rows go in as rows: at the first stage in place of ids, at others as an embedding."""
        return span.is_rows or (self.info.is_first and span.hidden is not None)

    def _is_whole(self, span: Span) -> bool:
        """Whether its rows are computed at once, each of which sees all."""
        images = self.memory.images(span.slot)
        return images is not None and images.is_whole(span.start)

    @functools.cached_property
    def _row_batch(self) -> Batch:
        """Batch of rows that go in as an embedding."""
        width = llama_cpp.llama_model_n_embd_inp(self._model)
        return Batch(self.most_rows, width, num_parts=num_position_parts(self._model))

    def _fill(self, batch: SpanBatch) -> Batch:
        """The rows of a batch for llama.cpp."""
        filled = self._row_batch if self._any_rows(batch.spans) else self._batch
        filled.clear()
        looks_up = self.info.is_first or self._boundary.takes_tokens
        for span, padding in zip(batch.spans, batch.paddings, strict=True):
            rows = len(span.tokens)
            first_output = rows - span.num_outputs if self._gathers_outputs else 0
            if self._has_inlet:
                first = filled.struct.n_tokens
                self._incoming[first : first + rows] = span.hidden
                self._incoming[first + rows : first + rows + padding] = 0
            # Unused token ids may be beyond the file's placeholder vocabulary.
            tokens = span.tokens if looks_up else [0] * rows
            images = self.memory.images(span.slot)
            parts = images.parts(span.start, rows) if images is not None and self._brings_rows(span) else None
            hidden = span.hidden if span.embedded is None else span.embedded
            if self._has_inlet and hidden is not None and hidden.shape[1] != filled.width:
                # Several streams: what goes in at the inlet is no embedding.
                hidden = None
            start = self.memory.first_position(span.slot, span.start)
            filled.add(span.slot, start, tokens, hidden, first_output, parts=parts)
            if padding:
                no_output = padding if self._gathers_outputs and not batch.pads_logits(span) else 0
                # Behind all rows, from where it is dropped.
                start = self.memory.first_position(span.slot, span.start + rows)
                filled.add(span.slot, start, [0] * padding, None, no_output)
        return filled

    def _run(self, filled: Batch) -> None:
        started_ns = time.thread_time_ns()
        status = llama_cpp.llama_decode(self._context, filled.lay_out())
        self.decode_cpu_us += (time.thread_time_ns() - started_ns) // 1000
        if status != 0:
            # llama.cpp's state of the batch is unknown: these slots are emptied.
            raise StageFailed(f"llama_decode failed with status {status}: {last_complaint()}")
        self.memory.decoded()

    def _hidden(self) -> NDArray[np.float32] | None:
        return None if self._tap is None else self._tap.take(len(self.info.layers) - 1)

    def _hidden_by_span(self, batch: SpanBatch) -> list[NDArray[np.float32]]:
        hidden, counts = self._hidden(), batch.num_rows
        num_rows = sum(counts)
        if hidden is None or len(hidden) < num_rows:
            raise UncuttableModel(
                f"llama.cpp's graph has no {self._boundary.outlet} tensor of {num_rows} rows at layer "
                f"{self.info.layers.stop - 1}"
            )
        parts = _split(hidden, counts)
        return [part[: len(span.tokens)] for part, span in zip(parts, batch.spans, strict=True)]

    def _logits(self, batch: SpanBatch) -> list[NDArray[np.float32]]:
        spans = batch.spans
        counts = batch.num_logits if self._gathers_outputs else batch.num_rows
        if not any(span.num_outputs for span in spans):
            return [np.empty((0, self.info.n_vocab), np.float32) for _ in spans]
        pointer = llama_cpp.llama_get_logits(self._context)
        logits = np.ctypeslib.as_array(pointer, shape=(sum(counts), self.info.n_vocab))
        # llama.cpp writes the next decode's logits to the same memory.
        logits = logits.copy()
        logits[:, self._boundary.barred_from : self._boundary.barred_to] = np.finfo(np.float32).min
        parts = _split(logits, counts)
        firsts = [0 if self._gathers_outputs else len(span.tokens) - span.num_outputs for span in spans]
        return [
            part[first : first + span.num_outputs]
            for part, first, span in zip(parts, firsts, spans, strict=True)
        ]


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))


def _split(rows: NDArray[np.float32], counts: Sequence[int]) -> list[NDArray[np.float32]]:
    """Views of consecutive rows; what `np.split` does, at a tenth of its time."""
    stops = itertools.accumulate(counts)
    return [rows[stop - count : stop] for count, stop in zip(counts, stops, strict=True)]
