"""Handle of one stage actor, and the keys of rings."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import structlog

from mesh.cluster.ray_driver import exited_pid, result_of
from mesh.coordinator.ring import StageAddress
from spanmesh_proto.addresses import join_address
from spanmesh_proto.errors import MeshError, StageFailed
from stages.serving.actor import StageActor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mesh.cluster.certificates import Authority
    from mesh.cluster.members import Member
    from mesh.cluster.ray_driver import RayDriver
    from mesh.util.progress import ProgressTask
    from stages.layers import LayerRange
    from stages.serving.actor import StageConfig
    from stages.transport.hidden_codec import HiddenType
    from stages.weights.assembly import Transfer


log = structlog.get_logger()

_POLL_S: Final = 0.25
# Its process starts within a few seconds, on a host that has much else to do within tens of them.
_START_S: Final = 60.0
# It answers while it loads: that happens in another thread.
_SILENCE_S: Final = 15.0
# Wiring is a few messages. Whoever takes longer is frozen or out of reach.
_WIRE_TIMEOUT_S: Final = 5.0
_STOP_TIMEOUT_S: Final = 3.0


@dataclass(frozen=True)
class StageLoss:
    """Why a stage counts as lost.

    Attributes:
        reason: One line for a person.
        pid: Of its process on its host, if that has ended and Ray says which it was.
    """

    reason: str
    pid: int | None = None


class StageHandle:
    """One stage, from the start of its process to the end.

    Args:
        driver: Places its actor.
        authority: Certifies its key.
        config: What it is to hold.
        member: Its host.
        on_transfer: Called with its host, its layers and where its weights came from, once they are there.
    """

    def __init__(
        self,
        driver: RayDriver,
        authority: Authority,
        config: StageConfig,
        member: Member,
        *,
        on_transfer: Callable[[str, LayerRange, Transfer], None],
    ) -> None:
        self._driver = driver
        self._authority = authority
        self._on_transfer = on_transfer
        self.config = config
        self.member = member
        self.is_loaded = False
        self._has_answered = False
        self._actor: Any = None
        self._address: str | None = None
        # Unlike any other's: its host may hold the same layers again, later.
        self.actor_name = f"{member.name} {config.layers} {secrets.token_hex(4)}"
        self._wire = config.hidden_type
        self._certificate_pem: bytes | None = None

    @property
    def who(self) -> str:
        """For messages."""
        return f"stage {self.config.layers} on {self.member.name}"

    @property
    def address(self) -> StageAddress:
        """Where it serves, and how it sends on what it computes.

        Raises:
            StageFailed: If it does not yet.
        """
        if self._address is None:
            raise StageFailed(f"{self.who} does not serve yet")
        return StageAddress(self.member.name, self._address, self.config.layers, wire=self._wire)

    @property
    def serves_at(self) -> str | None:
        """`host:port` where it serves, or None if it does not yet."""
        return self._address

    async def place(self) -> None:
        """Start its process.

        Raises:
            ClusterError: If its host's Ray node is gone.
        """
        self._actor = await self._driver.create(
            StageActor, self.config, ray_node_name=self.member.ray_node_name, name=self.actor_name
        )
        log.info("stage_placed", host=self.member.name, layers=str(self.config.layers))

    def adopt(self, actor_name: str, serves_at: str | None) -> None:
        """Take over a loaded stage of a head that is gone, instead of placing one.

        Args:
            actor_name: Of its actor.
            serves_at: `host:port`, if it serves.

        Raises:
            StageFailed: If its process has ended.
        """
        self._actor = self._driver.find(actor_name)
        self.actor_name = actor_name
        self._address = serves_at
        self.is_loaded = True

    async def check_memory(self) -> None:
        """Whether it finds room; to be asked before anything is loaded.

        Raises:
            ModelDoesNotFit: If not.
            StageFailed: If its process is gone, or silent.
        """
        await self._while_it_answers(self._process.check_memory.remote(), None)

    async def load(self, bar: ProgressTask | None = None) -> None:
        """Bring its file to its host, and load it.

        Args:
            bar: Shows how far it is.

        Raises:
            MeshError: What the stage says; `StageFailed` if its process is gone, or silent.
        """
        transfer: Transfer = await self._while_it_answers(self._process.load.remote(), bar)
        self.is_loaded = True
        self._on_transfer(self.member.name, self.config.layers, transfer)
        log.info(
            "stage_loaded",
            host=self.member.name,
            layers=str(self.config.layers),
            gpu_layers=dict(self.config.memory.gpu_layers),
        )

    async def serve(self) -> None:
        """Have it listen, with a certificate for a key that it makes for itself; once is enough.

        Raises:
            ClusterError: If it cannot listen.
            StageFailed: If it does not answer.
        """
        if self._address is not None:
            return
        await self._certify()
        port = await self._soon(self._process.start.remote(self.member.address))
        self._address = join_address(self.member.address, port)

    async def rejoin(self, stage_index: int, credentials: RingCredentials, wire: HiddenType) -> None:
        """Make it part of a new ring; whatever went on in the one before is over.

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
        """Link it to the next one.

        Raises:
            HostUnreachable: If it cannot reach it.
            StageFailed: If it does not answer.
        """
        address = following.address
        await self._soon(self._process.connect.remote(address.address, address.host))

    async def follow(self, stage: StageHandle, credentials: RingCredentials) -> None:
        """Have this copy of a stage keep up with what that computes.

        Args:
            stage: It serves in a ring.
            credentials: Of that ring.

        Raises:
            StageFailed: If it does not answer.
        """
        at = stage.address
        await self._soon(
            self._process.follow.remote(
                at.address, at.host, credentials.mesh_id, credentials.mesh_key, credentials.term
            )
        )

    async def loss(self, timeout_s: float) -> StageLoss | None:
        """Ask whether it lives.

        Args:
            timeout_s: How long it may take to answer. A process that is gone is found out at once.

        Returns:
            Why it counts as lost; None if it answers.
        """
        try:
            await self._within(timeout_s, self._process.progress.remote())
        except MeshError as error:
            return StageLoss(error.message.removeprefix(f"{self.who} "), exited_pid(str(error.__cause__)))
        return None

    async def stop(self) -> None:
        """End it, gently if it answers, so that its memory is free afterwards."""
        if self._actor is not None:
            with contextlib.suppress(MeshError):
                await self._within(_STOP_TIMEOUT_S, self._process.stop.remote())
            self.kill()

    def kill(self) -> None:
        """End its process without waiting, frozen or not."""
        if self._actor is not None:
            self._driver.kill(self._actor)
            self._actor = None

    @property
    def _process(self) -> Any:
        if self._actor is None:
            raise StageFailed(f"{self.who} was ended")
        return self._actor

    async def _certify(self) -> None:
        """Sign a key that it makes for itself, unless it has a certificate that is good for a while."""
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
        """Wait for work of any length, as long as its process tells how far it is; gives what came of it."""
        work = asyncio.ensure_future(result_of(call, self.who))
        try:
            while not work.done():
                patience_s = _SILENCE_S if self._has_answered else _START_S
                progress = await self._within(patience_s, self._process.progress.remote())
                self._has_answered = True
                if bar is not None:
                    bar(progress.share, f"{self.who}: {progress.label}")
                await asyncio.wait([work], timeout=_POLL_S)
            return work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


@dataclass(frozen=True)
class RingCredentials:
    """Of one ring. A repaired one is another: what is left of the old one is refused by the new.

    Attributes:
        mesh_id: Its name, hex.
        mesh_key: Secret that every call between stages and coordinator carries.
        term: Of the head; higher than that of any head before it.
    """

    mesh_id: str
    mesh_key: str = field(repr=False)
    term: int = 0


def new_ring_credentials(term: int = 0) -> RingCredentials:
    """Keys for a new ring."""
    return RingCredentials(secrets.token_hex(16), secrets.token_urlsafe(32), term)
