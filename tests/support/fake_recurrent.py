"""Stages without a model whose slots have recurrent state: they go back to checkpoints only.

A state is the sum of all cells that were read, and has no positions. A stage compares it with the cells that
the slot holds before it computes: a state of other rows spoils all that follows. So the text is that of
`tests.support.fake_stage.FakeRuntime`, unless a slot went back in one and not in the other.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from spanmesh_proto.errors import InvalidWindow, UncuttableModel
from stages.runtime.kv_state import KvRows
from stages.runtime.row_positions import TOKENS_ONLY, RowPositions
from tests.support.fake_stage import Cell, FakeMemory, FakeRuntime

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from stages.runtime.spans import Span

_STATE: Final = struct.Struct("<8xQ")
_MODULUS: Final = 1 << 62


class FakeRecurrentMemory(FakeMemory):
    """Stands in for a `SlotMemory` of a model with recurrent layers; see `FakeMemory`.

    Args:
        num_checkpoints: Most checkpoints of each slot.
    """

    def __init__(self, num_slots: int, ctx_size: int, *, is_poisoned: bool, num_checkpoints: int) -> None:
        super().__init__(num_slots, ctx_size, is_poisoned=is_poisoned)
        self._num_checkpoints = num_checkpoints
        # Of a slot that is full of other cells, the state is wrong as well.
        self._states = [77 * is_poisoned] * num_slots
        self._copies: list[dict[int, int]] = [{} for _ in range(num_slots)]

    def check(self, span: Span) -> None:
        super().check(span)
        if not self.can_go_back(span.slot, span.start):
            raise InvalidWindow(
                f"a window starts at position {span.start}, where slot {span.slot} has no checkpoint"
            )
        if len(span.checkpoints) > self._num_checkpoints:
            raise InvalidWindow(f"a window keeps {len(span.checkpoints)} checkpoints")

    def can_go_back(self, slot: int, num_positions: int) -> bool:
        return num_positions in self.return_points(slot)

    def return_points(self, slot: int) -> tuple[int, ...]:
        return tuple(sorted({0, *self._copies[slot], self._lengths[slot]}))

    def latest_return(self, slot: int, least: int, most: int) -> int | None:
        return max((point for point in self.return_points(slot) if least <= point <= most), default=None)

    def prepare(self, span: Span) -> None:
        slot = span.slot
        super().prepare(span)
        if span.checkpoints:
            copies = dict(self._copies[slot])
            if span.start in span.checkpoints:
                copies.setdefault(span.start, self._states[slot])
            self._copies[slot] = {each: copies[each] for each in copies if each in span.checkpoints}
        cells = self.cells[slot]
        if self._states[slot] != _sum(cells):
            cells.append(Cell(0, self._states[slot]))

    def add(self, slot: int, start: int, values: Sequence[int]) -> None:
        num_before = len(self.cells[slot])
        super().add(slot, start, values)
        self._states[slot] = (self._states[slot] + _sum(self.cells[slot][num_before:])) % _MODULUS

    def trim(self, slot: int, start: int) -> None:
        if self._lengths[slot] <= start:
            return
        copies = self._copies[slot]
        if start and start not in copies:
            raise UncuttableModel(f"slot {slot} has no checkpoint at {start}, only at {sorted(copies)}")
        self._states[slot] = copies[start] if start else 0
        self._copies[slot] = {position: state for position, state in copies.items() if position <= start}
        super().trim(slot, start)

    def copy(self, source: int, slot: int, num_positions: int, positions: RowPositions = TOKENS_ONLY) -> None:
        self._states[slot], self._copies[slot] = self._states[source], dict(self._copies[source])
        super().copy(source, slot, num_positions, positions)

    def checkpoint(self, slot: int, most_positions: int) -> tuple[int, NDArray[np.uint8]] | None:
        positions = [each for each in self._copies[slot] if each <= most_positions]
        return (max(positions), _packed(self._copies[slot][max(positions)])) if positions else None

    def state_at(self, slot: int, num_positions: int) -> NDArray[np.uint8] | None:
        state = self._copies[slot].get(num_positions)
        if state is None and num_positions == self._lengths[slot]:
            state = self._states[slot]
        return None if state is None else _packed(state)

    def num_kv_bytes(self, slot: int) -> int:
        return super().num_kv_bytes(slot) + _STATE.size

    def put_kv_rows(self, slot: int, rows: KvRows, state: NDArray[np.uint8] | None = None) -> None:
        if rows.start > self._lengths[slot]:
            raise InvalidWindow(f"rows from {rows.start} on for a slot that ends at {self._lengths[slot]}")
        if rows.start:
            rows = self.kv_rows(slot).cut(0, rows.start).followed_by(rows)
        self.put_saved(slot, np.frombuffer(rows.to_bytes(), np.uint8), rows.stop, state)

    def put_saved(
        self, slot: int, saved: NDArray[np.uint8], num_positions: int, state: NDArray[np.uint8] | None = None
    ) -> None:
        assert state is not None
        self.cells[slot] = []
        self._lengths[slot] = 0
        super().put_kv_rows(slot, KvRows.from_bytes(saved))
        assert self._lengths[slot] == num_positions
        (self._states[slot],) = _STATE.unpack(state.tobytes())
        self._copies[slot] = {num_positions: self._states[slot]}


class FakeRecurrentRuntime(FakeRuntime):
    """Stands in for a `StageRuntime` of a model with recurrent layers; see `FakeRuntime`.

    Args:
        num_checkpoints: Most checkpoints of each slot.
    """

    computes_runs = True

    def __init__(
        self,
        index: int,
        num_stages: int,
        *,
        num_checkpoints: int = 4,
        n_vocab: int = 64,
        num_slots: int = 4,
        ctx_size: int = 128,
        on_decode: Callable[[Sequence[Span]], None] = lambda _spans: None,
        is_poisoned: bool = False,
    ) -> None:
        super().__init__(
            index, num_stages, n_vocab=n_vocab, num_slots=num_slots, ctx_size=ctx_size, on_decode=on_decode
        )
        self.info = replace(self.info, can_trim=False)
        self.memory: FakeRecurrentMemory = FakeRecurrentMemory(
            num_slots, ctx_size, is_poisoned=is_poisoned, num_checkpoints=num_checkpoints
        )


def _sum(cells: Sequence[Cell]) -> int:
    return sum(cell.weight for cell in cells) % _MODULUS


def _packed(state: int) -> NDArray[np.uint8]:
    return np.frombuffer(_STATE.pack(state), np.uint8)
