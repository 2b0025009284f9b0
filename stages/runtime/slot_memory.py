"""Slot memory: positions that llama.cpp holds for each slot, and ways back to earlier ones, with checkpoints.

A slot with a row for each position drops the last ones. Where layers attend to sliding windows only, and the
rows in them were brought, those before may be missing. Recurrent state goes back to copies of it alone, see
`StateCheckpoints`.

An attention cache keeps a row for each position, and rejected rows are dropped. A recurrent state has no
positions: it is the sum of all that was read. To go back to before a rejected token it has to be copied
earlier, and the tokens since then have to be computed again. llama.cpp copies the recurrent part of a
sequence alone (`LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY`), to the bit; its server has used such checkpoints for
prefix reuse.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from spanmesh_proto.errors import InvalidWindow, StageFailed, UncuttableModel
from stages.runtime.bindings import llama_cpp
from stages.runtime.kv_state import KvRows, without_head
from stages.runtime.llama import last_complaint
from stages.runtime.row_positions import TOKENS_ONLY

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from stages.runtime.loaded_model import StageInfo
    from stages.runtime.row_positions import RowPositions
    from stages.runtime.spans import Span

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


class _RowRollback:
    """Rollback of slots that have a row for each position; those in sliding windows may be missing."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        # Fewest positions to which a slot can go back, but for none.
        self._floors = [0] * len(lengths)

    def points(self, slot: int) -> tuple[int, ...]:
        return tuple(sorted({0, self._lengths[slot]}))

    def latest(self, slot: int, least: int, most: int) -> int | None:
        return next((each for each in (most, least) if self.allows(slot, each)), None)

    def allows(self, slot: int, num_positions: int) -> bool:
        return not 0 < num_positions < self._floors[slot]

    def restore(self, slot: int, num_positions: int) -> None:
        if not self.allows(slot, num_positions):
            raise UncuttableModel(
                f"slot {slot} cannot go back to position {num_positions}: before {self._floors[slot]} it "
                "lacks rows in sliding windows"
            )

    def drop(self, slot: int, num_positions: int) -> None:
        if num_positions <= 0:
            self._floors[slot] = 0

    def copy(self, source: int, slot: int) -> None:
        self._floors[slot] = self._floors[source]

    def put(self, slot: int, num_positions: int, state: NDArray[np.uint8]) -> None:
        del state  # rows in sliding windows, which are no copy to go back to
        self._floors[slot] = num_positions

    def keep(self, span: Span) -> None:
        """No checkpoints: all rows are there."""

    def rows(self, slot: int, saved: NDArray[np.uint8]) -> KvRows:
        del slot
        return KvRows.from_bytes(saved, 0)


class _StateRollback:
    """Rollback of slots with recurrent state: to checkpoints."""

    def __init__(self, lengths: Sequence[int], states: StateCheckpoints) -> None:
        self._lengths = lengths
        self._states = states

    def points(self, slot: int) -> tuple[int, ...]:
        return tuple(sorted({0, *self._states.positions(slot), self._lengths[slot]}))

    def latest(self, slot: int, least: int, most: int) -> int | None:
        return max((point for point in self.points(slot) if least <= point <= most), default=None)

    def allows(self, slot: int, num_positions: int) -> bool:
        is_free = num_positions in {0, self._lengths[slot]}
        return is_free or num_positions in self._states.positions(slot)

    def restore(self, slot: int, num_positions: int) -> None:
        if num_positions and not self._states.restore(slot, num_positions):
            raise UncuttableModel(
                f"slot {slot} cannot go back to position {num_positions}: its recurrent state has "
                f"checkpoints at {list(self._states.positions(slot))} only"
            )

    def drop(self, slot: int, num_positions: int) -> None:
        self._states.trim(slot, num_positions)

    def copy(self, source: int, slot: int) -> None:
        self._states.copy(source, slot)

    def put(self, slot: int, num_positions: int, state: NDArray[np.uint8]) -> None:
        self._states.put(slot, num_positions, state)

    def keep(self, span: Span) -> None:
        if span.checkpoints:
            self._states.retain(span.slot, span.checkpoints)
            if span.start in span.checkpoints:
                self._states.save(span.slot, span.start)

    def rows(self, slot: int, saved: NDArray[np.uint8]) -> KvRows:
        saved = without_part(saved, self._states.read(slot))
        return KvRows.without_caches(0, self._lengths[slot], saved) or KvRows.from_bytes(saved, 0)


