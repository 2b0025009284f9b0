"""Checkpoints of recurrent state, copies to which a slot can go back; and what llama.cpp saves of a sequence.

An attention cache keeps a row for each position, and rejected rows are dropped. A recurrent state has no
positions: it is the sum of all that was read. To go back to before a rejected token it has to be copied
earlier, and the tokens since then have to be computed again. llama.cpp copies the recurrent part of a
sequence alone (`LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY`), to the bit; its server has used such checkpoints for
prefix reuse.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final

import llama_cpp
import numpy as np

from spanmesh_proto.errors import StageFailed, UncuttableModel
from stages.runtime.kv_state import without_head
from stages.runtime.llama import last_complaint

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

_RECURRENT_PART: Final = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
_COUNT_BYTES: Final = 4


class StateCheckpoints:
    """Copies of the recurrent state of each slot, by position.

    The copy at position `p` is the state after the rows before `p`. Position 0, the empty state, needs none.

    Args:
        context: The `llama_context`.
        num_slots: Number of slots.
    """

    def __init__(self, context: Any, num_slots: int) -> None:
        self._context = context
        self._copies: list[dict[int, NDArray[np.uint8]]] = [{} for _ in range(num_slots)]
        # Freed copies, of which later ones are made: new memory costs as much time as the copy itself. There
        # are never more than were in use at once.
        self._spare: list[NDArray[np.uint8]] = []

    @property
    def num_bytes(self) -> int:
        """Size of all copies."""
        return sum(copy.nbytes for copies in self._copies for copy in copies.values())

    def positions(self, slot: int) -> tuple[int, ...]:
        """Positions of a slot's copies, ascending."""
        return tuple(sorted(self._copies[slot]))

    def hold_rows(self, empty_slot: int) -> bool:
        """Whether copies hold attention rows, those in sliding windows, beside recurrent cells.

        Where they do not, as in `llama_memory_recurrent` and `llama_memory_hybrid`, a copy begins with the
        number of recurrent cells, and that of an empty slot with 0. Other copies begin with a number of
        caches (`llama_memory_hybrid_iswa`) or a magic number (`llama_kv_cache_dsv4`), neither of which is 0.

        Args:
            empty_slot: Slot without positions.

        Raises:
            StageFailed: If llama.cpp does not return its state.
        """
        count = without_head(self.read(empty_slot))[:_COUNT_BYTES]
        return count.size < _COUNT_BYTES or bool(count.any())

    def save(self, slot: int, position: int) -> None:
        """Copy the slot's state, which is the one at `position`.

        Raises:
            StageFailed: If llama.cpp does not return it.
        """
        if position not in self._copies[slot]:
            self._copies[slot][position] = self.read(slot)

    def read(self, slot: int) -> NDArray[np.uint8]:
        """The slot's state as it is now, uint8 (bytes), in llama.cpp's format.

        Raises:
            StageFailed: If llama.cpp does not return it.
        """
        num_bytes = llama_cpp.llama_state_seq_get_size_ext(self._context, slot, _RECURRENT_PART)
        copy = self._room(num_bytes)
        written = llama_cpp.llama_state_seq_get_data_ext(
            self._context, _bytes_of(copy), copy.size, slot, _RECURRENT_PART
        )
        if written != copy.size:
            raise StageFailed(f"llama.cpp copies {written} of {copy.size} bytes of a state")
        return copy

    def restore(self, slot: int, position: int) -> bool:
        """Make the slot's state the one at `position`; False if there is no copy of it.

        Raises:
            StageFailed: If llama.cpp rejects the copy.
        """
        copy = self._copies[slot].get(position)
        if copy is None:
            return False
        read = llama_cpp.llama_state_seq_set_data_ext(
            self._context, _bytes_of(copy), copy.size, slot, _RECURRENT_PART
        )
        if read != copy.size:
            raise StageFailed(f"llama.cpp rejects a copy of its own state: {last_complaint()}")
        return True

    def retain(self, slot: int, positions: Collection[int]) -> None:
        """Drop the slot's copies at other positions than these."""
        copies = self._copies[slot]
        for position in [each for each in copies if each not in positions]:
            self._free(copies.pop(position))

    def trim(self, slot: int, num_positions: int) -> None:
        """Drop the slot's copies beyond a position."""
        self.retain(slot, [each for each in self._copies[slot] if each <= num_positions])

    def copy(self, source: int, slot: int) -> None:
        """Replace the slot's copies by those of another slot; both share the memory."""
        self.trim(slot, -1)
        self._copies[slot] = dict(self._copies[source])

    def put(self, slot: int, position: int, copy: NDArray[np.uint8]) -> None:
        """Add a copy that another stage with the same layers made."""
        self._copies[slot][position] = copy

    def at(self, slot: int, position: int) -> NDArray[np.uint8] | None:
        """The slot's copy at a position, uint8 (bytes); None if there is none."""
        return self._copies[slot].get(position)

    def _room(self, num_bytes: int) -> NDArray[np.uint8]:
        for index, spare in enumerate(self._spare):
            if spare.size == num_bytes:
                return self._spare.pop(index)
        self._spare.clear()
        return np.empty(num_bytes, np.uint8)

    def _free(self, copy: NDArray[np.uint8]) -> None:
        is_shared = any(copy is other for copies in self._copies for other in copies.values())
        if not is_shared and copy.flags.writeable:
            self._spare.append(copy)


def read_sequence(context: Any, slot: int) -> NDArray[np.uint8]:
    """All that llama.cpp saves of a sequence, uint8 (bytes).

    Args:
        context: The `llama_context`.
        slot: Its slot.
    """
    saved = np.empty(int(llama_cpp.llama_state_seq_get_size(context, slot)), np.uint8)
    num_bytes = llama_cpp.llama_state_seq_get_data(context, _bytes_of(saved), saved.size, slot)
    return saved[:num_bytes]


def write_sequence(context: Any, slot: int, saved: NDArray[np.uint8]) -> bool:
    """Replace a sequence by a saved one; False if llama.cpp rejects it."""
    return bool(llama_cpp.llama_state_seq_set_data(context, _bytes_of(saved), saved.size, slot))


def without_part(saved: NDArray[np.uint8], part: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Saved state of a sequence, without the part that `StateCheckpoints.read` returns.

    Raises:
        UncuttableModel: If that is not at its end.
    """
    state = without_head(part)
    num_bytes = saved.size - state.size
    if num_bytes < 0 or not np.array_equal(saved[num_bytes:], state):
        raise UncuttableModel("llama.cpp saves recurrent state elsewhere than at the end")
    return saved[:num_bytes]


def _bytes_of(copy: NDArray[np.uint8]) -> Any:
    return copy.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
