"""Encoder of pictures wherever it is: on another host while there is one for it, else on the head."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn, Protocol

import structlog

from mesh.vision.encoder import PictureEncoder
from spanmesh_proto.errors import HostUnreachable, StageFailed

if TYPE_CHECKING:
    from mesh.vision.encoder import EncodedPicture
    from spanmesh_proto.errors import MeshError
    from stages.vision.chunks import PictureParts
    from stages.vision.picture import Picture
    from stages.vision.projector import ProjectorFacts

log = structlog.get_logger()


class OwnEncoder(PictureEncoder, Protocol):
    """The head's own process; see `mesh.vision.encoder.EncoderProcess`."""

    async def rest(self) -> None:
        """End the process until the next picture."""


class PlacedEncoder:
    """The encoder of a model: on another host while there is one for it, else in a process of the head.

    A picture whose host is lost is encoded once more, on the head: nothing waits until another host has the
    projector. One that ends the projector's process, on whatever host, is answered with the error and encoded
    nowhere else.

    Args:
        own: The head's process, which ends while another host encodes.
    """

    def __init__(self, own: OwnEncoder) -> None:
        self._own = own
        self._link: PictureEncoder | None = None
        self._broken = asyncio.Event()
        self._failure: MeshError | None = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether another host encodes."""
        return self._link is not None

    async def facts(self) -> ProjectorFacts:
        """See `PictureEncoder.facts`."""
        link = self._link
        return await (self._own if link is None else link).facts()

    async def parts(self, width: int, height: int, *, client: str | None = None) -> PictureParts:
        """See `PictureEncoder.parts`."""
        if (link := self._link) is not None:
            try:
                return await link.parts(width, height, client=client)
            except HostUnreachable as error:
                self._lose(link, error)
        return await self._own.parts(width, height, client=client)

    async def encode(
        self, picture: Picture, parts: PictureParts, *, client: str | None = None
    ) -> EncodedPicture:
        """See `PictureEncoder.encode`."""
        if (link := self._link) is not None:
            try:
                return await link.encode(picture, parts, client=client)
            except HostUnreachable as error:
                self._lose(link, error)
        return await self._own.encode(picture, parts, client=client)

    async def resume(self, link: PictureEncoder) -> None:
        """Encode on another host from now on.

        Raises:
            MeshError: If it does not answer.
        """
        await link.facts()
        self._failure, self._link = None, link
        self._broken.clear()
        await self._own.rest()

    def suspend(self) -> None:
        """Encode on the head from now on."""
        self._link = None

    def give_up(self, error: MeshError) -> None:
        """Encode on the head from now on, since no other host can."""
        del error
        self._link = None

    async def broken(self) -> MeshError:
        """Return the reason when the other host does not answer."""
        await self._broken.wait()
        return self._failure or StageFailed("the encoder of pictures does not answer")

    async def run(self) -> NoReturn:
        """Wait until cancelled: requests do the work."""
        await asyncio.Event().wait()
        raise StageFailed("the encoder of pictures ended unexpectedly")

    def _lose(self, link: PictureEncoder, error: MeshError) -> None:
        if link is self._link:
            log.warning("picture_encoded_on_head", reason=error.message)
            self._link, self._failure = None, error
            self._broken.set()
