"""Reading hidden states out of llama.cpp while it computes, putting others in, and stopping it.

llama.cpp asks `cb_eval` about each node of its graph: first "do you want this one?" and, after computing it,
"here it is, go on?". Wanting the last layer's output and then answering "no" gives the residual after the
stage's last layer and skips norm and head. Wanting the inlet and writing to it gives the layers what another
stage computed.
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

    from stages.graph_boundary import Handover


class LayerTap:
    """Copies the outputs of some layers, float32 of shape (rows, row_width), during one decode.

    Args:
        layers: Layers whose output is wanted, counted from 0 within the loaded file.
        handover: Names and widths.
        stop: Whether the graph ends after the last of them.
    """

    def __init__(self, layers: Iterable[int], handover: Handover, *, stop: bool) -> None:
        self._names = {handover.outlet_of(layer).encode(): layer for layer in layers}
        self._last = handover.outlet_of(max(self._names.values())).encode() if self._names else None
        self._row_bytes = 4 * handover.row_width
        self._inlet = None if handover.inlet is None else handover.inlet.encode()
        self._stop = stop
        self._get_name = ggml_base().ggml_get_name
        self._taken: dict[int, NDArray[np.float32]] = {}
        self._given: NDArray[np.float32] | None = None
        self._given_rows = 0
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._on_node)
        self.user_data: int | None = None

    def begin(self, hidden: NDArray[np.float32] | None = None) -> None:
        """Forget the last decode.

        Args:
            hidden: What enters at the inlet, float32 (rows, row_width); it must stay until the decode is
                over.
        """
        self._taken.clear()
        self._given = hidden
        self._given_rows = 0

    @property
    def num_given(self) -> int:
        """Rows that have entered at the inlet in the decode since `begin`."""
        return self._given_rows

    def take(self, layer: int) -> NDArray[np.float32] | None:
        """The layer's output in the decode since `begin`, or None if it did not come by."""
        return self._taken.get(layer)

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
        # A micro-batch follows another when a batch is larger than n_ubatch: rows keep their order.
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
