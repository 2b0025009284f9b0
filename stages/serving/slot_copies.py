"""Copies of slots for the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.runtime.kv_state import no_state
from stages.serving.prefix_blocks import SlotCopy

if TYPE_CHECKING:
    from collections.abc import Collection

    from stages.serving.slots import KvSlots


def copy_of(
    slots: KvSlots,
    slot: int,
    num_positions: int,
    *,
    tokens_sha256: bytes,
    state_positions: Collection[int],
    most_bytes: int,
) -> SlotCopy | None:
    """Copy of a slot's first positions, for the disk.

    Of a model with sliding windows llama.cpp saves the rows in the windows at the slot's end only. If a
    state is wanted, the slot drops all positions beyond, which were rejected.

    Args:
        slots: Slots of the stage, whose computing thread calls.
        slot: The slot.
        num_positions: Number of the positions.
        tokens_sha256: SHA-256 of their token ids.
        state_positions: Numbers of positions behind which states are wanted: recurrent states, or rows in
            sliding windows.
        most_bytes: Most bytes of the slot's rows.

    Returns:
        The copy, without states that are not kept; None if the slot holds other tokens, or too many rows.

    Raises:
        MeshError: If llama.cpp does not return the rows.
    """
    is_same = 0 < num_positions <= slots.tokens.length(slot)
    if not is_same or slots.tokens.digest(slot, num_positions) != tokens_sha256:
        return None
    info, memory = slots.runtime.info, slots.memory
    if memory.num_kv_bytes(slot) > most_bytes:
        return None
    tokens = slots.tokens.tokens(slot)[:num_positions].copy()
    if not info.can_trim:
        states = {position: memory.state_at(slot, position) for position in state_positions}
        found = {position: state for position, state in states.items() if state is not None}
        return SlotCopy(tokens, memory.kv_rows(slot), found)
    if info.has_windows and state_positions:
        slots.trim(slot, num_positions)
        rows, window = memory.kv_rows_and_window(slot)
        return SlotCopy(tokens, rows, {num_positions: window})
    return SlotCopy(tokens, memory.kv_rows(slot), dict.fromkeys(state_positions, no_state()))
