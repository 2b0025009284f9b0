"""All streams between the coordinator and its stages, as one thing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from mesh.coordinator.control import ControlStream, VerdictStream
from spanmesh_proto import PROTOCOL_VERSION, SOFTWARE_VERSION
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import MeshError, ProtocolError
from stages.link import StageLink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stages.identity import Identity
    from stages.layers import LayerRange

log = structlog.get_logger()


@dataclass(frozen=True)
class StageAddress:
    """Where a stage serves.

    Attributes:
        host: Name of the host.
        address: `ip:port`.
        layers: What it holds.
        wire: How its hidden states travel to the next stage; means nothing at the tail. For the status.
    """

    host: str
    address: str
    layers: LayerRange
    wire: str = "f32"


class Ring:
    """Windows into stage 0, verdicts from the tail, control to every stage.

    Args:
        stages: In pipeline order.
        mesh_id: Which mesh they belong to.
        mesh_key: Shared by all stages and the coordinator.
        on_verdict: Called with each verdict.
        on_failure: Called with (stage index, failure).
        on_lost: Called with the reason when a stage is gone; perhaps more than once.
        identity: What the coordinator shows the stages; None if all are in its own process.
    """

    def __init__(
        self,
        stages: Sequence[StageAddress],
        mesh_id: str,
        mesh_key: str,
        *,
        on_verdict: Callable[[wire.Verdict], None],
        on_failure: Callable[[int, wire.Failure], None],
        on_lost: Callable[[MeshError], None],
        identity: Identity | None = None,
    ) -> None:
        hello = wire.Hello(
            protocol_version=PROTOCOL_VERSION,
            software_version=SOFTWARE_VERSION,
            mesh_id=mesh_id,
            sender="coordinator",
        )
        self._stages = tuple(stages)
        self._is_closing = False
        self._on_lost = on_lost
        self._link = StageLink(
            stages[0].address, hello, mesh_key, self._lost, host=stages[0].host, identity=identity
        )
        self._verdicts = VerdictStream(
            stages[-1].address,
            hello,
            mesh_key,
            on_verdict=on_verdict,
            on_lost=self._lost,
            host=stages[-1].host,
            identity=identity,
        )
        self._controls = [
            ControlStream(
                stage.address,
                hello,
                mesh_key,
                on_failure=lambda failure, index=index: on_failure(index, failure),  # type: ignore[misc]
                on_lost=self._lost,
                host=stage.host,
                identity=identity,
            )
            for index, stage in enumerate(stages)
        ]

    async def open(self) -> None:
        """Connect to every stage and check that together they are the whole model, in order.

        Raises:
            HostUnreachable: Naming the address that does not answer.
            ProtocolError: If a stage speaks another version or holds other layers than planned.
        """
        try:
            welcomes = await asyncio.gather(*(control.open() for control in self._controls))
            await self._verdicts.open()
            await self._link.open()
            for index, (stage, welcome) in enumerate(zip(self._stages, welcomes, strict=True)):
                _check(index, stage, welcome)
        except BaseException:
            await self.close()
            raise

    def open_session(self, session: wire.Open) -> None:
        """Start a session at every stage, ahead of its first window."""
        self._link.send(session)

    def send(self, window: wire.Window) -> None:
        """Ship a window."""
        self._link.send(window)

    def cancel(self, session: int, epoch: int) -> None:
        """Void the session's windows below `epoch`, everywhere at once."""
        for control in self._controls:
            control.cancel(session, epoch)

    def close_session(self, session: int) -> None:
        """End a session, everywhere at once."""
        for control in self._controls:
            control.close_session(session)

    async def stats(self) -> list[wire.StageStats]:
        """Every stage's counts, in order.

        Raises:
            TimeoutError: If a stage does not answer in time.
        """
        pongs = await asyncio.gather(*(control.ping() for control in self._controls))
        return [pong.stats for pong in pongs]

    async def close(self) -> None:
        """End all streams."""
        self._is_closing = True
        await self._link.close()
        await self._verdicts.close()
        await asyncio.gather(*(control.close() for control in self._controls))

    def _lost(self, reason: MeshError) -> None:
        if not self._is_closing:
            log.error("stage_lost", reason=reason.message)
            self._on_lost(reason)


def _check(index: int, stage: StageAddress, welcome: wire.Welcome) -> None:
    held = (welcome.stage_index, welcome.layer_start, welcome.layer_stop)
    if held != (index, stage.layers.start, stage.layers.stop):
        raise ProtocolError(
            f"stage {index} at {stage.address} holds layers [{held[1]}, {held[2]}) as stage {held[0]}, "
            f"not {stage.layers}"
        )
