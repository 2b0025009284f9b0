"""Prefixes in blocks: slots copied for the disk and cut into blocks, and blocks joined to rows for a slot."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from spanmesh_proto.errors import UncuttableModel
from stages.runtime.kv_state import KvRows, no_state
from stages.serving.block_store import DIGEST_BYTES, DamagedBlock, RowsBlock

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from spanmesh_proto import windows_pb2 as wire
    from stages.runtime.slot_memory import SlotMemory
    from stages.serving.slots import KvSlots

_NO_STATE: Final = np.empty(0, np.uint8)


@dataclass(frozen=True)
class BlockPlace:
    """Name and positions of a block."""

    name: bytes
    """Its name."""
    start: int
    """The first position."""
    stop: int
    """Last position plus one."""
    has_state: bool = False
    """Whether it has the recurrent state behind its last position."""

    @classmethod
    def from_wire(cls, message: wire.Block) -> BlockPlace | None:
        """A place from a message; None if it cannot be one."""
        if len(message.name) != DIGEST_BYTES or message.start >= message.stop:
            return None
        return cls(message.name, message.start, message.stop, message.has_state)


@dataclass(frozen=True)
class SlotCopy:
    """Copy of a slot's first positions."""

    tokens: NDArray[np.int64]
    """Token ids, int64."""
    rows: KvRows
    """KV rows of these positions, and perhaps of more."""
    states: Mapping[int, NDArray[np.uint8]] = field(default_factory=dict)
    """Recurrent states, uint8 (bytes) in llama.cpp's format, by the number of positions before each."""

    @property
    def num_bytes(self) -> int:
        """Size of rows and states."""
        return self.rows.num_bytes + sum(state.size for state in self.states.values())

    def blocks(self, places: Sequence[BlockPlace]) -> Iterator[tuple[BlockPlace, RowsBlock]]:
        """Blocks at these places; those of which a part is not there are left out."""
        prefix, num_hashed = hashlib.sha256(), 0
        for place in sorted(places, key=lambda place: place.stop):
            state = self.states.get(place.stop) if place.has_state else _NO_STATE
            if state is None or place.stop > min(len(self.tokens), self.rows.stop):
                continue
            prefix.update(self.tokens[num_hashed : place.stop].tobytes())
            num_hashed = place.stop
            yield (
                place,
                RowsBlock(
                    place.start,
                    place.stop,
                    self.tokens[place.start : place.stop].astype(np.uint32),
                    prefix.copy().digest(),
                    np.frombuffer(self.rows.cut(place.start, place.stop).to_bytes(), np.uint8),
                    state,
                ),
            )


@dataclass(frozen=True)
class FetchedPrefix:
    """Rows of a prefix, ready for a slot."""

    tokens: NDArray[np.int64]
    """Token ids of the prefix, int64."""
    saved: NDArray[np.uint8]
    """The rows, uint8 (bytes), in llama.cpp's format."""
    state: NDArray[np.uint8] | None = None
    """In models with recurrent layers: the state behind them, uint8 (bytes); otherwise None."""

    @property
    def origin(self) -> str:
        """Where it comes from, for errors."""
        return "from disk"

    def put_into(self, memory: SlotMemory, slot: int) -> None:
        """Put the rows into an empty slot.

        Raises:
            MeshError: If llama.cpp does not take them.
            MemoryError: If there is no room for them.
        """
        memory.put_saved(slot, self.saved, len(self.tokens), self.state)

    def serves(self, tokens: Sequence[int]) -> bool:
        """Whether a slot with the rows can begin with exactly these tokens: a state cannot go back."""
        num_tokens = len(tokens)
        if not num_tokens or num_tokens > len(self.tokens):
            return False
        if self.state is not None and num_tokens < len(self.tokens):
            return False
        return np.array_equal(self.tokens[:num_tokens], np.asarray(tokens, np.int64))


class PrefixReader:
    """Blocks of a prefix, one after the other: each must follow from all before it."""

    def __init__(self) -> None:
        self._blocks: list[RowsBlock] = []
        self._rows: list[KvRows] = []
        self._prefix = hashlib.sha256()

    @property
    def num_positions(self) -> int:
        """Positions so far."""
        return self._blocks[-1].stop if self._blocks else 0

    def add(self, block: RowsBlock) -> None:
        """Append a block.

        Raises:
            DamagedBlock: If it does not follow, or its rows are not those of its positions.
        """
        if block.start != self.num_positions:
            raise DamagedBlock(f"it begins at position {block.start}, not {self.num_positions}")
        prefix = self._prefix.copy()
        prefix.update(block.tokens.astype(np.int64).tobytes())
        if prefix.digest() != block.prefix_sha256:
            raise DamagedBlock("it follows other tokens")
        try:
            rows = KvRows.without_caches(block.start, block.stop, block.rows)
            rows = rows or KvRows.from_bytes(block.rows, block.start)
        except UncuttableModel as error:
            raise DamagedBlock(error.message) from error
        if (rows.start, rows.stop) != (block.start, block.stop):
            raise DamagedBlock(f"its rows are of positions {rows.start} to {rows.stop}")
        self._blocks.append(block)
        self._rows.append(rows)
        self._prefix = prefix

    def prefix(self) -> FetchedPrefix | None:
        """The prefix; None without a block.

        Raises:
            DamagedBlock: If the rows do not fit together.
        """
        if not self._blocks:
            return None
        try:
            saved = self._rows[0].joined(self._rows[1:])
        except UncuttableModel as error:
            raise DamagedBlock(error.message) from error
        state = self._blocks[-1].state
        return FetchedPrefix(
            np.concatenate([block.tokens for block in self._blocks]).astype(np.int64),
            saved,
            # Without the file around it.
            state.copy() if state.size else None,
        )


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
