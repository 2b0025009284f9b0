"""Gates that hold messages and batches, and a clock that stands still: what `gated_ring` is made of."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spanmesh_proto import windows_pb2 as wire

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from stages.runtime.spans import Span


class StillLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still, so that no timer fires by itself."""

    now_s = 1000.0
    """What `time` says."""

    def time(self) -> float:
        return self.now_s

    @property
    def has_work(self) -> bool:
        """Whether anything is to be run now, besides whoever asks."""
        # asyncio has no other way to ask.
        due = (timer._when <= self.now_s for timer in self._scheduled[:1])  # type: ignore[attr-defined]
        return bool(self._ready) or any(due)  # type: ignore[attr-defined]


@dataclass(eq=False)
class Gate:
    """One direction of a stream."""

    name: str
    """From where to where."""
    held: deque[tuple[Any, Callable[[], Awaitable[None]]]] = field(default_factory=deque)
    """Messages that wait here, and what lets each go."""
    num_passed: int = 0
    """Messages that were given to gRPC."""
    num_arrived: int = 0
    """How many of those the other side has read."""
    is_read: bool = False
    """Whether the other side waits for the next."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is on its way that the other side waits for."""
        return self.num_passed == self.num_arrived or not self.is_read


@dataclass(eq=False)
class Stream:
    """One call, of whose two ends both are in this process."""

    caller: str
    """Who called: `coordinator`, or a stage by its index."""
    forth: Gate
    """From the caller to the stage."""
    back: Gate
    """From the stage to the caller."""
    has_begun: bool = False
    """Whether the stage's handler runs, or did."""
    is_served: bool = False
    """Whether it runs."""
    is_over: bool = False
    """Whether the caller has seen the end, or does not want to."""
    end: Callable[[], object] = lambda: None
    """Ends it at the caller's side, without another word."""

    @property
    def gates(self) -> tuple[Gate, Gate]:
        return self.forth, self.back

    @property
    def is_quiet(self) -> bool:
        """Whether neither side waits for what the other has sent, begun or ended already."""
        if self.is_over:
            return not self.is_served
        if not self.is_served:
            # Not begun: its beginning is on its way. Ended: its end is, to whoever reads.
            return self.has_begun and not self.back.is_read
        return self.forth.is_quiet and self.back.is_quiet


class BatchGate:
    """Holds a stage's thread before each batch. Also knows whether that thread waits for work.

    Args:
        on_quiet: Called in that thread whenever it begins to wait.
    """

    def __init__(self, on_quiet: Callable[[], object]) -> None:
        self.waiting: tuple[Span, ...] = ()
        self.is_idle = False
        self._on_quiet = on_quiet
        self._condition = threading.Condition()
        self._num_let = 0
        self._is_open = False

    def hold(self, spans: Sequence[Span]) -> None:
        """In the stage's thread, before a batch."""
        with self._condition:
            if self._is_open:
                return
            self.waiting = tuple(spans)
            self._on_quiet()
            self._condition.wait_for(lambda: self._num_let or self._is_open)
            self._num_let = max(0, self._num_let - 1)

    def let_one(self) -> None:
        """Have the batch that waits computed."""
        with self._condition:
            self.waiting = ()
            self._num_let += 1
            self._condition.notify()

    def open(self) -> None:
        """Hold nothing any more."""
        with self._condition:
            self._is_open = True
            self.waiting = ()
            self._condition.notify()

    @property
    def is_quiet(self) -> bool:
        """Whether the thread waits, here or for work."""
        return self.is_idle or bool(self.waiting)


class WatchedArrivals:
    """What `queue.SimpleQueue` is for a `WindowScheduler`, but knows whether its taker waits.

    Args:
        gate: Told.
    """

    def __init__(self, gate: BatchGate) -> None:
        self._gate = gate
        self._items: deque[Any] = deque()
        self._condition = threading.Condition()

    def put(self, item: object) -> None:
        with self._condition:
            self._items.append(item)
            self._gate.is_idle = False
            self._condition.notify()

    def get(self) -> Any:
        with self._condition:
            if not self._items:
                self._gate.is_idle = True
                self._gate._on_quiet()
                self._condition.wait_for(lambda: self._items)
            return self._items.popleft()

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


@dataclass(frozen=True)
class Choice:
    """Something that can happen next."""

    name: Callable[[], str]
    """Says what it is, for whoever reads a counterexample."""
    happen: Callable[[], Awaitable[None]]
    """Makes it happen; wait until all is quiet then."""


def described(message: Any) -> str:
    """A message in a few words."""
    if isinstance(message, str):
        return message
    if isinstance(message, wire.VerdictBundle):
        return "; ".join(
            f"verdict on {one.session}/{one.epoch}/{one.window_id}: {list(one.tokens)}"
            for one in message.verdicts
        )
    if isinstance(message, wire.SlotRows):
        return f"slot {message.slot} of {message.session} from {message.start}: {len(message.tokens)} tokens"
    kind = message.WhichOneof("kind")
    one = getattr(message, kind)
    if kind == "windows":
        return "; ".join(
            f"window {each.session}/{each.epoch}/{each.id} at {each.start}: {len(each.tokens)} tokens"
            for each in one.windows
        )
    if kind == "open":
        resumed = f", resumes {one.num_resumed} of {one.resumed_session}" if one.resumed_session else ""
        cached = f"{len(one.cached_tokens)} cached in {one.source_slot}"
        return f"Open {one.session} in slot {one.slot}, {cached}{resumed}"
    if kind in {"close", "cancel"}:
        return f"{kind.title()} {one.session}"
    return f"{kind} {str(one).strip()[:100]}"


def next_message(gate: Gate) -> str:
    return f"{gate.name}: {described(gate.held[0][0])}"


def next_batch(name: str, gate: BatchGate) -> str:
    spans = (f"slot {span.slot} [{span.start}, {span.start + len(span.tokens)})" for span in gate.waiting)
    return f"{name} computes {', '.join(spans)}"
