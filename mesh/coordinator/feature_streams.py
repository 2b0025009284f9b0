"""Feature streams of a ring: connections to the stages whose hidden states a drafter reads.

Features of a few rows come with verdicts; more come on connections of their own, so that no window or verdict
waits behind them. The loss of a connection ends drafting from features, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import grpc
import numpy as np
import structlog

from mesh.coordinator.plugs import RingPlug
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto import windows_pb2_grpc as rpc
from spanmesh_proto.errors import MeshError, ProtocolError, StageFailed
from stages.transport.channels import key_metadata, open_channel
from stages.transport.hidden_codec import TO_WIRE, decode
from stages.transport.stage_link import explain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from mesh.coordinator.feature_store import FeatureNeeds
    from mesh.coordinator.ring import StageAddress
    from stages.transport.channels import Identity

# Hidden states beyond this are no features that any drafter was trained on.
_LARGEST_VALUE: Final = 1e6
_RETRY_S: Final = 5.0
_CONNECT_PATIENCE_S: Final = 0.3

log = structlog.get_logger()


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


class FeatureStreams(RingPlug):
    """Features of all stages of one ring. For the event loop; retries lost connections.

    Args:
        stages: Addresses of the stages, in pipeline order.
        hello: First message, with the protocol version.
        mesh_key: Key shared by all stages and the coordinator.
        needs: What the drafter reads.
        on_features: Called with features as they arrive.
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
        identity: Identity | None = None,
    ) -> None:
        self._stages = tuple(stage for stage in stages if _holds_any(stage, needs))
        self._addresses = tuple(stage.address for stage in stages)
        self._hello = hello
        self._mesh_key = mesh_key
        self._needs = needs
        self._on_features = on_features
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
        features.session, features.window_id, features.start, tuple(rows), features.ByteSize()
    )


def _holds_any(stage: StageAddress, needs: FeatureNeeds) -> bool:
    is_tail = stage.layers.stop == needs.n_layers
    return any(
        stage.layers.start <= layer < stage.layers.stop or (is_tail and layer == needs.n_layers)
        for layer in needs.layers
    )
