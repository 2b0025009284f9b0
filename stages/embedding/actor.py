"""Embedding actor of Ray: fetches and loads one embedding model, and serves it over gRPC."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import structlog

from spanmesh_proto import embedding_pb2 as wire
from spanmesh_proto import embedding_pb2_grpc as rpc
from spanmesh_proto.errors import ClusterError, MeshError, Overloaded, ProtocolError
from stages.cancellable_work import in_own_thread
from stages.embedding.runtime import EmbeddingRuntime
from stages.embedding.vectors import to_bytes
from stages.serving.actor import ModelActor
from stages.transport.channels import HandshakeMonitor, KeyCheck, abort

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import grpc

    from stages.serving.actor import LoadedModel
    from stages.transport.hidden_codec import HiddenType

# The head has two under way, so that one is here when the other is done.
_MOST_CALLS: Final = 16
log = structlog.get_logger()


class EmbeddingService(rpc.EmbeddingServicer):
    """One embedding model: computes a batch of texts for each call.

    Runs in the event loop that made it; llama.cpp runs in a thread.

    Args:
        runtime: The loaded model, which is freed with the service.
        mesh_key: Key that every call must carry.
        term: Term of the head; calls to `rejoin` with a lower one are refused.

    Attributes:
        key_check: Interceptor for its server.
        handshakes: Monitor for its server's connections.
    """

    def __init__(self, runtime: EmbeddingRuntime, *, mesh_key: str, term: int = 0) -> None:
        self.handshakes = HandshakeMonitor()
        self.key_check = KeyCheck(mesh_key, self.handshakes.called)
        self._runtime = runtime
        self._term = term
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embedding")
        self._num_calls = 0
        self._idle_since_s = time.monotonic()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server."""
        rpc.add_EmbeddingServicer_to_server(self, server)

    @property
    def idle_s(self) -> float:
        """Seconds since the last call ended; 0 during one."""
        return 0.0 if self._num_calls else time.monotonic() - self._idle_since_s

    def rejoin(self, mesh_key: str, term: int) -> None:
        """Serve another head from now on; the loaded model stays.

        Args:
            mesh_key: Its key.
            term: Its term.

        Raises:
            ProtocolError: If a head of a higher term took over meanwhile.
        """
        if term < self._term:
            raise ProtocolError(
                f"a head of term {term} asked for an embedding model that serves term {self._term}: another "
                "`mesh serve` has taken over the mesh; stop the older one"
            )
        self._term = term
        self.key_check.replace(mesh_key)

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
        if self._num_calls >= _MOST_CALLS:
            raise Overloaded(f"{_MOST_CALLS} batches wait here: send fewer at a time")
        texts = [list(text.tokens) for text in request.inputs]
        self._runtime.check(texts)
        self._num_calls += 1
        try:
            # If the call is cancelled before its turn, the thread never sees it.
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._embedded, texts)
        finally:
            self._num_calls -= 1
            self._idle_since_s = time.monotonic()

    def _embedded(self, texts: list[list[int]]) -> wire.Vectors:
        rows = self._runtime.embed(texts)
        return wire.Vectors(
            rows=to_bytes(rows),
            width=rows.shape[1],
            compute_us=self._runtime.compute_us,
        )


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
