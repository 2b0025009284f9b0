"""Hidden-state taps: hidden states read and injected in llama.cpp's graph, also for drafters.

llama.cpp calls `cb_eval` for each node of its graph: first whether the node's data is wanted and, after
computing it, whether to continue. Asking for the last layer's output and then stopping yields the residual
after the stage's last layer and skips norm and head. Asking for the inlet and writing to it replaces the
layers' input by another stage's output.

EAGLE-3 (Li et al. 2025) reads the outputs of a few layers. Heads for multi-token prediction (Gloeckle et al.
2024, DeepSeek-V3 2024) read the head state: what the head of the model itself reads.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import structlog

from stages.compiled_extension import REMEDY, load_extension
from stages.runtime.bindings import llama_cpp
from stages.runtime.llama import ggml_base

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from numpy.typing import NDArray

    from stages.graph_boundary import GraphBoundary
    from stages.layers import LayerRange

_EXTENSION: Final = "stages._stop_tap"
log = structlog.get_logger()


class LayerTap:
    """Copies the outputs of some layers, float32 of shape (rows, row_width), during one decode.

    Args:
        layers: Layers whose output is copied, counted from 0 within the loaded file.
        boundary: Names and widths.
        stop: Whether the graph ends after the last of them.
    """

    def __init__(self, layers: Iterable[int], boundary: GraphBoundary, *, stop: bool) -> None:
        self._boundary = boundary
        self._wanted = {boundary.outlet_of(layer).encode(): layer for layer in layers}
        self._names = self._wanted
        self._features: dict[bytes, int] = {}
        self._last = boundary.outlet_of(max(self._names.values())).encode() if self._names else None
        self._row_bytes = 4 * boundary.row_width
        self._inlet = None if boundary.inlet is None else boundary.inlet.encode()
        self._stop = stop
        self._get_name = ggml_base().ggml_get_name
        self._taken: dict[int, NDArray[np.float32]] = {}
        self._given: NDArray[np.float32] | None = None
        self._given_rows = 0
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._on_node)
        self.user_data: int | None = None

    def set_features(self, layers: Sequence[int]) -> None:
        """Set the layers whose outputs are copied as well in decodes that have features."""
        self._features = {self._boundary.outlet_of(layer).encode(): layer for layer in layers}

    def begin(self, hidden: NDArray[np.float32] | None = None, *, is_tapped: bool = False) -> None:
        """Reset before a decode.

        Args:
            hidden: Rows for the inlet, float32 (rows, row_width); must exist until the decode has ended.
            is_tapped: Whether to copy the outputs of the layers of `set_features`.
        """
        self._taken.clear()
        self._names = self._wanted | self._features if is_tapped else self._wanted
        self._given = hidden
        self._given_rows = 0

    @property
    def num_given(self) -> int:
        """Rows written to the inlet in the decode since `begin`."""
        return self._given_rows

    def take(self, layer: int) -> NDArray[np.float32] | None:
        """Output of the layer in the decode since `begin`, or None if it was not computed."""
        return self._taken.get(layer)

    def feature(self, layer: int) -> NDArray[np.float32] | None:
        """As `take`, for a layer of `set_features`."""
        return self.take(layer)

    def _on_node(self, tensor: int, ask: bool, _user_data: int | None) -> bool:  # noqa: FBT001 - C calls it
        name = self._get_name(tensor)
        is_inlet = self._given is not None and name == self._inlet
        if ask:
            return is_inlet or name in self._names
        if is_inlet and self._given is not None:
            self._give(tensor, self._given)
        if name not in self._names:
            return True
        num_bytes = ggml_base().ggml_nbytes(tensor)
        rows = np.empty((num_bytes // self._row_bytes, self._row_bytes // 4), dtype=np.float32)
        ggml_base().ggml_backend_tensor_get(tensor, rows.ctypes.data_as(ctypes.c_void_p), 0, rows.nbytes)
        layer = self._names[name]
        # A batch above n_ubatch has several micro-batches: rows keep their order.
        if layer in self._taken:
            self._taken[layer] = np.concatenate((self._taken[layer], rows))
        else:
            self._taken[layer] = rows
        return not (self._stop and name == self._last)

    def _give(self, tensor: int, hidden: NDArray[np.float32]) -> None:
        num_bytes = ggml_base().ggml_nbytes(tensor)
        stop = self._given_rows + num_bytes // self._row_bytes
        if stop <= len(hidden) and num_bytes % self._row_bytes == 0:
            rows = np.ascontiguousarray(hidden[self._given_rows : stop])
            pointer = rows.ctypes.data_as(ctypes.c_void_p)
            ggml_base().ggml_backend_tensor_set(tensor, pointer, 0, rows.nbytes)
            self._given_rows = stop


class _FeatureStruct(ctypes.Structure):
    """`struct feature` of stop_tap.c."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("rows", ctypes.c_void_p),
        ("capacity_bytes", ctypes.c_size_t),
        ("filled_bytes", ctypes.c_size_t),
    )


