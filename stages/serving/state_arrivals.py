"""Recurrent state on its way to a replica: messages of it, and their parts until all have arrived."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import ProtocolError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stages.runtime.kv_state import KvRows

# A state of a few MB a layer, of a large stage.
_MOST_STATE_BYTES: Final = 2**30


@dataclass(frozen=True)
class ArrivedRows:
    """KV rows that wait for the state behind them."""

    rows: KvRows
    """The rows."""
    tokens: tuple[int, ...]
    """Their token ids."""
    sent: bytes
    """Hidden states that the stage sent for them, concatenated; perhaps none."""
    sent_row_bytes: int
    """Size of each of those."""


@dataclass
class StateArrivals:
    """Rows and parts of states that have arrived, by slot."""

    _rows: dict[int, list[ArrivedRows]] = field(default_factory=dict)
    _states: dict[int, bytearray] = field(default_factory=dict)

    def add_rows(self, slot: int, rows: ArrivedRows) -> None:
        """Add rows; those at position 0, or behind others than the last, begin anew."""
        waiting = self._rows.setdefault(slot, [])
        if waiting and waiting[-1].rows.stop != rows.rows.start:
            waiting.clear()
        waiting.append(rows)
        self._states.pop(slot, None)

    def add_state(self, slot: int, part: bytes, num_bytes: int) -> NDArray[np.uint8] | None:
        """Add a part of a state; returns the state once it is whole.

        Raises:
            ProtocolError: If there is more than was announced, or than any state has.
        """
        if not part:
            return None
        state = self._states.setdefault(slot, bytearray())
        if num_bytes > _MOST_STATE_BYTES or len(state) + len(part) > num_bytes:
            raise ProtocolError(f"{len(state) + len(part)} bytes of a recurrent state of {num_bytes}")
        state += part
        return np.frombuffer(bytes(self._states.pop(slot)), np.uint8) if len(state) == num_bytes else None

    def take_rows(self, slot: int) -> list[ArrivedRows]:
        """Remove and return the rows that wait for a slot's state."""
        return self._rows.pop(slot, [])

    def drop(self, slot: int) -> None:
        """Drop all that has arrived for a slot."""
        self._rows.pop(slot, None)
        self._states.pop(slot, None)


def state_messages(
    slot: int, session: int, stop: int, state: NDArray[np.uint8], most_bytes: int
) -> list[wire.SlotRows]:
    """Messages of a recurrent state, which follow those of the rows.

    Args:
        slot: Its slot.
        session: Session of the slot.
        stop: Number of positions that the state is made of.
        state: The state, uint8, in llama.cpp's format.
        most_bytes: Most bytes of one message.
    """
    return [
        wire.SlotRows(
            slot=slot,
            session=session,
            start=stop,
            state=state[first : first + most_bytes].tobytes(),
            num_state_bytes=state.size,
        )
        for first in range(0, state.size, most_bytes)
    ]
