"""Window scheduler: queue of windows, and choice of those that share the next batch.

Filled by the event loop, emptied by the thread that computes.
"""

from __future__ import annotations

import queue
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from stages.runtime.row_positions import TOKENS_ONLY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from spanmesh_proto import windows_pb2 as wire
    from stages.runtime.row_positions import RowPositions
    from stages.runtime.slot_memory import Prefix
    from stages.runtime.spans import Span
    from stages.sampling.verifier import WindowVerifier
    from stages.transport.hidden_codec import EncodedHidden


_MOST_PASSED_OVER: Final = 4


@dataclass(frozen=True)
class QueuedWindow:
    """A waiting window."""

    message: wire.Window
    """The window as it came; it goes on as it is."""
    span: Span
    """Rows for llama.cpp; those of the stage before are in `hidden` until they are decoded."""
    verifier: WindowVerifier
    """Verifier of its session, at the tail."""
    times: tuple[wire.StageTime, ...]
    """Times of the stages before."""
    arrived_us: int
    """When it arrived, on this host's monotonic clock."""
    bundle: int = 0
    """Number of the bundle that it came in: only windows of the same one share its batch."""
    hidden: EncodedHidden | None = None
    """Hidden states of the bundle's rows, except at the first stage."""
    first_row: int = 0
    """Its first row among those."""
    num_resumed: int = 0
    """First positions that the slot may hold from before a recovery."""
    num_held: int = 0
    """Number of its first rows that are held and need not be computed."""
    held: bytes = b""
    """Those rows as they were sent; empty at the tail."""
    travelling: tuple[Any, ...] = ()
    """Messages of plugs that came with it and go on with it."""

    @property
    def session(self) -> int:
        """Id of the session."""
        return self.message.session

    @property
    def epoch(self) -> int:
        """The session's epoch when the window was sent."""
        return self.message.epoch

    @property
    def id(self) -> int:
        """The window's id within the session."""
        return self.message.id

    @property
    def scored_next(self) -> int | None:
        """Token after the last row of a part of the prompt whose tokens are scored; None to sample."""
        return self.message.scored_next if self.message.HasField("scored_next") else None

    @property
    def is_chunk(self) -> bool:
        """Whether it is part of a prompt: in other windows every row but a committed one is verified."""
        message = self.message
        is_scored = message.HasField("scored_next")
        return is_scored or self.span.num_outputs + message.recomputed_rows < len(self.span.tokens)

    @property
    def to_compute(self) -> Span:
        """The rows that are not held."""
        return self.span.behind(self.num_held) if self.num_held else self.span

    def decoded(self) -> QueuedWindow:
        """The same, with its hidden states in the span."""
        if self.hidden is None:
            return self
        rows = self.hidden.decoded[self.first_row : self.first_row + len(self.span.tokens)]
        return replace(self, span=replace(self.span, hidden=rows), hidden=None)


@dataclass(frozen=True)
class SlotAssigned:
    """Change: a session takes over a slot."""

    session: int
    """Its id."""
    source: int
    """Slot with the session's cached prefix, perhaps its own."""
    slot: int
    """Slot of the session."""
    cached: tuple[int, ...]
    """Token ids of the prefix, which `source` holds once earlier windows are computed."""
    num_resumed: int = 0
    """Number of positions that `slot` may hold from before a recovery."""
    brought: Prefix | None = None
    """The prefix as a plug has brought it; None if it has to be in a slot."""
    positions: RowPositions = TOKENS_ONLY
    """Positions of the session's rows."""

    def follows(self, window: QueuedWindow) -> bool:
        """Whether an earlier window computes part of the prefix, here or at a later stage."""
        span = window.span
        return span.slot == self.source != self.slot and span.start < len(self.cached)


@dataclass(frozen=True)
class QueueBarrier:
    """Marker: the changes before it were made, and nothing is being computed."""

    on_passed: Callable[[], object]
    """Called in the computing thread."""


Change = SlotAssigned | QueueBarrier


@dataclass(frozen=True)
class _Pending:
    """A waiting change, and later windows of its session."""

    change: Change
    windows: deque[QueuedWindow] = field(default_factory=deque)


@dataclass(frozen=True)
class Work:
    """Work for the computing thread: first changes of slots, in order, then `windows` as one batch."""

    changes: tuple[Change, ...]
    windows: tuple[QueuedWindow, ...]