class _StopTapStruct(ctypes.Structure):
    """`struct stop_tap` of stop_tap.c."""

    _fields_ = (
        ("name_of", ctypes.c_void_p),
        ("num_bytes_of", ctypes.c_void_p),
        ("copy", ctypes.c_void_p),
        ("put", ctypes.c_void_p),
        ("wanted", ctypes.c_char_p),
        ("rows", ctypes.c_void_p),
        ("capacity_bytes", ctypes.c_size_t),
        ("filled_bytes", ctypes.c_size_t),
        ("inlet", ctypes.c_char_p),
        ("given", ctypes.c_void_p),
        ("given_bytes", ctypes.c_size_t),
        ("entered_bytes", ctypes.c_size_t),
        ("features", ctypes.POINTER(_FeatureStruct)),
        ("num_features", ctypes.c_size_t),
    )


# For some families it also writes hidden states of the stage before to the inlet.
#
# The callback is `stop_tap.c`, compiled at installation. Where it is missing, as in a plain copy of the
# sources, `LayerTap` does the same, more slowly.
class StopTap:
    """Copies one layer's output, float32 of shape (rows, row_width), and ends the graph after it.

    Args:
        layer: Layer counted from 0 within the loaded file; None at the tail.
        boundary: Names and widths.
        max_rows: Most rows of one batch.

    Raises:
        ImportError: If the compiled callback is missing.
    """

    def __init__(self, layer: int | None, boundary: GraphBoundary, max_rows: int) -> None:
        self._layer = layer
        self._boundary = boundary
        self._max_rows = max_rows
        self._row_bytes = 4 * boundary.row_width
        self._rows = np.empty((0 if layer is None else max_rows, boundary.row_width), dtype=np.float32)
        ggml = ggml_base()
        self._struct = _StopTapStruct(
            name_of=_address(ggml.ggml_get_name),
            num_bytes_of=_address(ggml.ggml_nbytes),
            copy=_address(ggml.ggml_backend_tensor_get),
            put=_address(ggml.ggml_backend_tensor_set),
            wanted=None if layer is None else boundary.outlet_of(layer).encode(),
            rows=self._rows.ctypes.data,
            capacity_bytes=self._rows.nbytes,
            filled_bytes=0,
            inlet=None if boundary.inlet is None else boundary.inlet.encode(),
        )
        self._given: NDArray[np.float32] | None = None
        self._features: dict[int, tuple[_FeatureStruct, NDArray[np.float32]]] = {}
        self._feature_structs: Any = None
        self.callback = ctypes.cast(
            load_extension(_EXTENSION).stop_tap_on_graph_node, llama_cpp.ggml_backend_sched_eval_callback
        )
        self.user_data = ctypes.addressof(self._struct)

    def set_features(self, layers: Sequence[int]) -> None:
        """Set the layers whose outputs are copied as well in decodes that have features.

        Args:
            layers: Layers counted from 0 within the loaded file.
        """
        structs = (_FeatureStruct * len(layers))()
        self._features = {}
        for layer, struct in zip(layers, structs, strict=True):
            rows = np.empty((self._max_rows, self._boundary.row_width), dtype=np.float32)
            struct.name = self._boundary.outlet_of(layer).encode()
            struct.rows = rows.ctypes.data
            struct.capacity_bytes = rows.nbytes
            self._features[layer] = (struct, rows)
        self._feature_structs = structs  # keeps its memory alive
        self._struct.features = structs
        self._struct.num_features = 0

    def begin(self, hidden: NDArray[np.float32] | None = None, *, is_tapped: bool = False) -> None:
        """Reset before a decode.

        Args:
            hidden: Rows for the inlet, float32 (rows, row_width), contiguous.
            is_tapped: Whether to copy the outputs of the layers of `set_features`.
        """
        self._struct.filled_bytes = 0
        self._struct.entered_bytes = 0
        self._struct.num_features = len(self._features) if is_tapped else 0
        for struct, _rows in self._features.values():
            struct.filled_bytes = 0
        self._given = hidden  # keeps its memory alive
        self._struct.given = None if hidden is None else hidden.ctypes.data
        self._struct.given_bytes = 0 if hidden is None else hidden.nbytes

    @property
    def num_given(self) -> int:
        """Rows written to the inlet in the decode since `begin`."""
        return int(self._struct.entered_bytes) // self._row_bytes

    def take(self, layer: int) -> NDArray[np.float32] | None:
        """Output of the layer in the decode since `begin`, or None if it was not computed."""
        num_rows = self._struct.filled_bytes // self._row_bytes
        return self._rows[:num_rows].copy() if num_rows and layer == self._layer else None

    def feature(self, layer: int) -> NDArray[np.float32] | None:
        """As `take`, for a layer of `set_features`."""
        struct, rows = self._features[layer]
        num_rows = struct.filled_bytes // self._row_bytes
        return rows[:num_rows].copy() if num_rows else None


