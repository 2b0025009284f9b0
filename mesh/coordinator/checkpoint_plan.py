"""Checkpoints of one session: positions at which its stages keep the recurrent state.

Recurrent layers cannot drop rows. After a rejection a session goes back to a checkpoint, and its next window
begins there: with the tokens that were committed since. All stages get the same windows, so all keep the same
checkpoints, and the coordinator names them without asking.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Final

from mesh.coordinator.generation import Rollback
from mesh.coordinator.plugs import Plug

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.coordinator.prefix_cache import PrefixMatch

# A session without proposals never goes back; but the next turn of its chat, and a replica, go on from a
# checkpoint.
PLAIN_EVERY: Final = 64
# Prompts with fewer tokens to compute are not divided for a checkpoint.
_LONG_PROMPT: Final = 64
# Checkpoints that are all needed to go back, and to fly while that may be necessary.
_FEW: Final = 2


class CheckpointPlan(Rollback):
    """Positions of a session's checkpoints, as stages hold them once they have computed all that was sent.

    Position 0, the empty state, is always there and takes no room.

    Args:
        capacity: Most checkpoints at a time, at least 1.
        positions: Those that the session begins with.
    """

    def __init__(self, capacity: int, positions: tuple[int, ...] = ()) -> None:
        if capacity < 1:
            raise ValueError(f"{capacity} checkpoints: without one a session cannot go back")
        self._capacity = capacity
        self._positions = [each for each in positions if each][-capacity:]
        # The end of the prompt, but for what the next turn may write otherwise.
        self._pinned: int | None = None

    @property
    def positions(self) -> tuple[int, ...]:
        """All positions, ascending."""
        return tuple(self._positions)

    def points(self, num_computed: int) -> list[int]:
        """Checkpoints up to a position."""
        return [each for each in self._positions if each <= num_computed]

    def num_kept_free(self, start: int, num_committed: int) -> int:
        """Rows from the latest checkpoint to the window, and one for the committed token."""
        begin = start if self.has_room(num_committed - 1) else self.latest(start)
        return 1 + start - begin

    def divides(self, num_to_prefill: int) -> bool:
        """Whether a checkpoint at the end of a prompt is worth a window of its own."""
        return num_to_prefill >= _LONG_PROMPT

    def before_chunk(self, start: int, num_committed: int, *, is_division: bool) -> Mapping[str, Any]:
        """A checkpoint, which stays at the prompt's end."""
        kept = self.add(start, start)
        if is_division:
            self.pin(start)
        return _asked(kept, num_committed)

    def before_window(
        self, start: int, num_committed: int, *, is_behind: bool, is_plain: bool
    ) -> Mapping[str, Any]:
        """A checkpoint, unless the one before it is near."""
        floor = num_committed - 1
        if not is_behind:
            self.trim(start)
        num_rows = start - self.latest(start)
        least = PLAIN_EVERY if is_plain else 0
        if is_behind:
            least = self.spacing(floor)
        # A stage may have missed the void window that was to make one here, so it is named again.
        kept = self.add(start, floor) if num_rows == 0 or num_rows >= least else ()
        return _asked(kept, num_committed)

    def latest(self, position: int) -> int:
        """The latest checkpoint at a position or before it."""
        index = bisect_right(self._positions, position)
        return self._positions[index - 1] if index else 0

    def trim(self, position: int) -> None:
        """Drop those beyond a position: they were made of tokens that were rejected."""
        del self._positions[bisect_right(self._positions, position) :]

    def clear(self) -> None:
        """Drop all: another ring, or an emptied slot."""
        self._positions.clear()
        self._pinned = None

    def pin(self, position: int) -> None:
        """Keep this one, if it is there, as long as the session goes on; few have no room for it."""
        self._pinned = position if self._capacity > _FEW else None

    def has_room(self, floor: int) -> bool:
        """Whether one more may be made behind `floor`, to which the session may still have to go back."""
        return len(self._positions) < self._capacity or self._victim(self.latest(floor)) is not None

    def spacing(self, floor: int) -> int:
        """Least number of rows from one checkpoint to the next, while windows are in flight.

        The first windows in flight get one each, since a rejection is likeliest there; the last that are free
        are spread ever wider.
        """
        base = self.latest(floor)
        num_used = sum(each >= base for each in self._positions)
        num_free = max(1, self._capacity - num_used - (self._pinned is not None))
        return int(2 ** max(0, self._capacity // 2 - num_free))

    def add(self, position: int, floor: int) -> tuple[int, ...]:
        """Make one before the window that begins at `position`.

        Args:
            position: Position of the window's first row.
            floor: Number of positions that will not be rejected any more.

        Returns:
            All that are kept from now on, this one included; empty at position 0, or if there is no room.
        """
        self.trim(position)
        if not position:
            return ()
        if position in self._positions:
            return tuple(self._positions)
        if len(self._positions) >= self._capacity:
            victim = self._victim(position if position <= floor else self.latest(floor))
            if victim is None:
                return ()
            self._positions.remove(victim)
        self._positions.append(position)
        return tuple(self._positions)

    def _victim(self, base: int) -> int | None:
        """The one before `base` that is missed least: those far back may lie far apart."""
        old = [each for each in self._positions if each < base and each != self._pinned]
        if not old:
            return None
        known = [0, *self._positions, base]

        def worth(position: int) -> float:
            index = known.index(position)
            return (known[index + 1] - known[index - 1]) / (base - position)

        return min(old, key=worth)


class CheckpointPlug(Plug):
    """Checkpoints of all sessions.

    Args:
        capacity: Most checkpoints of a slot at a time, at least 1.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity

    def rollback(self, match: PrefixMatch) -> CheckpointPlan:
        """Checkpoints of a new session, which begins with those of its cached prefix."""
        return CheckpointPlan(self._capacity, match.checkpoints)


def _asked(checkpoints: tuple[int, ...], num_committed: int) -> Mapping[str, Any]:
    """Fields of a window with which stages keep these checkpoints from now on."""
    return {"checkpoints": checkpoints, "num_committed": num_committed} if checkpoints else {}
