"""Batch of rows for llama.cpp over numpy memory."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class Batch:
    """A reusable `llama_batch` over numpy memory.

    Args:
        max_rows: Capacity.
        n_embd: Width of hidden states in, or None if token ids go in.
    """

    def __init__(self, max_rows: int, n_embd: int | None) -> None:
        self._tokens = np.zeros(max_rows, np.int32)
        self._hidden = None if n_embd is None else np.zeros((max_rows, n_embd), np.float32)
        self._positions = np.zeros(max_rows, np.int32)
        self._num_slots_of_row = np.ones(max_rows, np.int32)
        self._slots = np.zeros(max_rows, np.int32)
        self._outputs = np.zeros(max_rows, np.int8)
        slot_pointer = ctypes.POINTER(ctypes.c_int32)
        self._slot_pointers = (slot_pointer * max_rows)(
            *(ctypes.cast(self._slots.ctypes.data + 4 * row, slot_pointer) for row in range(max_rows))
        )
        self.struct = llama_cpp.llama_batch(
            n_tokens=0,
            token=None if n_embd is not None else _pointer(self._tokens, ctypes.c_int32),
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
    ) -> None:
        """Append rows of one slot; those from `first_output` on return an output.

        Where hidden states go in, None stands for zeros.
        """
        first = self.struct.n_tokens
        stop = first + len(tokens)
        if self._hidden is None:
            self._tokens[first:stop] = tokens
        else:
            self._hidden[first:stop] = 0 if hidden is None else hidden
        self._positions[first:stop] = np.arange(start, start + len(tokens))
        self._slots[first:stop] = slot
        self._outputs[first : first + first_output] = 0
        self._outputs[first + first_output : stop] = 1
        self.struct.n_tokens = stop


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))
