"""Features for drafters and recordings, which read hidden states: streams from the stages, and the plug.

Features of a few rows come with verdicts; more come on connections of their own, so that no window or verdict
waits behind them. The loss of a connection ends drafting from features, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

import grpc
import numpy as np
import structlog

from mesh.coordinator.feature_store import FeatureStore
from mesh.coordinator.plugs import Plug, RingPlug, SessionPlug
from mesh.engine import FeatureCounts
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto import windows_pb2_grpc as rpc
from spanmesh_proto.errors import MeshError, ProtocolError, StageFailed
from stages.transport.channels import key_metadata, open_channel
from stages.transport.hidden_codec import TO_WIRE, decode
from stages.transport.links import explain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from mesh.coordinator.feature_store import FeatureNeeds, FeatureRows
    from mesh.coordinator.generation import Generation, InFlightWindow, WindowPlan
    from mesh.coordinator.plugs import NewRing
    from mesh.coordinator.ring import StageAddress
    from mesh.coordinator.speculation import Speculator
    from mesh.engine import SpeculationReport
    from mesh.status import MeshStatus
    from mesh.tuning.recorder import RecordedAnswer, Recorder
    from stages.transport.channels import Identity

# Hidden states beyond this are no features that any drafter was trained on.
_LARGEST_VALUE: Final = 1e6
_RETRY_S: Final = 5.0
_CONNECT_PATIENCE_S: Final = 0.3
log = structlog.get_logger()
# Latest positions of a replay that stages compute though they hold them, if their features are missing.
_MOST_COMPUTED_AGAIN: Final = 64
# The last features of an answer come behind its last verdict, once the stages know that it is over; they may
# be far, and their links slow.
_LATE_S: Final = 2.0
# Rows that are sent together: for a drafter that rests, and may read again soon; for a recording.
_DRAFTER_ROWS: Final = 8
_RECORDED_ROWS: Final = 32


class RowReader(Protocol):
    """Reader of one session's features: its speculator, or the record of its answer."""

    @property
    def wants_features(self) -> bool:
        """Whether features of windows are of use now."""

    @property
    def features_may_wait(self) -> bool:
        """Whether those of several windows may share a message."""

    def take_features(self, start: int, rows: NDArray[np.float32]) -> None:
        """Take features of committed positions.

        Args:
            start: Position of the first row.
            rows: float32 (rows, layers × n_embd).
        """


@dataclass(frozen=True)
class ReceivedFeatures:
    """Features of consecutive rows of a window, from one stage."""

    session: int
    """Id of the session."""
    window_id: int
    """Id of the window within it."""
    start: int
    """Position of the first row."""
    rows: tuple[tuple[int, NDArray[np.float32]], ...]
    """Layer and rows, float32 (rows, n_embd), for each layer of the stage."""
    num_bytes: int
    """Size of the message."""
    window_rows: tuple[int, ...] = ()
    """Rows of each window, if they are of several with consecutive ids, of which `window_id` is the first."""

    def windows(self) -> Iterator[tuple[int, int, list[tuple[int, NDArray[np.float32]]]]]:
        """Id of each window, position of its first row here, and its rows as in `rows`."""
        if not self.window_rows:
            yield self.window_id, self.start, list(self.rows)
        stop = 0
        for window_id, num_rows in enumerate(self.window_rows, self.window_id):
            first, stop = stop, stop + num_rows
            yield window_id, self.start + first, [(layer, rows[first:stop]) for layer, rows in self.rows]


