"""The stages of a plan as Ray actors on their hosts."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

import structlog

from mesh.cluster.addresses import join_address
from mesh.cluster.ray_driver import RayDriver, result_of
from mesh.coordinator import StageAddress
from mesh.progress import progress_bars
from spanmesh_proto.errors import MeshError
from stages.actor import StageActor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.cluster.authority import Authority
    from mesh.cluster.members import Member
    from mesh.progress import ProgressBars
    from stages.actor import StageConfig

log = structlog.get_logger()

_POLL_S: Final = 0.25
_STOP_TIMEOUT_S: Final = 3.0


class StageActors:
    """One actor for each stage, in pipeline order.

    Args:
        driver: Places them.
        configs: What each is to hold.
        members: The host of each.
        authority: Certifies their keys.
    """

    def __init__(
        self,
        driver: RayDriver,
        configs: Sequence[StageConfig],
        members: Sequence[Member],
        authority: Authority,
    ) -> None:
        self._driver = driver
        self._configs = tuple(configs)
        self._members = tuple(members)
        self._authority = authority
        self._actors: list[Any] = []

    async def place(self) -> None:
        """Start every actor on its host.

        Raises:
            ClusterError: If a host's Ray node is gone.
        """
        for config, member in zip(self._configs, self._members, strict=True):
            actor = await self._driver.create(StageActor, config, ray_node_name=member.ray_node_name)
            self._actors.append(actor)
            log.info("stage_placed", stage=config.stage_index, host=member.name, layers=str(config.layers))

    async def load(self) -> None:
        """Have every stage bring its file and load it, all at once, with progress.

        Raises:
            ModelDoesNotFit: If a host has too little memory left; nothing is loaded then.
            MeshError: What the first stage that failed says; `StageFailed` if its process died.
        """
        await self._all(actor.check_memory.remote() for actor in self._actors)
        with progress_bars() as bars:
            watchers = [asyncio.create_task(self._watch(index, bars)) for index in range(len(self._actors))]
            try:
                await self._all(actor.load.remote() for actor in self._actors)
            finally:
                for watcher in watchers:
                    watcher.cancel()
                await asyncio.gather(*watchers, return_exceptions=True)
        for config, member in zip(self._configs, self._members, strict=True):
            log.info("stage_loaded", stage=config.stage_index, host=member.name, layers=str(config.layers))

    async def connect(self) -> tuple[StageAddress, ...]:
        """Have every stage serve and link to the next; returns where they serve.

        Raises:
            HostUnreachable: If one host cannot reach the next.
        """
        await self._certify()
        ports = await self._all(
            actor.start.remote(member.address)
            for actor, member in zip(self._actors, self._members, strict=True)
        )
        addresses = [
            StageAddress(
                member.name, join_address(member.address, port), config.layers, wire=config.hidden_type
            )
            for config, member, port in zip(self._configs, self._members, ports, strict=True)
        ]
        await self._all(
            actor.connect.remote(following.address, following.host)
            for actor, following in zip(self._actors[:-1], addresses[1:], strict=True)
        )
        return tuple(addresses)

    async def _certify(self) -> None:
        """Sign a key that each stage makes for itself."""
        authority = self._authority
        requests = await self._all(actor.certificate_request.remote() for actor in self._actors)
        certificates = [
            authority.sign(request, member.name, member.address)
            for request, member in zip(requests, self._members, strict=True)
        ]
        await self._all(
            actor.take_certificate.remote(certificate, authority.certificate_pem)
            for actor, certificate in zip(self._actors, certificates, strict=True)
        )

    async def stop(self) -> None:
        """End every actor, gently if it answers."""
        calls = [actor.stop.remote() for actor in self._actors]
        with contextlib.suppress(TimeoutError, MeshError):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._all(calls)
        for actor in self._actors:
            self._driver.kill(actor)
        self._actors.clear()

    async def _all(self, calls: Any) -> list[Any]:
        """Results of one call to each actor, in order; the first failure counts."""
        works = [asyncio.ensure_future(result_of(call, self._who(index))) for index, call in enumerate(calls)]
        try:
            return list(await asyncio.gather(*works))
        finally:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    def _who(self, index: int) -> str:
        return f"stage {index} ({self._configs[index].layers}) on {self._members[index].name}"

    async def _watch(self, index: int, bars: ProgressBars) -> None:
        bar = bars.add(f"{self._who(index)}: waiting")
        while True:
            progress = await self._actors[index].progress.remote()
            bar(progress.share, f"{self._who(index)}: {progress.phase}")
            await asyncio.sleep(_POLL_S)
