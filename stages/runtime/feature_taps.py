"""Features: hidden states of some layers that drafters of the EAGLE-3 and MTP kinds read.

EAGLE-3 (Li et al. 2025) reads the outputs of a few layers. Heads for multi-token prediction (Gloeckle et al.
2024, DeepSeek-V3 2024) read the head state: what the head of the model itself reads.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import llama_cpp.llama_cpp
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from stages.layers import LayerRange
    from stages.runtime.hidden_tap import LayerTap, StopTap


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
