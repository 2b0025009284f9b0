"""Embedding actor of Ray: fetches and loads one embedding model, and serves it over gRPC."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import structlog

from spanmesh_proto import embedding_pb2 as wire
from spanmesh_proto import embedding_pb2_grpc as rpc
from spanmesh_proto.errors import MeshError, ProtocolError
from stages.cancellable_work import in_own_thread
from stages.embedding.runtime import EmbeddingRuntime
from stages.embedding.vectors import to_bytes
from stages.serving.head_service import HeadActor, HeadService
from stages.transport.channels import abort

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import grpc

    from stages.serving.actor import LoadedModel

# The head has two under way, so that one is here when the other is done.
_MOST_CALLS: Final = 16
log = structlog.get_logger()


class EmbeddingService(HeadService, rpc.EmbeddingServicer):
    """One embedding model: computes a batch of texts for each call; llama.cpp runs in a thread.

    Args:
        runtime: The loaded model, which is freed with the service.
        mesh_key: See `HeadService`.
        term: See `HeadService`.
    """

    def __init__(self, runtime: EmbeddingRuntime, *, mesh_key: str, term: int = 0) -> None:
        super().__init__("an embedding model", mesh_key=mesh_key, term=term, most_calls=_MOST_CALLS)
        self._runtime = runtime
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embedding")

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server."""
        rpc.add_EmbeddingServicer_to_server(self, server)

    async def Embed(  # noqa: N802 - the name in the .proto
        self,
        request: wire.EmbedRequest | None,
        context: grpc.aio.ServicerContext[wire.EmbedRequest, wire.Vectors],
    ) -> AsyncIterator[wire.Vectors]:
        """Vectors of a batch of texts."""
        self.handshakes.called(context.peer())
        try:
            vectors = await self._computed(request)
        except MeshError as error:
            log.warning("batch_failed", peer=context.peer(), reason=error.message)
            await abort(context, error)
            return
        yield vectors

    async def close(self) -> None:
        """Stop computing and free the memory."""
        await in_own_thread(self._thread.shutdown, cancel_futures=True)
        self._runtime.close()

    async def _computed(self, request: wire.EmbedRequest | None) -> wire.Vectors:
        if request is None:
            raise ProtocolError("the peer sent bytes that are not a message of this protocol")
        texts = [list(text.tokens) for text in request.inputs]
        self._runtime.check(texts)
        with self.calling():
            # If the call is cancelled before its turn, the thread never sees it.
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._embedded, texts)

    def _embedded(self, texts: list[list[int]]) -> wire.Vectors:
        rows = self._runtime.embed(texts)
        return wire.Vectors(
            rows=to_bytes(rows),
            width=rows.shape[1],
            compute_us=self._runtime.compute_us,
        )


class EmbeddingActor(HeadActor):
    """One embedding model on this host, all of its layers; see `ModelActor`.

    The options of its configuration are those of an `EmbeddingRuntime`.
    """

    def _load_file(self, path: Path) -> EmbeddingRuntime:
        return EmbeddingRuntime(path, self._config.options, progress=self._on_loaded)

    def _make_service(self, loaded: LoadedModel) -> EmbeddingService:
        assert isinstance(loaded, EmbeddingRuntime)  # noqa: S101 - of `_load_file`
        return EmbeddingService(loaded, mesh_key=self._config.mesh_key, term=self._config.term)
