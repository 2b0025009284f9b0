"""Seams of a coordinator: how a feature takes part in its rings and sessions without being named there.

A feature is a `Plug`, named in `mesh.coordinator.composition` alone. All methods run in the event loop,
between a verdict and the next window, and never wait, but for coroutines. What a plug does not define does
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh.coordinator.generation import Generation, InFlightWindow, Rollback, WindowPlan
    from mesh.coordinator.options import CoordinatorOptions
    from mesh.coordinator.prefix_cache import PrefixMatch
    from mesh.coordinator.ring import Ring, RingTerms, StageAddress
    from mesh.coordinator.speculation import Speculator
    from mesh.engine import GenerationRequest, SpeculationReport
    from mesh.status import MeshStatus
    from spanmesh_proto import windows_pb2 as wire
    from spanmesh_proto.errors import MeshError
    from stages.transport.channels import Identity


@dataclass(frozen=True)
class NewRing:
    """A ring that is about to be opened."""

    ring: Ring
    """Streams to its stages."""
    stages: Sequence[StageAddress]
    """Addresses of the stages, in pipeline order."""
    terms: RingTerms
    """Settings shared with the stages."""
    identity: Identity | None
    """TLS identity of the coordinator; None if all stages are in its process."""
    options: CoordinatorOptions
    """Limits of sessions."""
    is_first: bool
    """Whether the stages' slots hold nothing of another ring."""
    clock_ms: Callable[[], float]
    """Monotonic clock, milliseconds."""


class SessionPlug:
    """Part of a plug in one session."""

    def attach(self, session: int, *, is_elsewhere: bool) -> None:
        """Take part from now on: at the session's first window, and again at each replay.

        Args:
            session: Its id from now on.
            is_elsewhere: Whether it is replayed in another ring than before.
        """

    def detach(self) -> None:
        """Take part no more."""

    def listen(self, on_ready: Callable[[MeshError | None], None]) -> None:
        """Take what to call once a chunk that had to wait may leave, or with the reason why it never can."""

    def opening(self, message: wire.Open) -> None:
        """Add to the message that opens the session at every stage."""

    def awaits(self, start: int) -> bool:
        """Whether the chunk of the prompt at a row has to wait; see `listen`."""
        del start
        return False

    @property
    def num_named(self) -> int | None:
        """Number of the prompt's first rows that are what their ids say; None for all."""
        return None

    def sending(self, window_id: int, plan: WindowPlan, message: wire.Window) -> None:
        """Add to a window that is about to leave what stages are to do beside it."""

    def judged(self, in_flight: InFlightWindow, verdict: wire.Verdict) -> None:
        """Read a verdict, whose tokens are committed."""

    def voided(self) -> None:
        """Forget windows without a verdict: they are void."""

    def reported(self, report: SpeculationReport) -> SpeculationReport:
        """The report with the counts of this part."""
        return report


class RingPlug:
    """Part of a plug in one ring."""

    def open(self) -> None:
        """Begin to connect, before the ring does."""

    async def settled(self) -> None:
        """Wait until it is of use to sessions, but not long: they are replayed next."""

    def suspend(self) -> None:
        """End what sessions wait for: the ring is lost, or left."""

    async def close(self) -> None:
        """End all streams."""

    def received(self, bundle: wire.VerdictBundle) -> None:
        """Read a message from the tail, before its verdicts; must not raise, since it serves all sessions."""

    def replied(self, stage: int, reply: wire.ControlReply) -> None:
        """Read a reply of a stage that is none of the ring's own.

        Args:
            stage: Index of the stage.
            reply: The reply.
        """


class Plug:
    """A feature of one coordinator."""

    def in_ring(self, new: NewRing) -> RingPlug | None:
        """Its part in a ring that takes the place of the one before; None if it has none there."""

    def rollback(self, match: PrefixMatch) -> Rollback | None:
        """How the stages of a new session go back, which begins with this prefix; None for any position."""

    def in_session(self, generation: Generation, speculator: Speculator | None) -> SessionPlug | None:
        """Its part in a new session; None if it has none there."""

    async def lengthened(
        self,
        match: PrefixMatch,
        request: GenerationRequest,  # noqa: ARG002 - for plugs
    ) -> PrefixMatch | None:
        """The cached prefix of a request that is about to begin, made longer.

        Returns:
            The same object if there is no longer one; None if finding that out took time, in which slots may
            have changed.
        """
        return match

    def prefilled(self, num_positions: int, elapsed_ms: float) -> None:
        """Learn how long stages took to compute so many positions of a prompt."""

    def kept(
        self, request: GenerationRequest, computed: Sequence[int], return_points: Sequence[int]
    ) -> wire.Keep | None:
        """What stages are to keep of the slot of a session that has ended.

        Args:
            request: The session's request.
            computed: Token ids whose positions every stage holds.
            return_points: See `Generation.return_points`.
        """

    def describe(self, status: MeshStatus) -> None:
        """Add what it says of itself to the coordinator's part of the status."""
