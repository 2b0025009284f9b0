"""Link to the process that holds an embedding model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import grpc

from spanmesh_proto import embedding_pb2 as wire
from spanmesh_proto import embedding_pb2_grpc as rpc
from spanmesh_proto.errors import ProtocolError
from stages.embedding.vectors import from_bytes
from stages.transport.channels import key_metadata, open_channel
from stages.transport.links import explain

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from stages.transport.channels import Identity

# For batches under way when the model moves to another host.
_GRACE_S: Final = 30.0


@dataclass(frozen=True)
class ComputedBatch:
    """Vectors of a batch."""

    rows: NDArray[np.float32]
    """float32 (texts, width), each row of Euclidean length 1."""
    compute_s: float
    """Time that llama.cpp computed, in seconds."""


class BatchLink(Protocol):
    """Computes batches."""

    async def embed(self, texts: Sequence[Sequence[int]]) -> ComputedBatch:
        """Vectors of a batch of texts. Cancelling it before its turn saves computing it.

        Raises:
            HostUnreachable: If the process does not answer.
            MeshError: If it fails.
        """


class EmbeddingLink:
    """A channel to one embedding model.

    Args:
        address: `host:port` of its server.
        host: Name of the host that must answer there.
        mesh_key: Key of the model's server.
        identity: TLS identity of the head; None within one process.
        width: Numbers of a vector.
    """

    def __init__(
        self, address: str, host: str, mesh_key: str, *, identity: Identity | None, width: int
    ) -> None:
        self._host = host
        self._metadata = key_metadata(mesh_key)
        self._width = width
        self._channel = open_channel(address, host, identity)
        self._stub = rpc.EmbeddingStub(self._channel)

    async def embed(self, texts: Sequence[Sequence[int]]) -> ComputedBatch:
        """Vectors of a batch of texts; see `BatchLink.embed`."""
        request = wire.EmbedRequest(inputs=[wire.Input(tokens=tokens) for tokens in texts])
        call = self._stub.Embed(request, metadata=self._metadata)
        try:
            answers = [vectors async for vectors in call]
        except grpc.aio.AioRpcError as error:
            raise explain(error, f"the embedding model on {self._host}") from None
        finally:
            # Without effect on a call that is over.
            call.cancel()
        if len(answers) != 1 or answers[0].width != self._width:
            raise ProtocolError(
                f"the embedding model on {self._host} sent {len(answers)} answers with vectors of "
                f"{[answer.width for answer in answers]} numbers, expected one with {self._width}"
            )
        return ComputedBatch(
            from_bytes(answers[0].rows, len(texts), self._width), answers[0].compute_us / 1e6
        )

    async def retire(self) -> None:
        """Close the channel when the batches under way are computed, or after half a minute."""
        await self._channel.close(_GRACE_S)

    async def close(self) -> None:
        """Close the channel; batches under way fail."""
        await self._channel.close(None)
