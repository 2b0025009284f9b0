"""Hosting of a model's encoder of pictures: on another host where that is of use, else on the head."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, NoReturn

import structlog

from mesh.placement.encoder_host import OWN_HOST
from mesh.serve.one_host import OneHostDeployment
from mesh.serve.vision.hosted import HostedEncoder
from mesh.serve.vision.maker import EncoderMaker
from spanmesh_proto.errors import MeshError, NotEnoughHosts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from mesh.serve.allocations import HostAllocations
    from mesh.serve.head import Head
    from mesh.serve.host_draining import HostDraining
    from mesh.serve.served_model import ServedModel
    from stages.weights.virtual_stages import StageCache

# After a failure, longer after each, unless hosts change; meanwhile the head encodes.
_FIRST_PAUSE_S: Final = 2.0
_MOST_PAUSE_S: Final = 60.0

log = structlog.get_logger()


class EncoderHosting:
    """Brings an encoder to a host when it is begun, and again whenever that was lost or hosts have changed.

    Args:
        name: Name of the encoder, for logs.
        deployment: Makes a deployment of it, given how often each host has failed so far; None for an encoder
            that stays on the head.
        head: The open head.
    """

    def __init__(
        self, name: str, deployment: Callable[[Counter[str]], OneHostDeployment] | None, head: Head
    ) -> None:
        self._name = name
        self._deployment = deployment
        self._head = head
        self._is_decided = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._pause_s = _FIRST_PAUSE_S

    def begin(self) -> None:
        """Bring the encoder to a host. Later calls have no effect."""
        if self._task is None and self._deployment is not None:
            self._task = asyncio.create_task(self._run(self._deployment))

    async def decided(self) -> None:
        """Begin, and return when the memory of the first place counts as used, or there is none."""
        self.begin()
        if self._task is not None:
            await self._is_decided.wait()

    async def close(self) -> None:
        """End the process on the host, if there is one."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, deployment_for: Callable[[Counter[str]], OneHostDeployment]) -> NoReturn:
        strikes, told = Counter[str](), ""
        while True:
            deployment = deployment_for(strikes)
            deployment.on_decided = self._is_decided.set
            try:
                await deployment.run(self._on_served)
            except MeshError as error:
                if error.message != told:
                    told = error.message
                    log.info("encoder_on_head", model=self._name, reason=told)
                if isinstance(error, NotEnoughHosts):
                    # Of those that failed, too, none is left.
                    strikes.clear()
            finally:
                self._is_decided.set()
            await self._head.members.change_within(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _MOST_PAUSE_S)

    def _on_served(self) -> None:
        self._pause_s = _FIRST_PAUSE_S
        log.info("encoder_on_host", model=self._name)


@asynccontextmanager
async def hosted_encoder(
    model: ServedModel,
    head: Head,
    cache: StageCache,
    allocations: HostAllocations,
    host_draining: HostDraining,
    *,
    term: int,
) -> AsyncIterator[EncoderHosting]:
    """Context in which a model's encoder of pictures may be on another host, once its hosting is begun.

    Args:
        model: The model.
        head: The open head.
        cache: Files of this host.
        allocations: Allocations of all models; the encoder has one of its own while a host holds it.
        host_draining: Hosts that are to leave.
        term: Term of this head.
    """
    pictures, wanted = model.pictures, model.options.mmproj_host
    if pictures is None or wanted == OWN_HOST:
        yield EncoderHosting(model.name, None, head)
        return
    hosted = HostedEncoder(model.name, pictures, wanted, model.state.incidents)
    maker = EncoderMaker(pictures, head, cache, model.state.transfers)

    def deployment(strikes: Counter[str]) -> OneHostDeployment:
        return OneHostDeployment(
            hosted,
            maker,
            head,
            allocations,
            host_draining,
            former=None,
            term=term,
            before_planning=_nothing,
            strikes=strikes,
        )

    hosting = EncoderHosting(hosted.name, deployment, head)
    try:
        yield hosting
    finally:
        await hosting.close()


async def _nothing() -> None:
    """Does nothing."""
