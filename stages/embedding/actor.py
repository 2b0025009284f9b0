"""Embedding actor of Ray: fetches, loads and serves one embedding model."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from spanmesh_proto.errors import ClusterError
from stages.embedding.runtime import EmbeddingRuntime
from stages.embedding.server import EmbeddingService
from stages.serving.actor import ModelActor

if TYPE_CHECKING:
    from pathlib import Path

    from stages.serving.actor import LoadedModel
    from stages.transport.hidden_codec import HiddenType


class EmbeddingActor(ModelActor):
    """One embedding model on this host, all of its layers; see `ModelActor`.

    The options of its configuration are those of an `EmbeddingRuntime`.
    """

    async def rejoin(
        self,
        stage_index: int,  # noqa: ARG002 - there is one place only
        mesh_id: str,
        mesh_key: str,
        term: int,
        hidden_type: HiddenType | None = None,  # noqa: ARG002 - it sends no hidden states
    ) -> None:
        """Serve a head with a new key; the arguments are those of a stage.

        Raises:
            ClusterError: If it is not serving.
            ProtocolError: If a head of a higher term took over meanwhile.
        """
        self._last_call_s = time.monotonic()
        service = self._service
        if not isinstance(service, EmbeddingService):
            raise ClusterError("an embedding model got another key before it was started")
        service.rejoin(mesh_key, term)
        self._config = replace(self._config, mesh_id=mesh_id, mesh_key=mesh_key, term=term)

    def _load_file(self, path: Path) -> EmbeddingRuntime:
        return EmbeddingRuntime(path, self._config.options, progress=self._on_loaded)

    def _make_service(self, loaded: LoadedModel) -> EmbeddingService:
        assert isinstance(loaded, EmbeddingRuntime)  # noqa: S101 - of `_load_file`
        return EmbeddingService(loaded, mesh_key=self._config.mesh_key, term=self._config.term)
