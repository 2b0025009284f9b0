"""Tuning in the background, as the coordinator takes part in it: when requests run, how drafts are judged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from mesh.coordinator.plugs import Plug, SessionPlug

if TYPE_CHECKING:
    from collections.abc import Hashable

    from mesh.coordinator.generation import Generation, InFlightWindow
    from mesh.coordinator.plugs import NewRing
    from mesh.coordinator.speculation import Speculator
    from mesh.status import MeshStatus, TuningStatus
    from spanmesh_proto import windows_pb2 as wire


class Tuning(Protocol):
    """What tunes drafters; see `mesh.serve.background_tuning.BackgroundTuning`. Never waits."""

    def came(self) -> None:
        """A request is about to begin, or can from now on: what computes stops."""

    def began(self, session: Hashable) -> None:
        """A session runs, again perhaps."""

    def ended(self, session: Hashable) -> None:
        """A session runs no more."""

    def drafted(self, proposer: str, *, is_accepted: bool) -> None:
        """The first token that a proposer drafted for a window was judged."""

    def status(self) -> TuningStatus:
        """For the status of the mesh."""


class TuningPlug(Plug):
    """Part of tuning in a coordinator.

    Args:
        tuning: What tunes.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning

    def in_ring(self, new: NewRing) -> None:
        """A ring begins: while its stages were loaded nothing was idle."""
        del new
        self._tuning.came()

    def in_session(self, generation: Generation, speculator: Speculator | None) -> SessionTuning:
        """Its part in a new session."""
        del generation, speculator
        self._tuning.came()
        return SessionTuning(self._tuning)

    def describe(self, status: MeshStatus) -> None:
        """Add where tuning stands."""
        status.tuning = self._tuning.status()


class SessionTuning(SessionPlug):
    """Part of tuning in one session.

    Args:
        tuning: What tunes.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning

    def attach(self, session: int, *, is_elsewhere: bool) -> None:
        """The session runs from now on."""
        del session, is_elsewhere
        self._tuning.began(self)

    def detach(self) -> None:
        """It runs no more."""
        self._tuning.ended(self)

    def judged(self, in_flight: InFlightWindow, verdict: wire.Verdict) -> None:
        """Tell whether the first drafted token was the model's own."""
        proposal = in_flight.window.proposal
        if proposal.tokens and verdict.tokens:
            self._tuning.drafted(proposal.proposer, is_accepted=verdict.tokens[0] == proposal.tokens[0])
