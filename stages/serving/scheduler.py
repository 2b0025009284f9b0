"""Window scheduler: the queue of windows, and which of them share the next batch.

Filled by the event loop, emptied by the thread that owns llama.cpp.
"""

from __future__ import annotations

import queue
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from spanmesh_proto import windows_pb2 as wire
    from stages.runtime.stage_runtime import Span
    from stages.sampling.verifier import WindowVerifier
    from stages.transport.hidden_codec import EncodedHidden


def run_around(slot: int, rows_of: Mapping[int, int], most_slots: int, most_rows: int) -> range:
    """Slots that follow one another with equally many rows each, the given one among them.

    A longer run is divided from its beginning, so that a slot meets the same neighbours again and again:
    those that go round the pipeline together come back together.

    Args:
        slot: One of `rows_of`.
        rows_of: Rows that wait, by slot; a window without any is refused later, but by itself.
        most_slots: How many may be computed together, at least 1.
        most_rows: How many rows may be, at least those of the slot.
    """
    num_rows = rows_of[slot]
    first = last = slot
    while rows_of.get(first - 1) == num_rows:
        first -= 1
    while rows_of.get(last + 1) == num_rows:
        last += 1
    limit = max(1, min(most_slots, most_rows // max(1, num_rows)))
    start = first + (slot - first) // limit * limit
    return range(start, min(start + limit, last + 1))


_MOST_PASSED_OVER: Final = 4


@dataclass(frozen=True)
class QueuedWindow:
    """One window as it waits.

    Attributes:
        session: The session's id.
        epoch: Its epoch when the window was sent.
        id: The window's id within the session.
        span: What llama.cpp gets, but for hidden states.
        verifier: Its session's, at the tail.
        times: What the stages before took.
        arrived_us: When it arrived, on this host's monotonic clock.
        most_together: Windows that may share its batch, itself included; 0: as many as fit.
        hidden: Hidden states of its rows, unless the stage is the first.
        num_resumed: What the slot holds of the session's first positions may be used as it is, up to here.
        num_held: How many of its first rows are there so, and need not be computed.
        held: What they were sent on as; nothing at the tail.
    """

    session: int
    epoch: int
    id: int
    span: Span
    verifier: WindowVerifier
    times: tuple[wire.StageTime, ...]
    arrived_us: int
    most_together: int = 0
    hidden: EncodedHidden | None = None
    num_resumed: int = 0
    num_held: int = 0
    held: bytes = b""

    @property
    def to_compute(self) -> Span:
        """The rows that are not held."""
        span, num_held = self.span, self.num_held
        if not num_held:
            return span
        hidden = None if span.hidden is None else span.hidden[num_held:]
        return replace(span, start=span.start + num_held, tokens=span.tokens[num_held:], hidden=hidden)

    def decoded(self) -> QueuedWindow:
        """The same, with its hidden states in the span."""
        if self.hidden is None:
            return self
        return replace(self, span=replace(self.span, hidden=self.hidden.decode()), hidden=None)


@dataclass(frozen=True)
class SlotAssigned:
    """A slot that a session takes over.

    Attributes:
        session: Its id.
        source: The slot that holds the session's first positions, perhaps its own.
        slot: The slot that is to hold them, and nothing else.
        cached: Ids of the tokens there, which `source` holds, or will once the windows that came before are
            computed.
        num_resumed: How many positions `slot` itself may hold from before a repair.
    """

    session: int
    source: int
    slot: int
    cached: tuple[int, ...]
    num_resumed: int = 0

    def follows(self, window: QueuedWindow) -> bool:
        """Whether a window that came before brings something that is cached: here, or at a stage behind."""
        span = window.span
        return span.slot == self.source != self.slot and span.start < len(self.cached)


@dataclass(frozen=True)
class QueueBarrier:
    """Nothing to change: tells that all that came before is computed or dropped.

    Attributes:
        on_passed: Called in the thread that computes.
    """

    on_passed: Callable[[], object]


Change = SlotAssigned | QueueBarrier


@dataclass(frozen=True)
class _Pending:
    """A change that waits, and the windows that came for its session since."""

    change: Change
    windows: deque[QueuedWindow] = field(default_factory=deque)


@dataclass(frozen=True)
class Work:
    """What the thread does next: first the changes of slots, in order, then `windows` as one batch."""

    changes: tuple[Change, ...]
    windows: tuple[QueuedWindow, ...]


class WindowScheduler:
    """Windows of different sessions share a batch while their rows fit, first come, first served.

    Where slots have caches of their own only neighbours share one.

    Two windows of one session never share a batch: the second may trim what the first computes. Nor does a
    chunk of a prompt share one with others: it takes turns with all that wait after the chunk before. So a
    token of one session waits for at most one chunk of another, however many of them are queued. Of several
    chunks the shortest goes first, so that a short prompt does not wait for long ones; but the one that has
    waited longest is passed over a few times only.

    Changes of slots keep their order. A session that begins with what another slot holds waits until the
    windows that bring it are taken, if they came before.

    Args:
        max_rows: Rows of one batch.
        is_live: Whether a window of (session, epoch) is still wanted; asked when it is taken.
        takes_runs: Whether only slots that follow one another, with equally many rows each, gain by sharing a
            batch: others would be computed one after the other, and wait for one another.
    """

    def __init__(
        self, max_rows: int, is_live: Callable[[int, int], bool], *, takes_runs: bool = False
    ) -> None:
        self._max_rows = max_rows
        self._is_live = is_live
        self._takes_runs = takes_runs
        # Everything comes by this queue: unlike a condition variable it wakes the taker without Python on
        # either side, and what was taken from it is the taker's alone.
        self._arrivals: queue.SimpleQueue[QueuedWindow | Change | None] = queue.SimpleQueue()
        self._waiting: deque[QueuedWindow] = deque()
        self._changes: list[Change] = []
        self._pending: deque[_Pending] = deque()
        # Windows of all of these: other threads ask for the length, and must not walk what the taker changes.
        self._num_pending_windows = 0
        # Windows that are still to be taken before the next chunk.
        self._num_before_chunk: int | None = None
        # Chunks taken since the one that waits longest came to be that.
        self._num_passed_over = 0
        self._is_closed = False
        self.num_dropped = 0

    def __len__(self) -> int:
        """Number of windows that wait, for any thread: one that moves at this moment may be missed."""
        return len(self._waiting) + self._num_pending_windows + self._arrivals.qsize()

    def put(self, window: QueuedWindow) -> None:
        """Append a window."""
        self._arrivals.put(window)

    def change(self, change: Change) -> None:
        """Have a slot changed before the next batch."""
        self._arrivals.put(change)

    def close(self) -> None:
        """Wake the taker for the last time."""
        self._arrivals.put(None)

    def take(self) -> Work | None:
        """Wait for work; None once the queue is closed. For one thread."""
        while True:
            while not self._arrivals.empty():
                self._note(self._arrivals.get())
            if self._is_closed:
                return None
            self._drop_void()
            self._release_changes()
            windows = self._take_batch()
            if windows or self._changes:
                changes, self._changes = tuple(self._changes), []
                return Work(changes, windows)
            self._note(self._arrivals.get())

    def _note(self, arrival: QueuedWindow | Change | None) -> None:
        if arrival is None:
            self._is_closed = True
        elif isinstance(arrival, QueuedWindow):
            windows = self._queue_of(arrival.session)
            windows.append(arrival)
            self._num_pending_windows += windows is not self._waiting
        else:
            self._pending.append(_Pending(arrival))
            self._release_changes()

    def _queue_of(self, session: int) -> deque[QueuedWindow]:
        """Where a window of the session has to wait."""
        for pending in reversed(self._pending):
            if isinstance(pending.change, SlotAssigned) and pending.change.session == session:
                return pending.windows
        return self._waiting

    def _release_changes(self) -> None:
        """Have the changes made that wait for nothing any more, up to the first that does."""
        while self._pending and not self._has_to_wait(self._pending[0].change):
            pending = self._pending.popleft()
            self._changes.append(pending.change)
            if pending.windows:
                self._num_pending_windows -= len(pending.windows)
                self._waiting += pending.windows
                # Of a session that is over by now, whose slot the next change gives to another.
                self._drop_void()

    def _has_to_wait(self, change: Change) -> bool:
        return isinstance(change, SlotAssigned) and any(map(change.follows, self._waiting))

    def _firsts(self) -> tuple[QueuedWindow, ...]:
        """The first window of each session, in the order of their arrivals."""
        firsts: dict[int, QueuedWindow] = {}
        for window in self._waiting:
            firsts.setdefault(window.session, window)
        return tuple(firsts.values())

    def _take_batch(self) -> tuple[QueuedWindow, ...]:
        firsts = self._firsts()
        chunks = [window for window in firsts if _is_chunk(window)]
        if not chunks:
            self._num_before_chunk = None
            return self._take_small()
        if self._num_before_chunk is None:
            self._num_before_chunk = sum(not _is_chunk(window) for window in firsts)
        if self._num_before_chunk > 0 and (taken := self._take_small()):
            self._num_before_chunk -= len(taken)
            return taken
        self._num_before_chunk = None
        return (self._take_chunk(chunks),)

    def _take_chunk(self, chunks: list[QueuedWindow]) -> QueuedWindow:
        """Of the first chunk of each session, in the order of their arrivals."""
        longest_waiting = chunks[0]
        chunk = longest_waiting
        if self._num_passed_over < _MOST_PASSED_OVER:
            chunk = min(chunks, key=lambda window: len(window.span.tokens))
        self._num_passed_over = 0 if chunk is longest_waiting else self._num_passed_over + 1
        self._waiting.remove(chunk)
        return chunk

    def _take_small(self) -> tuple[QueuedWindow, ...]:
        return self._take_run() if self._takes_runs else self._take_any()

    def _take_run(self) -> tuple[QueuedWindow, ...]:
        """The window that has waited longest, and its neighbours."""
        small = {window.span.slot: window for window in self._firsts() if not _is_chunk(window)}
        if not small:
            return ()
        longest_waiting = next(iter(small.values()))
        limit = min((window.most_together for window in small.values() if window.most_together), default=0)
        rows_of = {slot: len(window.span.tokens) for slot, window in small.items()}
        run = run_around(longest_waiting.span.slot, rows_of, limit or self._max_rows, self._max_rows)
        taken = tuple(small[slot] for slot in run)
        for window in taken:
            self._waiting.remove(window)
        return taken

    def _take_any(self) -> tuple[QueuedWindow, ...]:
        taken: list[QueuedWindow] = []
        waiting: deque[QueuedWindow] = deque()
        sessions: set[int] = set()
        rows_left = self._max_rows
        most_together = self._max_rows
        for window in self._waiting:
            is_next = window.session not in sessions and not _is_chunk(window)
            if is_next and window.most_together:
                most_together = min(most_together, window.most_together)
            if is_next and len(window.span.tokens) <= rows_left and len(taken) < most_together:
                rows_left -= len(window.span.tokens)
                taken.append(window)
                sessions.add(window.session)
            else:
                waiting.append(window)
                # Whatever this session sent later has to wait as well.
                sessions.add(window.session)
        self._waiting = waiting
        return tuple(taken)

    def _drop_void(self) -> None:
        live = deque(window for window in self._waiting if self._is_live(window.session, window.epoch))
        self.num_dropped += len(self._waiting) - len(live)
        self._waiting = live


def _is_chunk(window: QueuedWindow) -> bool:
    """Whether it is a part of a prompt: elsewhere every row but a committed one is verified."""
    return window.span.num_outputs < len(window.span.tokens)
