"""Features for drafters that read hidden states: asked for with windows, passed on once they count."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from mesh.coordinator.feature_store import FeatureStore
from mesh.coordinator.feature_streams import FeatureStreams
from mesh.coordinator.plugs import Plug, SessionPlug
from mesh.engine import FeatureCounts
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.coordinator.feature_store import FeatureNeeds, FeatureRows
    from mesh.coordinator.feature_streams import ReceivedFeatures
    from mesh.coordinator.generation import Generation, WindowPlan
    from mesh.coordinator.plugs import NewRing
    from mesh.coordinator.speculation import Speculator
    from mesh.coordinator.window_outcomes import InFlightWindow
    from mesh.engine import SpeculationReport
    from mesh.status import MeshStatus
    from spanmesh_proto import windows_pb2 as wire

# Latest positions of a replay that stages compute though they hold them, if their features are missing.
_MOST_COMPUTED_AGAIN: Final = 64


class FeaturePlug(Plug):
    """Features of all sessions.

    Args:
        needs: What the drafter reads.

    Attributes:
        needs: What the drafter reads.
        streams: Connections of the latest ring; None before the first.
        sessions: Sessions that may ask for features, by id.
    """

    def __init__(self, needs: FeatureNeeds) -> None:
        self.needs = needs
        self.streams: FeatureStreams | None = None
        self.sessions: dict[int, SessionFeatures] = {}

    def in_ring(self, new: NewRing) -> FeatureStreams:
        """Connections to the stages of a new ring whose hidden states are read."""
        self.streams = FeatureStreams(
            new.stages,
            new.terms.hello(),
            new.terms.mesh_key,
            self.needs,
            on_features=self.take,
            identity=new.identity,
        )
        return self.streams

    def in_session(self, generation: Generation, speculator: Speculator | None) -> SessionFeatures | None:
        """Features of a new session; None if it proposes nothing."""
        return None if speculator is None else SessionFeatures(self, generation, speculator)

    def describe(self, status: MeshStatus) -> None:
        """Add why features do not come, if they do not."""
        counts = None if status.speculation is None else status.speculation.features
        if counts is not None and self.streams is not None:
            counts.off = self.streams.why_off

    def take(self, features: ReceivedFeatures) -> None:
        """Pass features on to their session.

        Raises:
            ValueError: If they were not asked for.
        """
        session = self.sessions.get(features.session)
        if session is not None:
            session.take(features)


class SessionFeatures(SessionPlug):
    """Features of one session.

    Args:
        plug: Features of all sessions.
        generation: State machine of the request.
        speculator: Reader of the features.
    """

    def __init__(self, plug: FeaturePlug, generation: Generation, speculator: Speculator) -> None:
        self._plug = plug
        self._generation = generation
        self._speculator = speculator
        self._store = FeatureStore(plug.needs.layers, plug.needs.n_embd)
        self._num_bytes = 0
        self._id: int | None = None
        # First position whose features are wanted.
        self._begin = 0

    def attach(self, session: int, *, is_elsewhere: bool) -> None:
        """Ask for features from the first position on that all stages compute, and those behind."""
        self.detach()
        self._id = session
        self._plug.sessions[session] = self
        self._begin = 0
        if is_elsewhere and self._speculator.wants_features:
            self._begin = max(self._store.num_known, self._generation.position - _MOST_COMPUTED_AGAIN)
            self._generation.resume_before(self._begin)

    def detach(self) -> None:
        """Take no more features."""
        if self._id is not None:
            self._plug.sessions.pop(self._id, None)

    def sending(self, window_id: int, plan: WindowPlan, message: wire.Window) -> None:
        """Ask for the features of a window's rows, if they are of use."""
        if self._wants(plan):
            self._store.sent(window_id, plan.start, len(plan.tokens))
            message.wants_features = True
            message.features_may_wait = self._speculator.features_may_wait

    def judged(self, in_flight: InFlightWindow, verdict: wire.Verdict) -> None:
        """Release the features of the window's rows that count, those of the verdict among them."""
        streams = self._plug.streams
        if streams is None:
            return
        if verdict.HasField("features"):
            with contextlib.suppress(MeshError, ValueError):  # wrong features cost acceptance only
                self.take(streams.decoded(verdict.features))
        window = in_flight.window
        num_valid = len(window.tokens) - window.num_verified + len(verdict.tokens)
        self._pass_on(self._store.judged(in_flight.id, num_valid))

    def voided(self) -> None:
        """Drop features of windows without a verdict."""
        self._store.void()

    def reported(self, report: SpeculationReport) -> SpeculationReport:
        """The report with the features so far."""
        store = self._store
        return replace(report, features=FeatureCounts(store.num_wanted, store.num_received, self._num_bytes))

    def take(self, features: ReceivedFeatures) -> None:
        """Take features of a window's rows, which may come before its verdict or after.

        Raises:
            ValueError: If they were not asked for.
        """
        self._num_bytes += features.num_bytes
        self._pass_on(self._store.add(features.window_id, features.start, features.rows))

    def _pass_on(self, runs: Sequence[FeatureRows]) -> None:
        for run in runs:
            self._speculator.take_features(run.start, run.rows)

    def _wants(self, plan: WindowPlan) -> bool:
        """Whether features of the window's rows are of use: of a long prompt only its end is read."""
        streams = self._plug.streams
        if streams is None or streams.why_off is not None:
            return False
        first = max(self._begin, self._generation.position - self._plug.needs.context)
        is_near = plan.start >= self._begin and plan.start + len(plan.tokens) > first
        return is_near and self._speculator.wants_features