class WindowScheduler:
    """Windows that came in one bundle share a batch while their rows fit, first come, first served.

    Which windows share a bundle is the coordinator's choice: if all that wait shared a batch, all sessions
    would end up in one batch that walks from stage to stage, while the other stages are idle. Where slots
    have caches of their own only neighbouring slots share one.

    Two windows of one session never share a batch: the second may trim what the first computes. A prefill
    chunk is computed alone, in turns with all windows that arrived before the next chunk, so a token of one
    session waits for one chunk of others at most. Among several chunks the shortest goes first, so that a
    short prompt does not wait for long ones; but the one that has waited longest is passed over a few times
    only.

    Changes of slots keep their order. A session that begins with another slot's content waits until the
    windows that compute it are taken, if they came before.

    Args:
        max_rows: Rows of one batch.
        is_live: Whether a window of (session, epoch) is still valid; called when it is taken.
        run_of: If only some slots gain from a shared batch: returns, for a slot and the waiting rows by slot,
            the slots around it that do. Others would be computed one after the other, and delay one another.
    """

    def __init__(
        self,
        max_rows: int,
        is_live: Callable[[int, int], bool],
        *,
        run_of: Callable[[int, Mapping[int, int]], range] | None = None,
    ) -> None:
        self._max_rows = max_rows
        self._is_live = is_live
        self._run_of = run_of
        # Arrivals pass this queue: unlike a condition variable it wakes the worker's thread without Python on
        # either side, and what was taken from it belongs to the thread that computes.
        self._arrivals: queue.SimpleQueue[tuple[QueuedWindow, ...] | Change | None] = queue.SimpleQueue()
        # What `wait` took from there, until it is noted.
        self._in_hand: deque[tuple[QueuedWindow, ...] | Change | None] = deque()
        # The one is written by the event loop alone, the other by the thread that takes.
        self._num_arrivals = 0
        self._num_noted_arrivals = 0
        # Of windows: the one is written by the event loop alone, the other by the computing thread.
        self._num_put = 0
        self._num_noted = 0
        self._waiting: deque[QueuedWindow] = deque()
        self._changes: list[Change] = []
        self._pending: deque[_Pending] = deque()
        # Windows of `_pending`: other threads ask for the length, and must not iterate over what this one
        # changes.
        self._num_pending_windows = 0
        # Number of windows to be taken before the next chunk.
        self._num_before_chunk: int | None = None
        # Number of chunks taken since the oldest one became the oldest.
        self._num_passed_over = 0
        self._is_closed = False
        self.num_dropped = 0

    def __len__(self) -> int:
        """Number of waiting windows, from any thread; one that is moved at this moment may be missed."""
        return len(self._waiting) + self._num_pending_windows + self._num_put - self._num_noted

    def put(self, *windows: QueuedWindow) -> None:
        """Append the windows of a bundle."""
        self._num_put += len(windows)
        self._arrive(windows)

    def put_ready(self, window: QueuedWindow) -> None:
        """Append a window for `take_ready` by the calling thread; the queue must be empty."""
        self._num_put += 1
        self._num_arrivals += 1
        self._note((window,))

    def change(self, change: Change) -> None:
        """Queue a change of a slot, before later batches."""
        self._arrive(change)

    def close(self) -> None:
        """Wake the computing thread for the last time."""
        self._arrive(None)

    def _arrive(self, arrival: tuple[QueuedWindow, ...] | Change | None) -> None:
        self._num_arrivals += 1
        self._arrivals.put(arrival)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits, and it is open. For the event loop, while no other thread takes."""
        return self._num_arrivals == self._num_noted_arrivals and not (
            self._waiting or self._pending or self._is_closed
        )

    @property
    def is_closed(self) -> bool:
        """Whether `take_ready` has met the end of the queue."""
        return self._is_closed

    def wait(self) -> None:
        """Wait for an arrival. For one thread.

        Meanwhile the event loop may call `take_ready` after `put_ready`: then nothing has arrived that both
        would take.
        """
        self._in_hand.append(self._arrivals.get())

    def take_ready(self) -> Work | None:
        """Work that need not be waited for; None if there is none. For one thread at a time."""
        while self._in_hand:
            self._note(self._in_hand.popleft())
        while not self._arrivals.empty():
            self._note(self._arrivals.get())
        if self._is_closed:
            return None
        self._drop_void()
        self._release_changes()
        windows = self._take_batch()
        if not windows and not self._changes:
            return None
        changes, self._changes = tuple(self._changes), []
        return Work(changes, windows)

    def _note(self, arrival: tuple[QueuedWindow, ...] | Change | None) -> None:
        self._num_noted_arrivals += 1
        if arrival is None:
            self._is_closed = True
        elif isinstance(arrival, tuple):
            for window in arrival:
                windows = self._queue_of(window.session)
                windows.append(window)
                self._num_pending_windows += windows is not self._waiting
                self._num_noted += 1
        else:
            self._pending.append(_Pending(arrival))
            self._release_changes()

    def _queue_of(self, session: int) -> deque[QueuedWindow]:
        """Queue for a window of the session."""
        for pending in reversed(self._pending):
            if isinstance(pending.change, SlotAssigned) and pending.change.session == session:
                return pending.windows
        return self._waiting

    def _release_changes(self) -> None:
        """Release changes that wait for nothing any more, up to the first that does."""
        while self._pending and not self._has_to_wait(self._pending[0].change):
            pending = self._pending.popleft()
            self._changes.append(pending.change)
            if pending.windows:
                self._num_pending_windows -= len(pending.windows)
                self._waiting += pending.windows
                # Windows of a session that has ended, whose slot the next change reassigns.
                self._drop_void()

    def _has_to_wait(self, change: Change) -> bool:
        return isinstance(change, SlotAssigned) and any(map(change.follows, self._waiting))

    def _firsts(self) -> tuple[QueuedWindow, ...]:
        """First window of each session, in the order of arrival."""
        firsts: dict[int, QueuedWindow] = {}
        for window in self._waiting:
            firsts.setdefault(window.session, window)
        return tuple(firsts.values())

    def _take_batch(self) -> tuple[QueuedWindow, ...]:
        firsts = self._firsts()
        chunks = [window for window in firsts if window.is_chunk]
        if not chunks:
            self._num_before_chunk = None
            return self._take_small()
        if self._num_before_chunk is None:
            self._num_before_chunk = sum(not window.is_chunk for window in firsts)
        if self._num_before_chunk > 0 and (taken := self._take_small()):
            self._num_before_chunk -= len(taken)
            return taken
        self._num_before_chunk = None
        return (self._take_chunk(chunks),)

    def _take_chunk(self, chunks: list[QueuedWindow]) -> QueuedWindow:
        """Take a chunk among the first of each session, in the order of arrival."""
        longest_waiting = chunks[0]
        chunk = longest_waiting
        if self._num_passed_over < _MOST_PASSED_OVER:
            chunk = min(chunks, key=lambda window: len(window.span.tokens))
        self._num_passed_over = 0 if chunk is longest_waiting else self._num_passed_over + 1
        self._waiting.remove(chunk)
        return chunk

    def _take_small(self) -> tuple[QueuedWindow, ...]:
        return self._take_any() if self._run_of is None else self._take_run(self._run_of)

    def _take_run(self, run_of: Callable[[int, Mapping[int, int]], range]) -> tuple[QueuedWindow, ...]:
        """Take the window that has waited longest, and those that gain from sharing its batch."""
        small = [window for window in self._firsts() if not window.is_chunk]
        if not small:
            return ()
        together = {window.span.slot: window for window in small if window.bundle == small[0].bundle}
        rows_of = {slot: len(window.span.tokens) for slot, window in together.items()}
        num_rows = len(small[0].span.tokens)
        run = run_of(small[0].span.slot, rows_of)
        taken = tuple(together[slot] for slot in run if rows_of.get(slot) == num_rows)
        for window in taken:
            self._waiting.remove(window)
        return taken

    def _take_any(self) -> tuple[QueuedWindow, ...]:
        taken: list[QueuedWindow] = []
        waiting: deque[QueuedWindow] = deque()
        sessions: set[int] = set()
        rows_left = self._max_rows
        for window in self._waiting:
            is_next = window.session not in sessions and not window.is_chunk
            is_next = is_next and (not taken or window.bundle == taken[0].bundle)
            # What fits no batch with others goes alone.
            if is_next and (len(window.span.tokens) <= rows_left or not taken):
                rows_left -= len(window.span.tokens)
                taken.append(window)
                sessions.add(window.session)
            else:
                waiting.append(window)
                # Later windows of this session have to wait as well.
                sessions.add(window.session)
        self._waiting = waiting
        return tuple(taken)

    def _drop_void(self) -> None:
        live = deque(window for window in self._waiting if self._is_live(window.session, window.epoch))
        self.num_dropped += len(self._waiting) - len(live)
        self._waiting = live
