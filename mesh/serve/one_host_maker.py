"""Maker of the process of what one host holds: its configuration, and the file that the host fetches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mesh.serve.stage_handle import StageHandle, new_ring_credentials
from stages.serving.actor import StageConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mesh.cluster.members import Member
    from mesh.placement.planner import StagePlacement
    from mesh.serve.head import Head
    from mesh.serve.stage_factory import Transfers
    from mesh.serve.whole_file import WholeFile
    from stages.layers import LayerRange
    from stages.runtime.process_memory import StageMemory
    from stages.runtime.stage_runtime import RuntimeOptions
    from stages.serving.actor import ModelActor
    from stages.transport.hidden_codec import HiddenType


class OneHostMaker:
    """Base of makers of one process; see `mesh.serve.reconfiguration.Maker`.

    Args:
        file: Its file.
        head: The open head.
        transfers: Record of weights sent to hosts.
        kind: Class of its actor.
    """

    def __init__(self, file: WholeFile, head: Head, transfers: Transfers, kind: type[ModelActor]) -> None:
        self._file = file
        self._head = head
        self._transfers = transfers
        self._kind = kind

    async def describe(self, stages: Iterable[tuple[str, LayerRange]]) -> None:
        """Hash the file once, unless it stays on this host; see `WholeFile.describe`.

        Args:
            stages: Name of the host, and all layers.
        """
        await self._file.describe([host for host, _ in stages])

    def make(
        self,
        placement: StagePlacement,
        member: Member,
        *,
        wire: HiddenType,
        num_threads: int,
        beside: Sequence[StageMemory] = (),
    ) -> StageHandle:
        """The process, which is not started.

        Args:
            placement: Its memory on its host.
            member: Its host.
            wire: Not used: it sends no hidden states.
            num_threads: Threads of the host for it.
            beside: Memory of what is loaded there at the same time.
        """
        sha256, whole = self._file.source_on(member)
        # Random credentials until it serves.
        credentials = new_ring_credentials()
        config = self._config(
            member,
            stage_index=0,
            layers=placement.layers,
            sha256=sha256,
            whole=whole,
            source=self._head.source_for(member),
            options=self._options(num_threads, placement.memory.gpu_layers),
            host=member.name,
            memory=placement.memory,
            beside_bytes=sum(other.loading_bytes for other in beside),
            mesh_id=credentials.mesh_id,
            mesh_key=credentials.mesh_key,
            hidden_type=wire,
        )
        return StageHandle(
            self._head.driver,
            self._head.authority,
            config,
            member,
            on_transfer=self._transfers.note,
            kind=self._kind,
        )

    def _options(self, num_threads: int, gpu_layers: tuple[tuple[str, int], ...]) -> RuntimeOptions:
        """Options of its runtime."""
        raise NotImplementedError

    def _config(self, member: Member, **common: Any) -> StageConfig:
        """Its configuration on a host, with what all have in common."""
        del member
        return StageConfig(**common)
