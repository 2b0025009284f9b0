"""Handle of one stage actor, and the keys of rings."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import structlog

from mesh.cluster.port_plan import own_ports
from mesh.cluster.ray_driver import exited_pid, result_of
from mesh.coordinator.ring import StageAddress
from spanmesh_proto.addresses import join_address, split_address
from spanmesh_proto.errors import MeshError, StageFailed
from stages.serving.actor import StageActor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mesh.cluster.certificates import Authority
    from mesh.cluster.members import Member
    from mesh.cluster.ray_driver import RayDriver
    from mesh.util.terminal import ProgressTask
    from stages.layers import LayerRange
    from stages.serving.actor import ModelActor, StageConfig, StageContent, StageProgress
    from stages.transport.hidden_codec import HiddenType
    from stages.weights.assembly import Transfer

_POLL_S: Final = 0.25
# A process starts within a few seconds, on a busy host within tens of them.
_START_S: Final = 60.0
# A stage answers while it loads: loading happens in another thread.
_SILENCE_S: Final = 15.0
# Wiring is a few messages. A stage that takes longer is frozen or unreachable.
_WIRE_TIMEOUT_S: Final = 5.0
_STOP_TIMEOUT_S: Final = 3.0

log = structlog.get_logger()


@dataclass(frozen=True)
class StageLoss:
    """Reason why a stage counts as lost."""

    reason: str
    """One line for the operator."""
    pid: int | None = None
    """Process id on its host, if the process has ended and Ray reports it."""


class StageHandle:
    """Handle of one stage actor, from the start of its process to the end.

    Args:
        driver: Starts its actor.
        authority: Signs its certificate.
        config: Its layers and settings.
        member: Its host.
        on_transfer: Called with host, layers and origin of the weights, once they are there.
        kind: Class of its actor.

    Attributes:
        config: Its layers and settings.
        member: Its host.
        is_loaded: Whether its weights are in memory.
        progress: Latest progress of loading; None before the first answer of its process.
    """

    def __init__(
        self,
        driver: RayDriver,
        authority: Authority,
        config: StageConfig,
        member: Member,
        *,
        on_transfer: Callable[[str, LayerRange, Transfer], None],
        kind: type[ModelActor] = StageActor,
    ) -> None:
        self._driver = driver
        self._kind = kind
        self._authority = authority
        self._on_transfer = on_transfer
        self.config = config
        self.member = member
        self.is_loaded = False
        self.progress: StageProgress | None = None
        self._actor: Any = None
        self._address: str | None = None
        # Unique: its host may hold the same layers again, later.
        self.actor_name = f"{member.name} {config.layers} {secrets.token_hex(4)}"
        self._wire = config.hidden_type
        self._certificate_pem: bytes | None = None

    @property
    def who(self) -> str:
        """Description for messages."""
        return f"stage {self.config.layers} on {self.member.name}"

    @property
    def address(self) -> StageAddress:
        """Address, layers and wire format.

        Raises:
            StageFailed: If it does not serve yet.
        """
        if self._address is None:
            raise StageFailed(f"{self.who} does not serve yet")
        return StageAddress(self.member.name, self._address, self.config.layers, wire=self._wire)

    def reached_from(self, peer: Member) -> StageAddress:
        """Address at which a process on another member's host reaches it.

        Raises:
            StageFailed: If it does not serve yet.
        """
        at = self.address
        return replace(at, address=join_address(self.member.address_for(peer), split_address(at.address)[1]))

    @property
    def serves_at(self) -> str | None:
        """`host:port` of its server, or None if it does not serve yet."""
        return self._address

    async def place(self) -> None:
        """Start its process.

        Raises:
            ClusterError: If its host's Ray node is gone.
        """
        self._actor = await self._driver.create(
            self._kind, self.config, ray_node_name=self.member.ray_node_name, name=self.actor_name
        )
        log.info("stage_placed", host=self.member.name, layers=str(self.config.layers))

    def adopt(self, actor_name: str, serves_at: str | None) -> None:
        """Take over a loaded stage of a former head, instead of starting one.

        Args:
            actor_name: Name of its actor.
            serves_at: `host:port`, if it serves.

        Raises:
            StageFailed: If its process has ended.
        """
        self._actor = self._driver.find(actor_name)
        self.actor_name = actor_name
        self._address = serves_at
        self.is_loaded = True

    async def confirm(self, timeout_s: float) -> None:
        """Ask a process that was taken over what it has loaded; its memory and threads are noted as they are.

        Args:
            timeout_s: Longest wait for the answer, in seconds.

        Raises:
            StageFailed: If it is gone, does not answer, or has loaded anything else than this stage.
        """
        content: StageContent | None = await self._within(timeout_s, self._process.content.remote())
        if content is None or not self.config.content.computes_as(content):
            raise StageFailed(f"{self.who} has loaded something else than was recorded")
        self.config = replace(self.config, options=content.options, memory=content.memory)

    async def check_memory(self) -> None:
        """Check that its host has enough memory; before anything is loaded.

        Raises:
            ModelDoesNotFit: If the host has too little.
            StageFailed: If its process is gone, or does not answer.
        """
        await self._while_it_answers(self._process.check_memory.remote(), None)

    async def load(self, bar: ProgressTask | None = None) -> None:
        """Bring its weights to its host, and load them.

        Args:
            bar: Progress bar.

        Raises:
            MeshError: Error of the stage; `StageFailed` if its process is gone, or does not answer.
        """
        transfer: Transfer = await self._while_it_answers(self._process.load.remote(), bar)
        self.is_loaded = True
        self._on_transfer(self.member.name, self.config.layers, transfer)
        log.info(
            "stage_loaded",
            host=self.member.name,
            layers=str(self.config.layers),
            gpu_layers=dict(self.config.memory.gpu_layers),
            cpu_moe_layers=self.config.memory.cpu_moe_layers,
        )

    async def serve(self) -> None:
        """Start its server, with a certificate for a key that it generates. Later calls have no effect.

        Raises:
            ClusterError: If it cannot listen.
            StageFailed: If it does not answer.
        """
        if self._address is not None:
            return
        await self._certify()
        where: list[Any] = [self.member.bind_address]
        if ports := own_ports(self.member.port_range):
            where.append(ports)
        port = await self._soon(self._process.start.remote(*where))
        self._address = join_address(self.member.address, port)

    async def rejoin(self, stage_index: int, credentials: RingCredentials, wire: HiddenType) -> None:
        """Make it part of a new ring; its sessions of the old one end.

        Raises:
            StageFailed: If it does not answer.
        """
        self._wire = wire
        await self._certify()
        await self._soon(
            self._process.rejoin.remote(
                stage_index, credentials.mesh_id, credentials.mesh_key, credentials.term, wire
            )
        )

    async def connect(self, following: StageHandle) -> None:
        """Link it to the next stage.

        Raises:
            HostUnreachable: If it cannot reach that.
            StageFailed: If it does not answer.
        """
        address = following.reached_from(self.member)
        await self._soon(self._process.connect.remote(address.address, address.host))

    async def follow(self, stage: StageHandle, credentials: RingCredentials) -> None:
        """Let this replica follow a stage of the ring.

        Args:
            stage: Stage that serves in a ring.
            credentials: Keys of that ring.

        Raises:
            StageFailed: If it does not answer.
        """
        at = stage.reached_from(self.member)
        await self._soon(
            self._process.follow.remote(
                at.address, at.host, credentials.mesh_id, credentials.mesh_key, credentials.term
            )
        )

    async def loss(self, timeout_s: float) -> StageLoss | None:
        """Ping its process.

        Args:
            timeout_s: Longest wait for the answer, in seconds. A process that has ended is reported at once.

        Returns:
            Reason why it counts as lost; None if it answers.
        """
        try:
            await self._within(timeout_s, self._process.progress.remote())
        except MeshError as error:
            return StageLoss(error.message.removeprefix(f"{self.who} "), exited_pid(str(error.__cause__)))
        return None

    async def stop(self) -> None:
        """End it, by a request if it answers, so that its memory is free afterwards."""
        if self._actor is not None:
            with contextlib.suppress(MeshError):
                await self._within(_STOP_TIMEOUT_S, self._process.stop.remote())
            self.kill()

    def kill(self) -> None:
        """End its process without waiting, even if it is frozen."""
        if self._actor is not None:
            self._driver.kill(self._actor)
            self._actor = None

    @property
    def _process(self) -> Any:
        if self._actor is None:
            raise StageFailed(f"{self.who} was ended")
        return self._actor

    async def _certify(self) -> None:
        """Sign its key, unless it has a certificate that remains valid for a while."""
        member, authority = self.member, self._authority
        if self._certificate_pem is not None and not authority.is_due(self._certificate_pem):
            return
        request = await self._soon(self._process.certificate_request.remote())
        certificate = authority.sign(request, member.name, member.address)
        await self._soon(self._process.take_certificate.remote(certificate, authority.certificate_pem))
        self._certificate_pem = certificate

    async def _soon(self, call: Awaitable[Any]) -> Any:
        return await self._within(_WIRE_TIMEOUT_S, call)

    async def _within(self, timeout_s: float, call: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await result_of(call, self.who)
        except TimeoutError:
            raise StageFailed(f"{self.who} did not answer within {timeout_s:g} s") from None

    async def _while_it_answers(self, call: Awaitable[Any], bar: ProgressTask | None) -> Any:
        """Wait for work of any length, as long as its process reports progress; returns the result."""
        work = asyncio.ensure_future(result_of(call, self.who))
        try:
            while not work.done():
                patience_s = _START_S if self.progress is None else _SILENCE_S
                progress: StageProgress = await self._within(patience_s, self._process.progress.remote())
                self.progress = progress
                if bar is not None:
                    bar(progress.share, f"{self.who}: {progress.label}")
                await asyncio.wait([work], timeout=_POLL_S)
            return work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


@dataclass(frozen=True)
class RingCredentials:
    """Keys of one ring. A recovered ring has new ones, so that it refuses messages of the old one."""

    mesh_id: str
    """Identifier of the ring, hex."""
    mesh_key: str = field(repr=False)
    """Secret that every call between stages and coordinator carries."""
    term: int = 0
    """Term of the head; higher than that of any head before it."""


def new_ring_credentials(term: int = 0) -> RingCredentials:
    """Keys for a new ring."""
    return RingCredentials(secrets.token_hex(16), secrets.token_urlsafe(32), term)
