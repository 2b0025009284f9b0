"""Seam of a stage: how a feature takes part in its sessions, batches and streams without being named there.

A feature is a `StagePlug`, made in `stages.serving.composition` alone. What it does not define does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from spanmesh_proto import windows_pb2 as wire
    from stages.runtime.slot_memory import Prefix
    from stages.sampling.session_spec import SessionSpec
    from stages.serving.ring_place import RingPlace
    from stages.serving.scheduler import QueuedWindow
    from stages.serving.sessions import SessionTable
    from stages.serving.slots import KvSlots

    Bundle = wire.WindowBundle | wire.VerdictBundle
    Reply = Callable[[wire.ControlReply], None]


class StageAccess(Protocol):
    """A stage, for its plugs."""

    @property
    def place(self) -> RingPlace:
        """Its place in a ring."""

    @property
    def sessions(self) -> SessionTable:
        """Sessions that are open."""

    @property
    def slots(self) -> KvSlots:
        """Slots of the stage, for functions in the computing thread."""

    @property
    def sent_row_bytes(self) -> int:
        """Current size of a row of hidden states on the wire."""

    def accept(self, term: int, caller: str) -> None:
        """Accept a coordinator's term: sessions of the former coordinator end.

        Args:
            term: The term.
            caller: Name of the coordinator, for the error.

        Raises:
            ProtocolError: If a coordinator of a higher term took over.
        """

    def tell(self, reply: wire.ControlReply) -> None:
        """Send a reply to the coordinators that are connected."""

    def answer(self, bundle: wire.VerdictBundle) -> None:
        """Send to the coordinators what comes beside verdicts, at the tail."""

    def in_worker(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run a function in the computing thread, between two batches, behind all that is queued."""

    def between_batches(self, work: Callable[[], object]) -> None:
        """As `in_worker`, without a result; nothing is done once the stage has ended."""

    def from_worker(self, handler: Callable[[Any], None]) -> Callable[[Any], None]:
        """A function for the computing thread that runs `handler` in the event loop, in order."""


class StagePlug:
    """A feature of a stage.

    All up to `arriving` run in the event loop, all behind it in the computing thread.
    """

    def attach(self, stage: StageAccess) -> None:
        """Take part from now on; before the first window."""

    def serving(self) -> None:
        """The stage serves its peers now: what takes long may begin."""

    def streams(self) -> Mapping[str, Callable[[Any], AsyncGenerator[Any, None]]]:
        """RPCs that it serves, by their names in the .proto: those of one request with a `hello`.

        Each returns the messages for a peer of the ring, or raises a `MeshError` that refuses it.
        """
        return {}

    def requested(self, request: wire.ControlRequest, reply: Reply) -> None:
        """Answer a request of a coordinator.

        Args:
            request: The `hello` of one that has connected, or a request of which the core knows nothing.
            reply: Sends a reply to that coordinator, at any time.
        """

    async def leaving(self) -> None:
        """End what changes slots beside the sessions of a ring: the stage is about to take a place in one."""

    def left(self) -> None:
        """End the streams of the ring that the stage was in."""

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

    def input_of(self, window: wire.Window) -> NDArray[np.float32] | None:
        """Rows that enter a stage in place of a window's ids; None for none.

        They enter the first stage, and later ones that use the embedding again. Asked of windows that bring
        rows, or whose ids are no tokens', see `spanmesh_proto.row_ids`. They are computed apart from other
        windows. Ids without rows fail their session alone.

        Returns:
            float32 (rows, width of the embedding's input).

        Raises:
            MeshError: If the window is invalid.
        """

    def arriving(self, bundle: wire.WindowBundle) -> Mapping[tuple[int, int], tuple[Any, ...]]:
        """What came with windows and is to go on with them, by the ids of session and window."""
        del bundle
        return {}

    def voids(self, window: QueuedWindow) -> bool:
        """Whether a window is void, so that it is neither computed nor answered."""
        del window
        return False

    def outlasts(self, window: QueuedWindow) -> bool:
        """Whether it goes on computing once a window has left, which the event loop would wait for."""
        del window
        return False

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
