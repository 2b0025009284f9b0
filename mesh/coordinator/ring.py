"""Ring: streams to all stages, and their loss."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from mesh.coordinator.heartbeat import BatchMonitor, LivenessMonitor, WindowMonitor
from mesh.coordinator.stage_streams import ControlStream, VerdictStream
from spanmesh_proto import PROTOCOL_VERSION, SOFTWARE_VERSION
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import HostUnreachable, MeshError, ProtocolError, StageFailed, from_code
from stages.transport.links import MOST_BUNDLED_WINDOWS, link_to

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh.coordinator.stage_streams import BatchTimes, ClockOffset
    from stages.grammar.automaton import TokenTexts
    from stages.layers import LayerRange
    from stages.transport.channels import Identity

log = structlog.get_logger()


@dataclass(frozen=True)
class RingLoss:
    """Loss of a ring: its reason, and the stages to examine first."""

    reason: str
    """One line for the operator."""
    suspects: tuple[int, ...]
    """Indices of stages that may be lost, in order: those whose streams ended, those that did not answer, and
    those to which the stage before lost its link. A suspect may be alive and unreachable from there only; a
    stage that is no suspect answered just before."""
    is_crash: bool = False
    """Whether a session may have caused it: a stage's own streams ended, as they do when its process ends, or
    it stands still in a batch, or windows were lost. A stage that only fell silent is frozen or disconnected.
    """
    silent: tuple[int, ...] = ()
    """Suspects that left every ping unanswered until the timeout."""


@dataclass(frozen=True)
class StageAddress:
    """Address and layers of a stage."""

    host: str
    """Name of the host."""
    address: str
    """`ip:port`."""
    layers: LayerRange
    """Layers of the stage."""
    wire: str = "f32"
    """Format of its hidden states on the wire to the next stage, for the status; unused at the tail."""


@dataclass(frozen=True)
class RingTerms:
    """Identity, term and liveness settings shared by the coordinator and the stages of one ring."""

    mesh_id: str
    """Identifier of the ring."""
    mesh_key: str = field(repr=False)
    """Key shared by all its stages and the coordinator."""
    term: int = 0
    """Term of the coordinator; stages refuse a lower one than they have seen."""
    ping_interval_s: float = 0.25
    """Interval of the pings to each stage, in seconds."""
    ping_timeout_s: float = 1.2
    """Silence after which a stage is lost, in seconds."""
    still_timeout_s: float = 1.2
    """Time without anything to do at any stage after which awaited windows are lost, in seconds."""
    num_slots: int = 1
    """Concurrent sessions."""

    def hello(self) -> wire.Hello:
        """First message of the coordinator on each of its streams."""
        return wire.Hello(
            protocol_version=PROTOCOL_VERSION,
            software_version=SOFTWARE_VERSION,
            mesh_id=self.mesh_id,
            sender="coordinator",
            term=self.term,
        )


class Ring:
    """Streams of one ring: windows into stage 0, verdicts from the tail, control to every stage.

    A stage is lost when one of its streams ends, when the stage before it loses its link to it, when it does
    not answer for too long, or when it tells that it computes nothing any more, or one batch for too long.
    If windows are lost, it is unknown at which stage: then all are to be examined.

    Args:
        stages: Addresses of the stages, in pipeline order.
        terms: Settings shared with the stages.
        on_verdict: Called with each verdict, and the times of its batch.
        on_bundle: Called with each message from the tail, before its verdicts.
        on_failure: Called with (stage index, failure of a window).
        on_lost: Called once, when the first stage is lost; `loss` then has the details.
        clock_s: Monotonic clock, seconds.
        identity: TLS identity of the coordinator; None if all stages are in its process.
        token_texts: Returns the vocabulary, sent when a session first has a grammar.
        on_reply: Called with (stage index, reply that is no answer to a ping).
        num_overtaking: See `WindowMonitor.tick`.

    Attributes:
        num_verdicts: Verdicts so far.
    """

    def __init__(
        self,
        stages: Sequence[StageAddress],
        terms: RingTerms,
        *,
        on_verdict: Callable[[wire.Verdict, BatchTimes], None],
        on_bundle: Callable[[wire.VerdictBundle], None],
        on_failure: Callable[[int, wire.Failure], None],
        on_lost: Callable[[], None],
        clock_s: Callable[[], float],
        identity: Identity | None = None,
        token_texts: Callable[[], TokenTexts] | None = None,
        on_reply: Callable[[int, wire.ControlReply], None] = lambda _index, _reply: None,
        num_overtaking: Callable[[], int | None] = lambda: None,
    ) -> None:
        hello = terms.hello()
        self._stages = tuple(stages)
        self._terms = terms
        self._token_texts = token_texts
        self._is_unmonitored = False
        self._on_verdict = on_verdict
        self._on_failure = on_failure
        self._on_lost = on_lost
        self._clock_s = clock_s
        self._reason = ""
        self._suspects: set[int] = set()
        self._silent: set[int] = set()
        self._is_crash = False
        self._liveness = LivenessMonitor(len(stages), terms.ping_interval_s, terms.ping_timeout_s)
        self._batches = BatchMonitor(len(stages), terms.ping_interval_s)
        self._windows = WindowMonitor(terms.num_slots, terms.ping_interval_s, terms.still_timeout_s)
        self._num_overtaking = num_overtaking
        self.num_verdicts = 0
        self._watch: asyncio.Task[None] | None = None
        key = terms.mesh_key
        self._link = link_to(
            stages[0].address,
            hello,
            key,
            lambda reason: self._lost(0, reason),
            host=stages[0].host,
            identity=identity,
        )
        self._verdicts = VerdictStream(
            stages[-1].address,
            hello,
            key,
            on_verdict=self._on_answer,
            on_bundle=on_bundle,
            on_lost=lambda reason: self._lost(len(stages) - 1, reason),
            host=stages[-1].host,
            identity=identity,
        )
        self._controls = [
            ControlStream(
                stage.address,
                hello,
                key,
                on_failure=lambda failure, index=index: self._failed(index, failure),  # type: ignore[misc]
                on_reply=lambda index=index: self._liveness.note_reply(index),  # type: ignore[misc]
                on_lost=lambda reason, index=index: self._lost(index, reason, is_crash=True),  # type: ignore[misc]
                clock_us=lambda: int(clock_s() * 1e6),
                host=stage.host,
                identity=identity,
                on_other=lambda reply, index=index: on_reply(index, reply),  # type: ignore[misc]
            )
            for index, stage in enumerate(stages)
        ]

    @property
    def loss(self) -> RingLoss | None:
        """Loss of the ring as far as it is known; None while it is whole."""
        if not self._suspects:
            return None
        return RingLoss(
            self._reason,
            tuple(sorted(self._suspects)),
            is_crash=self._is_crash,
            silent=tuple(sorted(self._silent)),
        )

    def require_whole(self) -> None:
        """Check that no stage is lost yet; `on_lost` was called in vain if the ring was not in use.

        Raises:
            StageFailed: With the reason of the first loss.
        """
        if self.loss is not None:
            raise StageFailed(self.loss.reason)

    async def open(self) -> None:
        """Connect to every stage and check that together they hold the whole model, in order.

        Raises:
            HostUnreachable: Naming the address that does not answer.
            ProtocolError: If a stage speaks another version or holds other layers than planned.
            StageFailed: If a stage was lost at once.
        """
        # Each connection takes several round trips: made together they take the time of one.
        controls = [asyncio.ensure_future(control.open()) for control in self._controls]
        others = [asyncio.ensure_future(self._verdicts.open()), asyncio.ensure_future(self._link.open())]
        try:
            welcomes = await asyncio.gather(*controls)
            await asyncio.gather(*others)
            self._check_all(welcomes)
            self._watch = asyncio.create_task(self._listen())
        except BaseException:
            for opening in (*controls, *others):
                opening.cancel()
            await asyncio.gather(*controls, *others, return_exceptions=True)
            await self.close()
            raise

    def open_session(self, session: wire.Open) -> None:
        """Start a session at every stage, ahead of its first window."""
        if session.grammar and self._token_texts is not None:
            self._link.send(self._token_texts().message)
            self._token_texts = None  # sent once
        self._link.send(session)

    def send(self, windows: Sequence[wire.Window]) -> None:
        """Send windows in one message: those of different sessions share a batch.

        One that brings rows, perhaps megabytes of them, goes alone.
        """
        bundle: list[wire.Window] = []
        for window in windows:
            if bundle and (window.rows or bundle[-1].rows or len(bundle) == MOST_BUNDLED_WINDOWS):
                self._link.send(wire.WindowBundle(windows=bundle))
                bundle = []
            bundle.append(window)
        if bundle:
            self._link.send(wire.WindowBundle(windows=bundle))

    def cancel(self, session: int, epoch: int) -> None:
        """Void the session's windows below `epoch`, at all stages at once."""
        for control in self._controls:
            control.cancel(session, epoch)

    def close_session(self, session: int, keep: wire.Keep | None = None) -> None:
        """End a session, at all stages at once; see `ControlStream.close_session`."""
        for control in self._controls:
            control.close_session(session, keep)

    def fetch(self, fetch: wire.Fetch) -> None:
        """Have all stages fetch a prefix, for a plug."""
        for control in self._controls:
            control.fetch(fetch)

    @property
    def latest_stats(self) -> list[wire.StageStats | None]:
        """Latest counters of every stage, in pipeline order, as far as they have come."""
        pongs = [control.latest for control in self._controls]
        return [None if pong is None else pong.stats for pong in pongs]

    async def stats(self) -> list[wire.StageStats]:
        """Counters of every stage, in pipeline order.

        Raises:
            TimeoutError: If a stage does not answer in time.
        """
        pongs = await asyncio.gather(*(control.ping() for control in self._controls))
        return [pong.stats for pong in pongs]

    @property
    def clocks(self) -> list[ClockOffset]:
        """Clock offsets of the stages, in pipeline order."""
        return [control.clock for control in self._controls]

    @property
    def num_sent_bytes(self) -> int:
        """Bytes sent to the first stage."""
        return self._link.num_sent_bytes

    @property
    def num_received_bytes(self) -> int:
        """Bytes of verdicts received from the tail."""
        return self._verdicts.num_received_bytes

    def stop_monitoring(self) -> None:
        """Stop the detection of losses, before stages leave the ring."""
        self._is_unmonitored = True
        if self._watch is not None:
            self._watch.cancel()

    async def close(self) -> None:
        """Close all streams."""
        self.stop_monitoring()
        if self._watch is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        await self._link.close()
        await self._verdicts.close()
        is_lost = self.loss is not None
        await asyncio.gather(*(control.close(is_lost=is_lost) for control in self._controls))

    async def _listen(self) -> None:
        """Ping every stage at each interval."""
        interval_s = self._terms.ping_interval_s
        try:
            while True:
                since_s = self._clock_s()
                for control in self._controls:
                    control.ask()
                await asyncio.sleep(interval_s)
                self._examine(self._clock_s() - since_s)
        except Exception as error:
            # A ring that is not watched must not be used: its next loss would be missed.
            log.exception("watch_failed")
            self.give_up(StageFailed(f"the coordinator failed to watch its stages: {error!r}"))

    def _examine(self, elapsed_s: float) -> None:
        """Look for losses after an interval."""
        for index in self._liveness.tick(elapsed_s):
            address, timeout_s = self._stages[index].address, self._terms.ping_timeout_s
            self._silent.add(index)
            self._lost(index, HostUnreachable(f"{address} has not answered for {timeout_s:g} s"))
        pongs = [control.latest for control in self._controls]
        for index, pong in enumerate(pongs):
            if pong is not None and pong.activity.has_ended:
                address = self._stages[index].address
                self._lost(index, StageFailed(f"{address} computes nothing any more"), is_crash=True)
        for index in self._batches.tick(elapsed_s, pongs):
            address = self._stages[index].address
            self._lost(index, StageFailed(f"{address} does not end a batch"), is_crash=True)
        if self._windows.tick(
            elapsed_s,
            pongs,
            num_overtaking=self._num_overtaking(),
            num_sent=self._link.num_messages,
            num_received=self._verdicts.num_bundles,
        ):
            self.give_up(StageFailed("windows were lost: sessions wait for them, and no stage has any"))

    def give_up(self, reason: MeshError) -> None:
        """Take the ring for lost, all stages alike."""
        if self._is_unmonitored or self._suspects:
            return
        log.error("ring_given_up", reason=reason.message)
        self._suspects.update(range(len(self._stages)))
        self._is_crash = True
        self._reason = reason.message
        self._on_lost()

    def _check_all(self, welcomes: Sequence[wire.Welcome]) -> None:
        for index, (stage, welcome) in enumerate(zip(self._stages, welcomes, strict=True)):
            _check(index, stage, welcome)
        self.require_whole()

    def _on_answer(self, verdict: wire.Verdict, times: BatchTimes) -> None:
        self._liveness.note_all()
        self._windows.note_verdict()
        self.num_verdicts += 1
        self._on_verdict(verdict, times)

    def _failed(self, index: int, failure: wire.Failure) -> None:
        if failure.session:
            self._on_failure(index, failure)
        else:
            # The stage has lost its link: the next stage is gone, or the network between them.
            self._lost(index + 1, from_code(failure.code, f"stage {index}: {failure.message}"))

    def _lost(self, index: int, reason: MeshError, *, is_crash: bool = False) -> None:
        if self._is_unmonitored:
            return
        is_first = not self._suspects
        if index not in self._suspects:
            log.error("stage_lost", stage=index, host=self._stages[index].host, reason=reason.message)
        self._suspects.add(index)
        self._is_crash = self._is_crash or is_crash
        if is_first:
            self._reason = reason.message
            self._on_lost()


def _check(index: int, stage: StageAddress, welcome: wire.Welcome) -> None:
    held = (welcome.stage_index, welcome.layer_start, welcome.layer_stop)
    if held != (index, stage.layers.start, stage.layers.stop):
        raise ProtocolError(
            f"stage {index} at {stage.address} holds layers [{held[1]}, {held[2]}) as stage {held[0]}, "
            f"not {stage.layers}"
        )