class SlotMemory:
    """Slots of one stage in llama.cpp's memory. Not thread-safe, as its runtime.

    Args:
        context: The `llama_context`.
        info: Facts of the stage.
        num_slots: Number of slots.
        ctx_size: Positions of each.
        has_shared_cache: Whether all slots share the cells of one cache; otherwise each has its own.
        num_checkpoints: Most checkpoints of each slot, in models with recurrent layers.

    Raises:
        StageFailed: If llama.cpp does not return the state of an empty slot.
    """

    def __init__(
        self,
        context: Any,
        info: StageInfo,
        *,
        num_slots: int,
        ctx_size: int,
        has_shared_cache: bool,
        num_checkpoints: int,
    ) -> None:
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._info = info
        self._ctx_size = ctx_size
        self._has_shared_cache = has_shared_cache
        self._num_checkpoints = num_checkpoints
        self._lengths = [0] * num_slots
        # None where rows were brought by themselves.
        self._positions: list[RowPositions | None] = [TOKENS_ONLY] * num_slots
        # Whether rows were brought, and so may lie in other cells than where they were computed.
        self._is_brought = [False] * num_slots
        # Slots whose rows llama.cpp copies, or copies from, at the next decode, not at the call.
        self._copying: set[int] = set()
        self._states = StateCheckpoints(context, num_slots)
        # States are put back at the call: rows among them would be overwritten by a copy that comes later.
        self._copies_at_call = not info.can_trim and self._states.hold_rows(0)
        self._rollback: _RowRollback | _StateRollback = (
            _RowRollback(self._lengths) if info.can_trim else _StateRollback(self._lengths, self._states)
        )

    @property
    def lengths(self) -> Sequence[int]:
        """Number of positions that each slot holds, kept up to date."""
        return self._lengths

    def length(self, slot: int) -> int:
        """Number of positions that a slot holds."""
        return self._lengths[slot]

    def check_slot(self, slot: int) -> None:
        """Check that a slot exists.

        Raises:
            InvalidWindow: If it does not.
        """
        if not 0 <= slot < len(self._lengths):
            raise InvalidWindow(f"slot {slot} of {len(self._lengths)} does not exist")

    def check(self, span: Span) -> None:
        """Check that a slot that exists can take the rows of a span.

        Raises:
            InvalidWindow: Naming what does not fit.
        """
        slot, start, stop = span.slot, span.start, span.start + len(span.tokens)
        if (images := self.images(slot)) is not None:
            images.check(start, span.tokens)
        if start > self._lengths[slot]:
            raise InvalidWindow(
                f"a window starts at position {start}, but slot {slot} ends at {self._lengths[slot]}"
            )
        if not self.can_go_back(slot, start):
            raise InvalidWindow(
                f"a window starts at position {start}, to which slot {slot} cannot go back: it has no "
                "checkpoint of its recurrent state there, or an image"
            )
        if len(span.checkpoints) > self._num_checkpoints and not self._info.can_trim:
            raise InvalidWindow(
                f"a window keeps {len(span.checkpoints)} checkpoints; this stage keeps "
                f"{self._num_checkpoints} of each slot"
            )
        if stop > self._ctx_size:
            raise InvalidWindow(f"a window ends at position {stop}, past the context of {self._ctx_size}")

    def prepare(self, span: Span) -> None:
        """Drop a slot's positions from a span's start on, and keep the checkpoints that it names.

        Raises:
            UncuttableModel: If the slot cannot go back to there.
            StageFailed: If llama.cpp does not return a state, or rejects a copy of it.
        """
        self.trim(span.slot, span.start)
        self._rollback.keep(span)

    def decoded(self) -> None:
        """Record that llama.cpp has begun a decode, and so has made all copies from slot to slot."""
        self._copying.clear()

    def computed(self, slot: int, num_positions: int, *, is_padded: bool) -> None:
        """Record how many positions a slot holds after a decode.

        Args:
            slot: The slot.
            num_positions: Number of its positions.
            is_padded: Whether rows behind them were computed, which are dropped.
        """
        self._lengths[slot] = num_positions
        if is_padded:
            self._forget(slot, num_positions)

    def can_go_back(self, slot: int, num_positions: int) -> bool:
        """Whether `trim` to as many positions as the slot holds, or fewer, is possible."""
        return self._is_edge(slot, num_positions) and self._rollback.allows(slot, num_positions)

    def return_points(self, slot: int) -> tuple[int, ...]:
        """Numbers of positions to which a slot with recurrent state can go back, ascending."""
        return self._rollback.points(slot)

    def latest_return(self, slot: int, least: int, most: int) -> int | None:
        """The highest number of positions, within bounds, to which a slot can go back; None if there is none.

        Args:
            slot: The slot.
            least: Smallest number of positions.
            most: Largest number of positions, at most those that the slot holds.
        """
        images = self.images(slot)
        within = None if images is None or most == self._lengths[slot] else images.within(most)
        if within is not None:
            most = within.first_row
        return self._rollback.latest(slot, least, most) if most >= least else None

    @property
    def num_checkpoint_bytes(self) -> int:
        """Size of the checkpoints of all slots."""
        return self._states.num_bytes

    def images(self, slot: int) -> RowPositions | None:
        """Positions of a slot's rows, and of those that may follow; None where each has its own number."""
        positions = self._positions[slot]
        return None if positions is TOKENS_ONLY else positions

    def first_position(self, slot: int, row: int) -> int:
        """The first position behind the rows of a slot before one: its own, if it is a token's."""
        images = self.images(slot)
        return row if images is None else images.end_of(row)

    def num_alike(self, slot: int, positions: RowPositions) -> int:
        """Number of first rows that a slot may hold of a sequence with these positions."""
        held = self._positions[slot]
        return self._lengths[slot] if held is None or held is positions else held.num_alike(positions)

    def computes_alike(self, slot: int, num_rows: int, positions: RowPositions) -> bool:
        """Whether what follows the first rows of a slot is computed as if they had been computed here.

        Where layers attend to sliding windows, llama.cpp rounds a chunk that is computed at once otherwise
        behind rows that were brought: these lie in other cells.
        """
        return not (self._info.has_windows and self._is_brought[slot] and positions.has_whole(num_rows))

    def lay_out(self, slot: int, num_positions: int, positions: RowPositions) -> None:
        """Drop all but the first positions of a slot, and set those of the rows that follow.

        Args:
            slot: The slot.
            num_positions: Number of its first rows that stay; at most those of `num_alike`.
            positions: Positions of these rows and the following ones.

        Raises:
            UncuttableModel: If it cannot go back to this position.
        """
        if self._positions[slot] is None:
            self._positions[slot] = positions
        self.trim(slot, num_positions)
        self._positions[slot] = positions

    def trim(self, slot: int, num_positions: int) -> None:
        """Drop all but the first positions of a slot.

        Raises:
            UncuttableModel: If it cannot go back to this position.
        """
        if self._lengths[slot] > num_positions:
            if not self._is_edge(slot, num_positions):
                raise UncuttableModel(
                    f"slot {slot} cannot go back to position {num_positions}, within an image"
                )
            if num_positions and self._has_unknown_positions(slot):
                self._put_rows(slot, self.kv_rows(slot).cut(0, num_positions), None)
                return
            self._rollback.restore(slot, num_positions)
            self._forget(slot, num_positions)
            self._rollback.drop(slot, num_positions)
            self._lengths[slot] = num_positions
            self._is_brought[slot] = self._is_brought[slot] and num_positions > 0

    def copy(self, source: int, slot: int, num_positions: int, positions: RowPositions = TOKENS_ONLY) -> None:
        """Replace the content of a slot by the first positions of another.

        In a shared cache the two share the cells. Between separate caches llama.cpp copies all of it, before
        the next decode; recurrent cells are shared until then. Only where states hold rows in sliding windows
        all that the source holds is copied now, through memory.

        Args:
            source: The other slot.
            slot: The slot.
            num_positions: Number of positions.
            positions: Positions of these rows, for a source to which they were brought.

        Raises:
            InvalidWindow: If a slot does not exist, or the source holds fewer positions.
            UncuttableModel: If the source cannot go back to this position.
            StageFailed: If llama.cpp does not copy; the slot is empty then.
        """
        for one in (source, slot):
            self.check_slot(one)
        if num_positions > self._lengths[source]:
            raise InvalidWindow(
                f"slot {source} holds {self._lengths[source]} positions: {num_positions} cannot be copied"
            )
        saved = read_sequence(self._context, source) if self._copies_at_call else None
        self._forget(slot, 0)
        if saved is None:
            # Between separate caches llama.cpp copies whole ones only.
            llama_cpp.llama_memory_seq_cp(self._memory, source, slot, -1, -1)
            self._copying |= {source, slot}
        else:
            self._write(slot, saved, f"slot {source}")
        self._rollback.copy(source, slot)
        self._lengths[slot] = self._lengths[source]
        held = self._positions[source]
        self._positions[slot] = positions if held is None else held
        self._is_brought[slot] = self._is_brought[source]
        self.trim(slot, num_positions)

    def kv_rows(self, slot: int) -> KvRows:
        """KV rows of a slot that is not empty, for a stage with the same layers; without recurrent state.

        Raises:
            UncuttableModel: If llama.cpp's state has no rows, or a copy is pending.
        """
        self._require_no_copies(slot)
        return self._whole_rows(slot, self._rollback.rows(slot, read_sequence(self._context, slot)))

    def kv_rows_and_window(self, slot: int) -> tuple[KvRows, NDArray[np.uint8]]:
        """KV rows of a model with sliding windows: of the other layers, and apart those in the windows.

        Returns:
            The rows, and what `put_saved` takes as a state, uint8 (bytes): with it, a slot can only go on.

        Raises:
            UncuttableModel: If llama.cpp saves them otherwise, or a copy is pending.
        """
        self._require_no_copies(slot)
        window = self._states.read(slot).copy()
        rows = KvRows.from_bytes(without_part(read_sequence(self._context, slot), window), 0)
        return self._whole_rows(slot, rows), window

    def num_kv_bytes(self, slot: int) -> int:
        """Size of `kv_rows`' result, in bytes."""
        return int(llama_cpp.llama_state_seq_get_size(self._context, slot))

    def put_kv_rows(self, slot: int, rows: KvRows, state: NDArray[np.uint8] | None = None) -> None:
        """Put rows that another stage computed into a slot, after those that it holds.

        Args:
            slot: The slot.
            rows: The rows.
            state: In models with recurrent layers: the state behind them, uint8, in llama.cpp's format. The
                slot can go back to there.

        Raises:
            InvalidWindow: If the slot does not exist or ends before them, or they exceed the context.
            UncuttableModel: If they are of another model.
            StageFailed: If llama.cpp rejects them; the slot is empty then.
        """
        self.check_slot(slot)
        if not rows.start <= self._lengths[slot] or rows.stop > self._ctx_size:
            raise InvalidWindow(
                f"rows {rows.start} to {rows.stop} for slot {slot}, which ends at {self._lengths[slot]} of "
                f"{self._ctx_size}"
            )
        rows = rows.in_streams(*((1, 0) if self._has_shared_cache else (len(self._lengths), slot)))
        if rows.start:
            held = self.kv_rows(slot).cut(0, rows.start)
            self._put_rows(slot, held.followed_by(rows.laid_out_as(held)), state)
            return
        try:
            self._put_rows(slot, rows, state)
        except StageFailed:
            # Whether values are transposed here shows only in rows.
            self._put_rows(slot, rows.transposed(), state)

    def put_saved(
        self, slot: int, saved: NDArray[np.uint8], num_positions: int, state: NDArray[np.uint8] | None = None
    ) -> None:
        """Replace the content of a slot by saved rows of its first positions.

        Args:
            slot: The slot.
            saved: The rows, uint8, in llama.cpp's format, see `KvRows`.
            num_positions: Number of their positions.
            state: See `put_kv_rows`; or rows in sliding windows, see `kv_rows_and_window`.

        Raises:
            InvalidWindow: If the slot does not exist, or they exceed the context.
            UncuttableModel: If a copy is pending, which would overwrite them.
            StageFailed: If llama.cpp rejects them; the slot is empty then.
        """
        self.check_slot(slot)
        if num_positions > self._ctx_size:
            raise InvalidWindow(f"{num_positions} saved positions exceed the context of {self._ctx_size}")
        self._require_no_copies(slot)
        if state is not None:
            saved = np.concatenate([saved, without_head(state)])
        self._write(slot, saved, "another stage")
        self._lengths[slot] = num_positions
        self._positions[slot] = None
        self._is_brought[slot] = True
        if state is not None:
            self._rollback.put(slot, num_positions, state)

    def checkpoint(self, slot: int, most_positions: int) -> tuple[int, NDArray[np.uint8]] | None:
        """The slot's latest checkpoint of at most so many positions: their number, and the state, uint8."""
        positions = [each for each in self._states.positions(slot) if each <= most_positions]
        state = self._states.at(slot, positions[-1]) if positions else None
        return None if state is None else (positions[-1], state)

    def state_at(self, slot: int, num_positions: int) -> NDArray[np.uint8] | None:
        """Copy of a slot's recurrent state behind its first positions, uint8; None if it is not kept."""
        state = self._states.at(slot, num_positions)
        if state is None and num_positions == self._lengths[slot]:
            state = self._states.read(slot)
        return None if state is None else state.copy()

    def _has_unknown_positions(self, slot: int) -> bool:
        """Whether the number of a row that was brought does not tell its position."""
        is_unknown = self._positions[slot] is None and self._info.has_position_parts
        return is_unknown and self._info.can_trim

    def _is_edge(self, slot: int, num_positions: int) -> bool:
        """Whether a slot can end there without a part of an image, or ends there anyway."""
        images = self.images(slot)
        return images is None or num_positions == self._lengths[slot] or images.within(num_positions) is None

    def _whole_rows(self, slot: int, rows: KvRows) -> KvRows:
        if (rows.start, rows.stop) != (0, self._lengths[slot]):
            raise UncuttableModel(
                f"the KV cache has positions {rows.start} to {rows.stop} of {self._lengths[slot]}"
            )
        return rows

    def _put_rows(self, slot: int, rows: KvRows, state: NDArray[np.uint8] | None) -> None:
        self.put_saved(slot, np.frombuffer(rows.to_bytes(), np.uint8), rows.stop, state)

    def _write(self, slot: int, saved: NDArray[np.uint8], whose: str) -> None:
        """Replace the content of a slot; the caller sets what it holds then."""
        self._rollback.drop(slot, -1)
        self._lengths[slot] = 0
        if not write_sequence(self._context, slot, saved):
            self._forget(slot, 0)
            raise StageFailed(f"llama.cpp rejects the KV rows of {whose}: {last_complaint()}")

    def _require_no_copies(self, slot: int) -> None:
        if slot in self._copying:
            raise UncuttableModel("llama.cpp has yet to copy rows from slot to slot")

    def _forget(self, slot: int, start: int) -> None:
        position = self.first_position(slot, start)
        if not llama_cpp.llama_memory_seq_rm(self._memory, slot, position, -1):
            raise UncuttableModel(
                f"this model's memory cannot be trimmed to position {start}: recurrent state has no positions"
            )


class Prefix(Protocol):
    """Rows of a session's cached prefix that no slot holds."""

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Token ids of the rows, int64."""

    @property
    def origin(self) -> str:
        """Where it comes from, for errors, such as `from disk`."""

    def serves(self, tokens: Sequence[int]) -> bool:
        """Whether a slot with the rows can begin with exactly these tokens."""

    def put_into(self, memory: SlotMemory, slot: int) -> None:
        """Put the rows into an empty slot.

        Raises:
            MeshError: If llama.cpp does not take them.
            MemoryError: If there is no room for them.
        """


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