class FeatureStreams(RingPlug):
    """Features of all stages of one ring. For the event loop; retries lost connections.

    Args:
        stages: Addresses of the stages, in pipeline order.
        hello: First message, with the protocol version.
        mesh_key: Key shared by all stages and the coordinator.
        needs: What is read.
        on_features: Called with features as they arrive.
        on_left: Called when none are expected any more.
        identity: TLS identity of this process; None if both ends are in one process.

    Attributes:
        why_off: Why not all features come; None while they do.
    """

    def __init__(
        self,
        stages: Sequence[StageAddress],
        hello: wire.Hello,
        mesh_key: str,
        needs: FeatureNeeds,
        *,
        on_features: Callable[[ReceivedFeatures], None],
        on_left: Callable[[], None] = lambda: None,
        identity: Identity | None = None,
    ) -> None:
        self._stages = tuple(stage for stage in stages if _holds_any(stage, needs))
        self._addresses = tuple(stage.address for stage in stages)
        self._hello = hello
        self._mesh_key = mesh_key
        self._needs = needs
        self._on_features = on_features
        self._on_left = on_left
        self._identity = identity
        self._given: dict[str, tuple[int, ...]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_settled = asyncio.Event()
        self.why_off: str | None = "stages are not connected yet"

    def open(self) -> None:
        """Begin to connect; features come once every stage has answered."""
        if not self._stages:
            self._is_settled.set()
        self._tasks = [asyncio.create_task(self._run(stage)) for stage in self._stages]

    async def settled(self) -> None:
        """Wait until all streams are open or one has failed, but not long.

        Sessions that are replayed next would lose the features of their latest positions, and with them what
        the drafter has read before.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CONNECT_PATIENCE_S):
                await self._is_settled.wait()

    def suspend(self) -> None:
        """Expect no more: what is on its way will not come."""
        self.why_off = "the ring is lost, or was left"
        self._on_left()

    async def close(self) -> None:
        """End all streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def received(self, bundle: wire.VerdictBundle) -> None:
        """Pass on the features that came with verdicts."""
        for features in bundle.features:
            try:
                self._on_features(self.decoded(features))
            except (MeshError, ValueError) as error:
                # Features that are wrong cost acceptance, nothing else.
                log.debug("features_refused", session=features.session, reason=str(error))
            except Exception:
                # They come with verdicts, whose stream serves all sessions.
                log.exception("features_failed", session=features.session)

    def decoded(self, features: wire.Features) -> ReceivedFeatures:
        """Features that came with verdicts.

        Raises:
            ProtocolError: See `decoded`; or if they are of no stage, or of one that is not connected.
        """
        if features.stage >= len(self._addresses):
            raise ProtocolError(
                f"features of stage {features.stage}; there are {len(self._addresses)} stages"
            )
        return decoded(features, self._given.get(self._addresses[features.stage], ()), self._needs)

    async def _run(self, stage: StageAddress) -> None:
        while True:
            try:
                await self._read(stage)
                reason: MeshError = StageFailed(f"{stage.address} ended the stream of features")
            except grpc.aio.AioRpcError as error:
                reason = explain(error, stage.address)
            except (MeshError, ValueError) as error:
                reason = error if isinstance(error, MeshError) else ProtocolError(str(error))
            except Exception as error:
                log.exception("features_failed", host=stage.host)
                reason = StageFailed(f"the coordinator failed on features of {stage.address}: {error!r}")
            self._given.pop(stage.address, None)
            self.why_off = reason.message
            self._is_settled.set()
            log.warning("features_lost", host=stage.host, reason=reason.message)
            if isinstance(reason, ProtocolError):
                # The stage would send the same again.
                return
            await asyncio.sleep(_RETRY_S)

    async def _read(self, stage: StageAddress) -> None:
        channel = open_channel(stage.address, stage.host, self._identity)
        try:
            request = wire.FeatureRequest(
                hello=self._hello,
                layers=sorted(set(self._needs.layers)),
                type=TO_WIRE[self._needs.hidden_type],
            )
            call = rpc.StageStub(channel).Features(request, metadata=key_metadata(self._mesh_key))
            async for bundle in call:
                if stage.address not in self._given:
                    self._connected(stage, tuple(bundle.layers))
                for features in bundle.features:
                    self._on_features(decoded(features, self._given[stage.address], self._needs))
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await channel.close(None)

    def _connected(self, stage: StageAddress, layers: tuple[int, ...]) -> None:
        self._given[stage.address] = layers
        if len(self._given) < len(self._stages):
            return
        self._is_settled.set()
        given = {layer for some in self._given.values() for layer in some}
        missing = [layer for layer in self._needs.layers if layer not in given]
        self.why_off = None
        if missing:
            self.why_off = f"no stage gives the hidden states after layer {missing[0]}"
            log.warning("features_missing", layers=missing)


class FeaturePlug(Plug):
    """Features of all sessions.

    Args:
        needs: What the drafter reads, and what is recorded.
        recorder: Recorder of answers; None if none are recorded.

    Attributes:
        needs: As given.
        streams: Connections of the latest ring; None before the first.
        sessions: Sessions that may ask for features, by id.
        num_late: Rows that came behind the end of their answer, whose counts were reported by then.
    """

    def __init__(self, needs: FeatureNeeds, recorder: Recorder | None = None) -> None:
        self.needs = needs
        self._recorder = recorder
        self.streams: FeatureStreams | None = None
        self.sessions: dict[int, SessionFeatures] = {}
        self.num_late = 0

    def in_ring(self, new: NewRing) -> FeatureStreams:
        """Connections to the stages of a new ring whose hidden states are read."""
        self.streams = FeatureStreams(
            new.stages,
            new.terms.hello(),
            new.terms.mesh_key,
            self.needs,
            on_features=self.take,
            on_left=self._stop_waiting,
            identity=new.identity,
        )
        return self.streams

    def in_session(self, generation: Generation, speculator: Speculator | None) -> SessionFeatures | None:
        """Features of a new session; None if it proposes nothing, and is not recorded."""
        answer = None if self._recorder is None else self._recorder.begin(generation.request)
        if speculator is None and answer is None:
            return None
        return SessionFeatures(self, generation, speculator, answer)

    def describe(self, status: MeshStatus) -> None:
        """Add what is recorded, and why features do not come, if they do not."""
        why_off = None if self.streams is None else self.streams.why_off
        counts = None if status.speculation is None else status.speculation.features
        if counts is not None:
            counts.off = why_off
            counts.received += self.num_late
            counts.missing -= self.num_late
        if self._recorder is not None:
            status.recording = self._recorder.status()
            status.recording.off = status.recording.off or why_off

    def take(self, features: ReceivedFeatures) -> None:
        """Pass features on to their session.

        Raises:
            ValueError: If they were not asked for.
        """
        session = self.sessions.get(features.session)
        if session is not None:
            session.take(features)

    def _stop_waiting(self) -> None:
        for session in tuple(self.sessions.values()):
            session.stop_waiting()


class SessionFeatures(SessionPlug):
    """Features of one session.

    Args:
        plug: Features of all sessions.
        generation: State machine of the request.
        speculator: Reader of the features, if there is one.
        answer: Record of the answer, if there is one.
    """

    def __init__(
        self,
        plug: FeaturePlug,
        generation: Generation,
        speculator: Speculator | None,
        answer: RecordedAnswer | None = None,
    ) -> None:
        self._plug = plug
        self._generation = generation
        self._speculator = speculator
        self._answer = answer
        # Each with the number of a prompt's last positions that it reads, and of rows that may wait for more.
        self._readers: list[tuple[RowReader, int, int]] = []
        if speculator is not None:
            self._readers.append((speculator, plug.needs.context, _DRAFTER_ROWS))
        if answer is not None:
            self._readers.append((answer, answer.context, _RECORDED_ROWS))
        self._store = FeatureStore(plug.needs.layers, plug.needs.n_embd)
        self._num_bytes = 0
        self._id: int | None = None
        # First position whose features are wanted.
        self._begin = 0
        self._is_over = False

    def attach(self, session: int, *, is_elsewhere: bool) -> None:
        """Ask for features from the first position on that all stages compute, and those behind."""
        self._leave()
        self._id = session
        self._plug.sessions[session] = self
        self._begin = 0
        # A record alone is no reason to compute anything again.
        if is_elsewhere and self._speculator is not None and self._speculator.wants_features:
            self._begin = max(self._store.num_known, self._generation.position - _MOST_COMPUTED_AGAIN)
            self._generation.resume_before(self._begin)

    def detach(self) -> None:
        """Take no more features; what is on its way to a record is waited for a little."""
        self._is_over = True
        if self._answer is None or self._is_complete or self._why_off is not None:
            self._end()
        else:
            asyncio.get_running_loop().call_later(_LATE_S, self._end)

    def stop_waiting(self) -> None:
        """End the record of an answer that is over: what is on its way will not come."""
        if self._is_over:
            self._end()

    def sending(self, window_id: int, plan: WindowPlan, message: wire.Window) -> None:
        """Ask for the features of a window's rows, if they are of use."""
        if self._why_off is not None or plan.start < self._begin:
            return
        together: int | None = None
        for reader, context, num_rows in self._readers:
            if reader.wants_features and self._is_near(plan, context):
                own = num_rows if reader.features_may_wait else 0
                together = own if together is None else min(own, together)
        if together is not None:
            self._store.sent(window_id, plan.start, len(plan.tokens))
            message.wants_features = True
            message.features_together = together

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
        num_before = self._store.num_received
        for window_id, start, rows in features.windows():
            self._pass_on(self._store.add(window_id, start, rows))
        if self._is_over:
            self._plug.num_late += self._store.num_received - num_before
            if self._is_complete:
                self._end()

    def _pass_on(self, runs: Sequence[FeatureRows]) -> None:
        if not runs:
            return
        # A drafter that rests has no use for what is recorded meanwhile.
        readers = [reader for reader, *_ in self._readers if reader.wants_features]
        for run in runs:
            for reader in readers:
                reader.take_features(run.start, run.rows)

    def _is_near(self, plan: WindowPlan, context: int) -> bool:
        """Whether features of the window's rows are of use: of a long prompt only its end is read."""
        return plan.stop > max(self._begin, self._generation.position - context)

    @property
    def _why_off(self) -> str | None:
        """Why features do not come; None while they do."""
        streams = self._plug.streams
        return "there is no ring" if streams is None else streams.why_off

    @property
    def _is_complete(self) -> bool:
        """Whether all features that were asked for are there."""
        return self._store.num_received == self._store.num_wanted

    def _leave(self) -> None:
        if self._id is not None:
            self._plug.sessions.pop(self._id, None)

    def _end(self) -> None:
        self._leave()
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.end(self._generation.tokens)


def decoded(features: wire.Features, layers: Sequence[int], needs: FeatureNeeds) -> ReceivedFeatures:
    """Check and decode a message.

    Args:
        features: The message.
        layers: Layers that its stage gives.
        needs: What was asked for.

    Raises:
        ProtocolError: If it has another format, other layers or sizes, or values that no hidden state has.
    """
    if features.type != TO_WIRE[needs.hidden_type] or len(features.rows) != len(layers):
        raise ProtocolError(
            f"features of {len(features.rows)} layers in format {features.type} for {len(layers)} layers "
            f"in {needs.hidden_type}"
        )
    window_rows = tuple(features.window_rows)
    if window_rows and (0 in window_rows or sum(window_rows) != features.num_rows):
        raise ProtocolError(f"features of {features.num_rows} rows for windows of {list(window_rows)}")
    expected_bytes = features.num_rows * needs.hidden_type.row_bytes(needs.n_embd)
    rows = []
    for layer, data in zip(layers, features.rows, strict=True):
        if len(data) != expected_bytes or not data:
            raise ProtocolError(
                f"features of layer {layer} have {len(data)} bytes for {features.num_rows} rows, not "
                f"{expected_bytes}"
            )
        values = decode(data, needs.hidden_type, needs.n_embd)
        flat = values.reshape(-1)
        # The sum of squares tells at once that all are small; both comparisons fail with what is no number.
        is_small = np.dot(flat, flat) <= _LARGEST_VALUE**2
        if not is_small and not np.abs(values).max() <= _LARGEST_VALUE:
            raise ProtocolError(f"features of layer {layer} have values beyond {_LARGEST_VALUE:g}")
        rows.append((layer, values))
    return ReceivedFeatures(
        features.session, features.window_id, features.start, tuple(rows), features.ByteSize(), window_rows
    )


def _holds_any(stage: StageAddress, needs: FeatureNeeds) -> bool:
    is_tail = stage.layers.stop == needs.n_layers
    return any(
        stage.layers.start <= layer < stage.layers.stop or (is_tail and layer == needs.n_layers)
        for layer in needs.layers
    )
