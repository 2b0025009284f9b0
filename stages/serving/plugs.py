"""Seams of a stage: how a feature takes part in its sessions, batches and slots without being named there.

A feature is a `StagePlug` or a `SlotListener`, named by the stage's server alone. What it does not define
does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence

    from spanmesh_proto import windows_pb2 as wire
    from stages.sampling.session_spec import SessionSpec
    from stages.serving.prefix import Prefix
    from stages.serving.scheduler import QueuedWindow

    Bundle = wire.WindowBundle | wire.VerdictBundle


class StageThreads(Protocol):
    """The two threads of a stage, for plugs."""

    @property
    def stage_index(self) -> int:
        """The stage's place in its ring."""

    def in_worker(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run a function in the computing thread, between two batches, behind all that is queued."""

    def from_worker(self, handler: Callable[[Any], None]) -> Callable[[Any], None]:
        """A function for the computing thread that runs `handler` in the event loop, in order."""


class SlotListener:
    """A feature's part in the slots of a stage. For the computing thread."""

    def began(self, slot: int, num_positions: int) -> None:
        """A session has begun in a slot, with so many positions."""

    def computed(self, slot: int, num_committed: int) -> None:
        """Rows of a slot were computed.

        Args:
            slot: The slot.
            num_committed: Number of its tokens that are no proposals; 0 if that is not known.
        """

    def changed(self, slot: int, start: int) -> None:
        """A slot holds other tokens than before from this position on, or none."""


class StagePlug:
    """A feature's part in the sessions and batches of a stage.

    All up to `arriving` run in the event loop, all behind it in the computing thread.
    """

    def attach(self, threads: StageThreads) -> None:
        """Take part from now on; before the first window."""

    def opened(self, spec: SessionSpec) -> Prefix | None:
        """Rows of the cached prefix that a session begins with; None if they have to be in a slot."""

    def closed(self, slot: int, message: wire.Close) -> None:
        """A session has ended, before another one changes its slot."""

    def closed_all(self) -> None:
        """All sessions have ended: their coordinator is gone."""

    def count(self, stats: wire.StageStats) -> None:
        """Add its own counters."""

    async def stop(self) -> None:
        """End, with the stage."""

    def arriving(self, bundle: wire.WindowBundle) -> Mapping[tuple[int, int], tuple[Any, ...]]:
        """What came with windows and is to go on with them, by the ids of session and window."""
        del bundle
        return {}

    def taps(self, windows: Sequence[QueuedWindow]) -> bool:
        """Whether hidden states inside a batch are to be kept while it is computed."""
        del windows
        return False

    def verified(self, window: QueuedWindow, verdict: wire.Verdict) -> None:
        """Add to a verdict of the tail."""

    def passing(self, windows: Sequence[QueuedWindow], bundle: Bundle) -> None:
        """Add what came with windows to the message that they, or their verdicts, leave in."""

    def computed(self, windows: Sequence[QueuedWindow], bundle: Bundle) -> None:
        """Add what a batch has given to the message that its windows leave in, behind `passing`."""

    def handed_on(self) -> None:
        """Send what did not go with the windows of the latest batch, which have left."""
