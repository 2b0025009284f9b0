"""Encoder of pictures on another host, as its deployment knows it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mesh.placement.encoder_host import place_encoder
from mesh.serve.one_host import Hosted
from mesh.vision.encoder_link import EncoderLink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.placement.host_capacity import HostCapacity
    from mesh.placement.planner import Plan
    from mesh.serve.failures import Incidents
    from mesh.serve.pictures import ServedPictures
    from stages.runtime.process_memory import StageMemory
    from stages.transport.channels import Identity


@dataclass
class _EncoderState:
    incidents: Incidents
    phase: str = "starting"
    plan_reason: str | None = None


class HostedEncoder(Hosted):
    """A model's encoder of pictures on another host; see `mesh.serve.one_host.Hosted`.

    Args:
        model: Name of the model.
        pictures: How it reads pictures.
        wanted: Name of the host that is preferred, or `auto`.
        incidents: Failures of the model.
    """

    def __init__(self, model: str, pictures: ServedPictures, wanted: str, incidents: Incidents) -> None:
        self.name = f"{model} pictures"
        self.what = "an encoder of pictures"
        self.setup = ""
        self.engine = pictures.placed
        self.state = _EncoderState(incidents)
        self.pipeline = pictures.pipeline
        self.layers = pictures.sizes.layers
        self.memory = pictures.sizes.memory
        self.request_bytes = 0
        # All of its host, as on the head.
        self.most_threads = sys.maxsize
        self.computes_at_times = True
        self.can_do_without = True
        self._placed = pictures.placed
        self._sizes = pictures.sizes
        self._wanted = wanted

    def memory_on(self, host: HostCapacity) -> StageMemory | None:
        """See `Hosted.memory_on`."""
        return self._sizes.memory_on(host)

    def place(self, hosts: Sequence[HostCapacity]) -> Plan:
        """The host that is preferred, else the best one with a GPU; see `place_encoder`."""
        return place_encoder(self._sizes, hosts, self._wanted)

    async def answer_at(
        self, address: str, host: str, mesh_key: str, identity: Identity | None
    ) -> EncoderLink:
        """See `Hosted.answer_at`."""
        link = EncoderLink(address, host, mesh_key, identity=identity)
        try:
            await self._placed.resume(link)
        except BaseException:
            await link.close()
            raise
        return link