class TensorTap:
    """Copies one tensor of a graph, float32 of shape (rows, width), or ends the graph behind one.

    For graphs that are no stages. See `speculative.draft.context.GraphTap`.

    Args:
        width: Values of a row.
        max_rows: Most rows of one computation.

    Raises:
        ImportError: If the compiled callback is missing.
    """

    def __init__(self, width: int, max_rows: int) -> None:
        self._width = width
        self._rows = np.empty((max_rows, width), dtype=np.float32)
        ggml = ggml_base()
        self._feature = (_FeatureStruct * 1)()
        self._struct = _StopTapStruct(
            name_of=_address(ggml.ggml_get_name),
            num_bytes_of=_address(ggml.ggml_nbytes),
            copy=_address(ggml.ggml_backend_tensor_get),
            put=_address(ggml.ggml_backend_tensor_set),
            features=self._feature,
        )
        self._feature[0].rows = self._rows.ctypes.data
        self._feature[0].capacity_bytes = self._rows.nbytes
        self.callback = ctypes.cast(
            load_extension(_EXTENSION).stop_tap_on_graph_node, llama_cpp.ggml_backend_sched_eval_callback
        )
        self.user_data: int | None = ctypes.addressof(self._struct)

    def copy(self, name: str) -> None:
        """Set the tensor to copy."""
        self._feature[0].name = name.encode()
        self._feature[0].filled_bytes = 0
        self._struct.num_features = 1
        self._struct.wanted = None

    def end_behind(self, name: str) -> None:
        """Set the tensor behind which a graph ends; one without it runs to its end. Nothing is copied."""
        self._struct.num_features = 0
        self._struct.wanted = name.encode()

    def rows(self) -> NDArray[np.float32] | None:
        """Rows copied since `copy`, float32 (rows, width); None if the graph had no such tensor."""
        num_rows = self._feature[0].filled_bytes // (4 * self._width)
        return self._rows[:num_rows].copy() if num_rows else None


class HeadState:
    """Head state of a context's decodes, for every row.

    llama.cpp drops the rows without logits before it, unless `llama_set_embeddings_nextn` says otherwise.
    llama-cpp-python does not declare that function: it is found by its C++ name. Logits stay bit-equal.

    Args:
        context: The llama.cpp context.
        n_embd: Values of a row.

    Raises:
        ImportError: If this llama.cpp has no such functions.
    """

    def __init__(self, context: Any, n_embd: int) -> None:
        self._context = context
        self._n_embd = n_embd
        self._functions = _head_state_functions()

    def keep(self, *, is_kept: bool) -> None:
        """Set whether the next decodes keep it."""
        is_masked = False  # rows without logits as well
        self._functions.set_embeddings(self._context, is_kept, is_masked)

    def rows(self, num_rows: int) -> NDArray[np.float32] | None:
        """Head state of the last decode, float32 (num_rows, n_embd); None if the model's graph has none."""
        pointer = self._functions.get_embeddings(self._context)
        if not pointer:
            return None
        rows = np.ctypeslib.as_array(pointer, (num_rows, self._n_embd)).copy()
        # Graphs without it leave the memory as it was: zeros.
        return rows if rows.any() else None


@dataclass(frozen=True)
class _HeadStateFunctions:
    set_embeddings: Any
    get_embeddings: Any


