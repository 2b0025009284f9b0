"""Who may use the mesh now, and who waits: sequence slots, and a line of clients that take turns."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from mesh.coordinator.hold_times import HoldTimes
from mesh.coordinator.kept_prefixes import KeptPrefixes
from mesh.coordinator.line import Line
from spanmesh_proto.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from mesh.coordinator.kept_prefixes import Beginning


class SlotPool:
    """A fixed number of slots and a bounded line in front of them.

    A slot owns the KV cache of a whole context at every stage, so slots are the budget of tokens as well:
    a prompt that leaves room for one more token in a context fits once it has a slot.

    Args:
        num_slots: Sessions that run at once.
        max_waiting: Requests that may wait; see `Line`.
        clock_s: Monotonic, seconds.
        can_trim: See `KeptPrefixes`.

    Attributes:
        prefixes: What the slots hold.
    """

    def __init__(
        self, num_slots: int, max_waiting: int, clock_s: Callable[[], float], *, can_trim: bool = True
    ) -> None:
        self.prefixes = KeptPrefixes(num_slots, can_trim=can_trim)
        self._free = set(range(num_slots))
        self._line: Line[asyncio.Future[int]] = Line(max_waiting)
        self._hold_times = HoldTimes(num_slots)
        self._num_slots = num_slots
        self._clock_s = clock_s

    @property
    def num_busy(self) -> int:
        """Slots in use."""
        return self._num_slots - len(self._free)

    @property
    def num_waiting(self) -> int:
        """Requests in the line."""
        return len(self._line)

    @contextlib.asynccontextmanager
    async def hold(self, prompt: Sequence[int] = (), client: str | None = None) -> AsyncIterator[Beginning]:
        """A slot for the length of the `with` block, and what of the prompt the slots hold already.

        Args:
            prompt: Token ids; none to begin with nothing.
            client: Whose request it is; those of different clients take turns.

        Raises:
            Overloaded: If the line has no place for it.
        """
        free = await self._acquire(client)
        beginning = self.prefixes.begin(prompt, client, free)
        self._free.discard(beginning.slot)
        since_s = self._clock_s()
        try:
            yield beginning
        finally:
            self._hold_times.add(self._clock_s() - since_s)
            self._release(beginning.slot)

    async def _acquire(self, client: str | None) -> set[int]:
        """Slots of which one may be taken, before anything else is awaited."""
        if self._free:
            return self._free
        if not self._line.has_place(client):
            raise self._overloaded(client)
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._line.add(client, turn)
        try:
            return {await turn}
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(turn.result())
            else:
                self._line.discard(client, turn)
            raise

    def _release(self, slot: int) -> None:
        while (turn := self._line.next()) is not None:
            if not turn.done():
                turn.set_result(slot)
                return
        self._free.add(slot)

    def _overloaded(self, client: str | None) -> Overloaded:
        retry_after_s = self._hold_times.retry_after_s(len(self._line) + 1)
        own = self._line.num_of(client)
        whose = "" if client is None else f", {own} of them with this API key"
        return Overloaded(
            f"all {self._num_slots} slots are busy and {len(self._line)} requests wait{whose}: try again in "
            f"{retry_after_s} s, or serve with a larger --parallel or --max-waiting",
            retry_after_s=retry_after_s,
        )
