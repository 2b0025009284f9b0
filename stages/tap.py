"""Reading hidden states out of llama.cpp while it computes, and stopping it there.

llama.cpp asks `cb_eval` about each node of its graph: first "do you want this one?" and, after computing it,
"here it is, go on?". Wanting `l_out-<last>` and then answering "no" gives the residual after the stage's last
layer and skips norm and head.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import llama_cpp
import numpy as np

from stages.llama import ggml_base

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray


class LayerTap:
    """Copies the outputs of some layers, float32 of shape (rows, n_embd), during one decode.

    Args:
        layers: Layers whose output is wanted, counted from 0 within the loaded file.
        n_embd: Width of the hidden state.
        stop: Whether the graph ends after the last of them.
    """

    def __init__(self, layers: Iterable[int], n_embd: int, *, stop: bool) -> None:
        self._names = {f"l_out-{layer}".encode(): layer for layer in layers}
        self._last = f"l_out-{max(self._names.values())}".encode()
        self._n_embd = n_embd
        self._stop = stop
        self._get_name = ggml_base().ggml_get_name
        self._taken: dict[int, NDArray[np.float32]] = {}
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._on_node)
        self.user_data: int | None = None

    def begin(self) -> None:
        """Forget the last decode."""
        self._taken.clear()

    def take(self, layer: int) -> NDArray[np.float32] | None:
        """The layer's output in the decode since `begin`, or None if it did not come by."""
        return self._taken.get(layer)

    def _on_node(self, tensor: int, ask: bool, _user_data: int | None) -> bool:  # noqa: FBT001 - C calls it
        name = self._get_name(tensor)
        if ask:
            return name in self._names
        num_bytes = ggml_base().ggml_nbytes(tensor)
        rows = np.empty((num_bytes // (4 * self._n_embd), self._n_embd), dtype=np.float32)
        ggml_base().ggml_backend_tensor_get(tensor, rows.ctypes.data_as(ctypes.c_void_p), 0, rows.nbytes)
        layer = self._names[name]
        # A micro-batch follows another when a batch is larger than n_ubatch: rows keep their order.
        if layer in self._taken:
            self._taken[layer] = np.concatenate((self._taken[layer], rows))
        else:
            self._taken[layer] = rows
        return not (self._stop and name == self._last)
