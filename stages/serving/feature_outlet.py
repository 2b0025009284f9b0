"""Features of a stage: hidden states of rows, on their way and streamed to the coordinator's drafter.

Features of a few rows travel with their windows and the verdicts, others over a stream of their own.

Windows never wait for them: what a slow link cannot carry is dropped, the oldest first. While the drafter
rests, or where they are recorded only, features of several windows share a message.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Final

import structlog

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import MeshError, ProtocolError
from stages.serving.plugs import StagePlug
from stages.serving.waiting_features import WaitingFeatures
from stages.transport.hidden_codec import FROM_WIRE, TO_WIRE, HiddenType, encode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from stages.runtime.stage_runtime import StageRuntime
    from stages.serving.plugs import Bundle, StageAccess
    from stages.serving.scheduler import QueuedWindow

MOST_QUEUED_BYTES: Final = 64 << 20
# Of one message; gRPC's limit is far above.
_MOST_BUNDLED_BYTES: Final = 1 << 20
# Where so few rows are sent together, a drafter rests and may read soon: the tail's come with its verdicts.
_READ_SOON: Final = 8
log = structlog.get_logger()
# Features that travel with the windows of a batch: 2 ms at 100 Mbit/s, and the rows of a few sessions.
MOST_CARRIED_BYTES: Final = 24 << 10


class FeatureStream:
    """Bounded queue of features for one coordinator. For the event loop.

    Args:
        most_queued_bytes: Rows beyond these are dropped, the oldest first.

    Attributes:
        num_dropped_rows: Rows dropped so far.
    """

    def __init__(self, most_queued_bytes: int = MOST_QUEUED_BYTES) -> None:
        self._layers: tuple[int, ...] | None = None
        self._most_queued_bytes = most_queued_bytes
        self._waiting: deque[wire.Features] = deque()
        self._num_bytes = 0
        self._changed = asyncio.Event()
        self._is_closed = False
        self.num_dropped_rows = 0

    def open(self, layers: Sequence[int]) -> None:
        """Set the layers whose features it carries from now on."""
        self._layers = tuple(layers)

    def put(self, features: Iterable[wire.Features]) -> None:
        """Queue features of windows; before `open` they are of other layers, and dropped."""
        if self._layers is None:
            return
        for each in features:
            self._waiting.append(each)
            self._num_bytes += _size_bytes(each)
        if self._num_bytes > self._most_queued_bytes and not self.num_dropped_rows:
            log.warning("features_dropped", reason="the link to the coordinator is too slow for them")
        while self._num_bytes > self._most_queued_bytes:
            self.num_dropped_rows += self._take().num_rows
        self._changed.set()

    def close(self) -> None:
        """End the stream at once."""
        self._is_closed = True
        self._changed.set()

    async def bundles(self) -> AsyncIterator[wire.FeatureBundle]:
        """Messages for the coordinator from `open` to `close`: the layers, then features as they come."""
        if self._is_closed:
            return
        yield wire.FeatureBundle(layers=self._layers)
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._waiting and not self._is_closed:
                yield wire.FeatureBundle(features=self._take_few())
            if self._is_closed:
                return

    def _take_few(self) -> list[wire.Features]:
        few = [self._take()]
        num_bytes = _size_bytes(few[0])
        while self._waiting and num_bytes + _size_bytes(self._waiting[0]) <= _MOST_BUNDLED_BYTES:
            num_bytes += _size_bytes(self._waiting[0])
            few.append(self._take())
        return few

    def _take(self) -> wire.Features:
        oldest = self._waiting.popleft()
        self._num_bytes -= _size_bytes(oldest)
        return oldest


class FeatureOutlet(StagePlug):
    """Features of the windows that ask for them.

    Args:
        runtime: The loaded stage.
    """

    def __init__(self, runtime: StageRuntime) -> None:
        self._runtime = runtime
        self._info = runtime.info
        # None: no coordinator wants features.
        self._type: HiddenType | None = None
        self._row_bytes = 0
        self._later: Sequence[QueuedWindow] = ()
        self._waiting = WaitingFeatures()
        # Of windows whose features wait: rows that a verdict's tokens were sampled after.
        self._num_sampled: dict[tuple[int, int], int] = {}
        self._stream: FeatureStream | None = None
        self._stage: StageAccess | None = None
        self._send: Callable[[list[wire.Features]], None] = self._put

    def attach(self, stage: StageAccess) -> None:
        """Send features from the event loop from now on."""
        self._stage = stage
        self._send = stage.from_worker(self._put)

    def streams(
        self,
    ) -> Mapping[str, Callable[[wire.FeatureRequest], AsyncGenerator[wire.FeatureBundle, None]]]:
        """Features of windows that ask for them, for the coordinator's drafter. One stream at a time."""
        return {"Features": self.bundles}

    def bundles(self, request: wire.FeatureRequest) -> AsyncGenerator[wire.FeatureBundle, None]:
        """Features for a coordinator, until it leaves or another one asks.

        Raises:
            ProtocolError: If there are no such layers, or no such format.
        """
        n_layers = self._info.n_layers
        if request.type not in FROM_WIRE or any(layer > n_layers for layer in request.layers):
            raise ProtocolError(
                f"features of layers {list(request.layers)} in format {request.type} are not known here: the "
                f"model has {n_layers} layers, and formats are {', '.join(HiddenType)}"
            )
        return self._bundles(request)

    async def _bundles(self, request: wire.FeatureRequest) -> AsyncGenerator[wire.FeatureBundle, None]:
        # In its place before any wait: of two that open at once the last one sets the layers, and only its
        # end unsets them.
        self.left()
        self._stream = stream = FeatureStream()
        try:
            stream.open(await self._tap_in_worker(request.layers, FROM_WIRE[request.type]))
            async for bundle in stream.bundles():
                yield bundle
        finally:
            if self._stream is stream:
                self._stream = None
                await self._tap_in_worker((), None)

    def left(self) -> None:
        """End the stream of features, if there is one."""
        if self._stream is not None:
            self._stream.close()

    def closed(self, slot: int, message: wire.Close) -> None:
        """Send the last features of a session: nothing follows that they could share a message with."""
        del slot
        if self._stream is not None and self._stage is not None:
            self._stage.between_batches(lambda: self._send_last(message.session))

    def tap(self, layers: Sequence[int], feature_type: HiddenType | None) -> tuple[int, ...]:
        """Set what features windows may ask for; in the computing thread only.

        Args:
            layers: See `FeatureTaps.set_layers`.
            feature_type: Their format on the wire; None ends them.

        Returns:
            Those among the layers that this stage gives.
        """
        tapped = self._runtime.tap_features(layers)
        self._waiting.clear()
        self._type = feature_type if tapped else None
        if feature_type is not None:
            self._row_bytes = len(tapped) * feature_type.row_bytes(self._info.n_embd)
        return tapped

    def arriving(self, bundle: wire.WindowBundle) -> Mapping[tuple[int, int], tuple[wire.Features, ...]]:
        """Features from earlier stages; more than a stage may add are dropped: no text depends on them."""
        found: defaultdict[tuple[int, int], tuple[wire.Features, ...]] = defaultdict(tuple)
        if feature_bytes(bundle.features) <= MOST_CARRIED_BYTES:
            for features in bundle.features:
                found[features.session, features.window_id] += (features,)
        return found

    def taps(self, windows: Sequence[QueuedWindow]) -> bool:
        """Whether a window of a batch asks for features."""
        return self._type is not None and any(window.message.wants_features for window in windows)

    def verified(self, window: QueuedWindow, verdict: wire.Verdict) -> None:
        """Add features of the rows that the verdict's tokens were sampled after, unless they wait."""
        if not verdict.tokens:
            return
        if window.message.features_together > _READ_SOON:
            self._num_sampled[window.session, window.id] = len(verdict.tokens)
            return
        first = self._num_unverified(window)
        features = self._features(window, first, first + len(verdict.tokens))
        if features is not None:
            verdict.features.CopyFrom(features)

    def passing(self, windows: Sequence[QueuedWindow], bundle: Bundle) -> None:
        """Add features from earlier stages."""
        for window in windows:
            bundle.features.extend(each for each in window.travelling if isinstance(each, wire.Features))

    def computed(self, windows: Sequence[QueuedWindow], bundle: Bundle) -> None:
        """Add features of a few rows that do not wait; others are sent once the windows have left."""
        self._later = ()
        wanting = [window for window in windows if window.message.wants_features]
        if self._type is None or not wanting:
            return
        soon = [window for window in wanting if not window.message.features_together]
        if not soon:
            self._later = wanting
            return
        for window in soon:
            # Who reads these has a use for those before them.
            self._waiting.hurry(window.session)
        num_bytes = feature_bytes(bundle.features)
        num_bytes += self._row_bytes * sum(self._num_unverified(window) for window in soon)
        if num_bytes > MOST_CARRIED_BYTES:
            self._later = wanting
            return
        bundle.features.extend(self._unverified(soon))
        self._later = [window for window in wanting if window.message.features_together]

    def handed_on(self) -> None:
        """Send features that did not travel with the latest windows, or keep them until there are more."""
        later, self._later = self._later, ()
        for window in later:
            num_rows = self._num_unverified(window) + self._num_sampled.get((window.session, window.id), 0)
            rows = self._rows(window, 0, num_rows)
            if rows and num_rows:
                start, together = window.to_compute.start, window.message.features_together
                self._waiting.add(window.session, window.id, start, rows, together)
        self._num_sampled.clear()
        self._send_waiting()

    async def _tap_in_worker(self, layers: Sequence[int], feature_type: HiddenType | None) -> tuple[int, ...]:
        assert self._stage is not None  # noqa: S101 - a stage serves with its plugs attached
        tapped: tuple[int, ...] = await self._stage.in_worker(lambda: self.tap(layers, feature_type))
        return tapped

    def _put(self, features: list[wire.Features]) -> None:
        if self._stream is not None:
            self._stream.put(features)

    def _send_last(self, session: int) -> None:
        self._waiting.hurry(session)
        self._send_waiting()

    def _send_waiting(self) -> None:
        found = []
        for run in self._waiting.take():
            message = self._message(run.session, run.window_id, run.start, run.layers(), run.window_rows)
            if message is not None:
                found.append(message)
        if found:
            self._send(found)

    def _unverified(self, windows: Sequence[QueuedWindow]) -> list[wire.Features]:
        """Features of rows that the tail does not sample; those of the others come with its verdicts."""
        found = [self._features(window, 0, self._num_unverified(window)) for window in windows]
        return [features for features in found if features is not None]

    def _num_unverified(self, window: QueuedWindow) -> int:
        span = window.to_compute
        return len(span.tokens) - span.num_outputs * self._info.is_tail

    def _rows(self, window: QueuedWindow, first: int, stop: int) -> list[NDArray[np.float32]]:
        """Some of the rows just computed, of each layer; none if they are not wanted or not all there."""
        parts = self._runtime.features(window.span.slot) if window.message.wants_features else ()
        rows = [part[first:stop] for part in parts if part is not None]
        return rows if len(rows) == len(parts) else []

    def _features(self, window: QueuedWindow, first: int, stop: int) -> wire.Features | None:
        """Features of some of the rows just computed; None if there are none."""
        rows = self._rows(window, first, stop) if stop > first else []
        start = window.to_compute.start + first
        return self._message(window.session, window.id, start, rows) if rows else None

    def _message(
        self,
        session: int,
        window_id: int,
        start: int,
        layers: Sequence[NDArray[np.float32]],
        window_rows: Sequence[int] = (),
    ) -> wire.Features | None:
        kind = self._type
        if kind is None:
            return None
        try:
            rows = [encode(each, kind) for each in layers]
        except MeshError:  # a value that is not finite: its window reports it
            return None
        return wire.Features(
            session=session,
            window_id=window_id,
            start=start,
            num_rows=len(layers[0]),
            rows=rows,
            type=TO_WIRE[kind],
            window_rows=window_rows,
            stage=0 if self._stage is None else self._stage.place.stage_index,
        )


def _size_bytes(features: wire.Features) -> int:
    return sum(len(rows) for rows in features.rows)


def feature_bytes(features: Iterable[wire.Features]) -> int:
    """Size of the rows of features."""
    return sum(len(rows) for each in features for rows in each.rows)