class FeatureTaps:
    """Features of one stage.

    Args:
        tap: Tap of the stage's context; None if it has none.
        context: The context.
        layers: Layers of the stage.
        n_layers: Layers of the whole model.
        n_embd: Values of a row.

    Attributes:
        layers: Layers that `set_layers` has set and this stage gives.
    """

    def __init__(
        self, tap: StopTap | LayerTap | None, context: Any, layers: LayerRange, *, n_layers: int, n_embd: int
    ) -> None:
        self.layers: tuple[int, ...] = ()
        self._tap = tap
        self._context = context
        self._own = layers
        self._n_layers = n_layers
        self._n_embd = n_embd
        self._head_state: HeadState | None = None
        self._kept: dict[int, tuple[NDArray[np.float32] | None, ...]] = {}

    def set_layers(self, layers: Collection[int]) -> None:
        """Set the layers whose outputs are features.

        The output of the model's last layer cannot be one: llama.cpp computes it for few rows.

        Args:
            layers: Of the whole model, from 0; the number of its layers stands for the head state.
        """
        start, stop = self._own.start, min(self._own.stop, self._n_layers - 1)
        held = [layer for layer in sorted(set(layers)) if start <= layer < stop and self._tap is not None]
        if self._tap is not None:
            self._tap.set_features([layer - start for layer in held])
        self._head_state = None
        if self._own.stop == self._n_layers and self._n_layers in layers:
            try:
                self._head_state = HeadState(self._context, self._n_embd)
                held.append(self._n_layers)
            except ImportError:
                pass
        self.layers = tuple(held)

    def begin(self, *, are_wanted: bool) -> None:
        """Drop what is kept, and say whether the next decode has features; before the tap begins."""
        self._kept.clear()
        if self._head_state is not None:
            self._head_state.keep(is_kept=are_wanted)

    def keep(self, slots: Sequence[int], num_rows: Sequence[int]) -> None:
        """Keep the features of the batch that was decoded.

        Args:
            slots: Slots of its spans.
            num_rows: Rows of each in the batch, padding included.
        """
        if len(slots) == 1:  # most often, and no window waits for less
            self._kept[slots[0]] = tuple(self._rows(layer, num_rows[0]) for layer in self.layers)
            return
        stops = list(itertools.accumulate(num_rows))
        kept: list[list[NDArray[np.float32] | None]] = [[] for _ in slots]
        for layer in self.layers:
            rows = self._rows(layer, stops[-1])
            for own, stop, count in zip(kept, stops, num_rows, strict=True):
                own.append(None if rows is None else rows[stop - count : stop])
        self._kept.update((slot, tuple(own)) for slot, own in zip(slots, kept, strict=True))

    def of(self, slot: int) -> tuple[NDArray[np.float32] | None, ...]:
        """Features of a slot's rows in the last decode, padding included, one entry for each of `layers`.

        Returns:
            float32 (rows, n_embd); None for a layer without a tensor in llama.cpp's graph. Empty if the
            decode had none.
        """
        return self._kept.get(slot, ())

    def _rows(self, layer: int, num_rows: int) -> NDArray[np.float32] | None:
        if layer == self._n_layers:
            return None if self._head_state is None else self._head_state.rows(num_rows)
        rows = None if self._tap is None else self._tap.feature(layer - self._own.start)
        return rows if rows is not None and len(rows) == num_rows else None


def make_stop_tap(layer: int | None, boundary: GraphBoundary, max_rows: int) -> StopTap | LayerTap:
    """The compiled tap, or the Python one where that is missing."""
    try:
        return StopTap(layer, boundary, max_rows)
    except (ImportError, AttributeError) as error:
        log.warning("slow_tap", reason=str(error), remedy=REMEDY)
        return LayerTap([] if layer is None else [layer], boundary, stop=True)


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


@functools.cache
def _head_state_functions() -> _HeadStateFunctions:
    library = llama_cpp.llama_cpp._lib  # noqa: SLF001 - it has no other name
    try:
        set_embeddings = library["_Z26llama_set_embeddings_nextnP13llama_contextbb"]
        get_embeddings = library["_Z26llama_get_embeddings_nextnP13llama_context"]
    except AttributeError as error:
        raise ImportError(f"this llama.cpp keeps no head state: {error}") from None
    set_embeddings.argtypes = (ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool)
    set_embeddings.restype = None
    get_embeddings.argtypes = (ctypes.c_void_p,)
    get_embeddings.restype = ctypes.POINTER(ctypes.c_float)
    return _HeadStateFunctions(set_embeddings, get_embeddings)
