"""Link to an encoder of pictures on another host."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import grpc

from mesh.util.fair_turns import FairTurns
from mesh.util.worker_pool import MAX_WAITING
from mesh.vision.encoder import EncodedPicture, rows_of
from mesh.vision.encoder_wire import facts_of, parts_of
from spanmesh_proto import pictures_pb2 as wire
from spanmesh_proto import pictures_pb2_grpc as rpc
from spanmesh_proto.errors import HostUnreachable, InvalidRequest, ProtocolError, RequestError
from stages.transport.channels import key_metadata, open_channel
from stages.transport.links import explain

if TYPE_CHECKING:
    from stages.transport.channels import Identity
    from stages.vision.chunks import PictureParts
    from stages.vision.picture import Picture
    from stages.vision.projector import ProjectorFacts

# One is encoded, the next one is on its way: the others' pixels, up to 48 MB each, stay on this host.
_NUM_UNDER_WAY: Final = 2
_RETRY_AFTER_S: Final = 2
# For pictures under way when the projector moves to another host.
_GRACE_S: Final = 30.0
# Of facts, and of the parts of a picture; of what an answer has beside rows.
_TOLD_BYTES: Final = 2**16
# What a message counts for at least.
_LEAST_BYTES: Final = 2**10
_F32_BYTES: Final = 4


class EncoderLink:
    """A channel to a projector on another host; see `mesh.vision.encoder.PictureEncoder`.

    Its methods raise `HostUnreachable` besides, if the process does not answer.

    Args:
        address: `host:port` of its server.
        host: Name of the host that must answer there.
        mesh_key: Key of the server.
        identity: TLS identity of the head; None within one process.
    """

    def __init__(self, address: str, host: str, mesh_key: str, *, identity: Identity | None) -> None:
        self._host = host
        self._metadata = key_metadata(mesh_key)
        self._channel = open_channel(address, host, identity)
        self._stub = rpc.PicturesStub(self._channel)
        self._turns = FairTurns(_NUM_UNDER_WAY, MAX_WAITING, "pictures", retry_after_s=_RETRY_AFTER_S)
        self._facts: ProjectorFacts | None = None
        self._is_given_up = False

    async def facts(self) -> ProjectorFacts:
        """See `PictureEncoder.facts`."""
        if self._facts is None:
            messages = await self._answers(self._stub.GetFacts, wire.FactsRequest(), None)
            self._facts = facts_of(messages[0])
        return self._facts

    async def parts(self, width: int, height: int, *, client: str | None = None) -> PictureParts:
        """See `PictureEncoder.parts`."""
        request = wire.PartsRequest(width=width, height=height)
        messages = await self._answers(self._stub.GetParts, request, client)
        return parts_of(messages[0])

    async def encode(
        self, picture: Picture, parts: PictureParts, *, client: str | None = None
    ) -> EncodedPicture:
        """See `PictureEncoder.encode`."""
        facts = await self.facts()
        request = wire.EncodeRequest(width=picture.width, height=picture.height, rgb=bytes(picture.rgb))
        num_bytes = parts.num_rows * facts.width * _F32_BYTES
        messages = await self._answers(self._stub.Encode, request, client, num_bytes)
        data = b"".join(message.data for message in messages)
        chunks = await asyncio.to_thread(rows_of, data, parts, facts.width)
        return EncodedPicture(chunks, messages[0].identity)

    async def retire(self) -> None:
        """Close the channel when the pictures under way are encoded, or after half a minute."""
        self._is_given_up = True
        await self._channel.close(_GRACE_S)

    async def close(self) -> None:
        """Close the channel; pictures under way fail."""
        self._is_given_up = True
        await self._channel.close(None)

    async def _answers(
        self, method: Any, request: Any, client: str | None, num_row_bytes: int = 0
    ) -> list[Any]:
        """Messages of an answer, at least one; rows take so many bytes of them."""
        who = f"the encoder of pictures on {self._host}"
        async with self._turns.turn(client):
            if self._is_given_up:
                raise HostUnreachable(f"{who} was given up")
            call = method(request, metadata=self._metadata)
            messages: list[Any] = []
            room_bytes = num_row_bytes + _TOLD_BYTES
            try:
                async for message in call:
                    room_bytes -= max(message.ByteSize(), _LEAST_BYTES)
                    if room_bytes < 0:
                        raise ProtocolError(f"{who} answers with more than a picture has")
                    messages.append(message)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.CANCELLED:
                    raise HostUnreachable(f"{who} was given up") from None
                found = explain(error, who)
                # Both have the same code.
                raise InvalidRequest(found.message) if type(found) is RequestError else found from None
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                # The channel was closed, not this request.
                raise HostUnreachable(f"{who} was given up") from None
            finally:
                # Without effect on a call that is over.
                call.cancel()
        if not messages:
            raise ProtocolError(f"{who} sent no answer: install the same spanmesh on every host")
        return messages
