"""Actor of Ray that holds an encoder of pictures on its host, and serves it over gRPC.

The projector computes in a process of its own, as on the head: a picture that ends that process is an error
of one call, and costs no repair of the mesh.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import structlog

from mesh.vision.encoder import EncoderProcess
from mesh.vision.encoder_wire import facts_to_wire, parts_to_wire
from mesh.vision.picture_frames import MOST_PIXELS
from spanmesh_proto import pictures_pb2 as wire
from spanmesh_proto import pictures_pb2_grpc as rpc
from spanmesh_proto.errors import ClusterError, InvalidRequest, MeshError, ProtocolError
from stages.cancellable_work import in_own_thread
from stages.serving.actor import StageConfig
from stages.serving.head_service import HeadActor, HeadService
from stages.transport.channels import abort
from stages.vision.picture import Picture
from stages.vision.projector import ProjectorOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import grpc

    from stages.serving.actor import LoadedModel

# The head has two under way, and asks for sizes.
_MOST_CALLS: Final = 16
_MESSAGE_BYTES: Final = 4 * 2**20
log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(StageConfig):
    """Configuration of an encoder: its file is the projector, the second one its model without weights."""

    most_tokens: int
    """See `ProjectorOptions.most_tokens`."""


class EncoderService(HeadService, rpc.PicturesServicer):
    """One encoder of pictures, which encodes them one after the other.

    Args:
        encoder: The projector, which ends with the service.
        mesh_key: See `HeadService`.
        term: See `HeadService`.
    """

    def __init__(self, encoder: EncoderProcess, *, mesh_key: str, term: int = 0) -> None:
        super().__init__("an encoder of pictures", mesh_key=mesh_key, term=term, most_calls=_MOST_CALLS)
        self._encoder = encoder

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server."""
        rpc.add_PicturesServicer_to_server(self, server)

    async def GetFacts(  # noqa: N802 - the name in the .proto
        self,
        request: wire.FactsRequest | None,
        context: grpc.aio.ServicerContext[wire.FactsRequest, wire.Facts],
    ) -> AsyncIterator[wire.Facts]:
        """Facts of the projector."""
        async for answer in self._answered(self._facts(request), context):
            yield answer

    async def GetParts(  # noqa: N802 - the name in the .proto
        self,
        request: wire.PartsRequest | None,
        context: grpc.aio.ServicerContext[wire.PartsRequest, wire.Parts],
    ) -> AsyncIterator[wire.Parts]:
        """What becomes of a picture of some size."""
        async for answer in self._answered(self._parts(request), context):
            yield answer

    async def Encode(  # noqa: N802 - the name in the .proto
        self,
        request: wire.EncodeRequest | None,
        context: grpc.aio.ServicerContext[wire.EncodeRequest, wire.Rows],
    ) -> AsyncIterator[wire.Rows]:
        """Rows of a picture."""
        async for answer in self._answered(self._rows(request), context):
            yield answer

    async def close(self) -> None:
        """End the process of the projector."""
        await in_own_thread(self._encoder.close)

    async def _answered(
        self, answers: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        self.handshakes.called(context.peer())
        try:
            with self.calling():
                async for answer in answers:
                    yield answer
        except MeshError as error:
            log.warning("picture_failed", peer=context.peer(), reason=error.message)
            await abort(context, error)

    async def _facts(self, request: wire.FactsRequest | None) -> AsyncIterator[wire.Facts]:
        _require(request)
        yield facts_to_wire(await self._encoder.facts())

    async def _parts(self, request: wire.PartsRequest | None) -> AsyncIterator[wire.Parts]:
        wanted = _require(request)
        _check_size(wanted.width, wanted.height)
        yield parts_to_wire(await self._encoder.parts(wanted.width, wanted.height))

    async def _rows(self, request: wire.EncodeRequest | None) -> AsyncIterator[wire.Rows]:
        wanted = _require(request)
        _check_size(wanted.width, wanted.height)
        picture = Picture(wanted.width, wanted.height, wanted.rgb)
        parts = await self._encoder.parts(picture.width, picture.height)
        encoded = await self._encoder.encode(picture, parts)
        data = await asyncio.to_thread(
            lambda: b"".join(each.astype("<f4", copy=False).tobytes() for each in encoded.chunks)
        )
        for start in range(0, len(data), _MESSAGE_BYTES):
            yield wire.Rows(
                data=data[start : start + _MESSAGE_BYTES], identity="" if start else encoded.identity
            )


class EncoderActor(HeadActor):
    """One encoder of pictures on this host; see `ModelActor`."""

    def _load_file(self, path: Path) -> EncoderProcess:
        config, model = self._config, self._second_path
        if not isinstance(config, EncoderConfig) or model is None:
            raise ClusterError("an encoder of pictures was placed without its model: start the head again")
        gpus = config.memory.gpus
        encoder = EncoderProcess(
            ProjectorOptions(
                str(path),
                str(model),
                config.options.num_threads,
                device=gpus[0].device if gpus else None,
                most_tokens=config.most_tokens,
            )
        )
        try:
            # It is loaded for them, and tried out.
            asyncio.run(encoder.facts())
        except BaseException:
            encoder.close()
            raise
        return encoder

    def _make_service(self, loaded: LoadedModel) -> EncoderService:
        assert isinstance(loaded, EncoderProcess)  # noqa: S101 - of `_load_file`
        return EncoderService(loaded, mesh_key=self._config.mesh_key, term=self._config.term)

    @property
    def _less(self) -> str:
        return "lower --image-max-tokens, name another --mmproj-host"


def _require(request: Any) -> Any:
    """A request that was decoded.

    Raises:
        ProtocolError: If it was none.
    """
    if request is None:
        raise ProtocolError("the peer sent bytes that are not a message of this protocol")
    return request


def _check_size(width: int, height: int) -> None:
    """Check that a picture of this size may be encoded.

    Raises:
        InvalidRequest: If it is too large, or none.
    """
    if min(width, height) < 1 or width * height > MOST_PIXELS:
        raise InvalidRequest(f"a picture of {width} × {height} pixels: 1 to {MOST_PIXELS} pixels work")
