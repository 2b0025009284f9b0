"""Encoder of pictures wherever it is: on another host while there is one for it, else on the head."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NoReturn, Protocol, TypeVar

import structlog

from mesh.vision.encoder import PictureEncoder
from spanmesh_proto.errors import ClusterError, HostUnreachable, ProtocolError, StageFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mesh.vision.encoder import EncodedPicture
    from spanmesh_proto.errors import MeshError
    from stages.vision.chunks import PictureParts
    from stages.vision.picture import Picture
    from stages.vision.projector import ProjectorFacts

# That of the picture, and the one that the encoder has moved to meanwhile.
_MOST_HOSTS: Final = 2
_Answer = TypeVar("_Answer")

log = structlog.get_logger()


class OwnEncoder(PictureEncoder, Protocol):
    """The head's own process; see `mesh.vision.encoder.EncoderProcess`."""

    async def rest(self) -> None:
        """End the process until the next picture."""


class PlacedEncoder:
    """The encoder of a model: on another host while there is one for it, else in a process of the head.

    A picture whose host is lost, or does not compute, is encoded once more, on the head: nothing waits until
    another host has the projector. If the encoder has moved meanwhile, its new host comes before the head. A
    picture that ends the projector's process, on whatever host, is answered with the error and encoded
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
        return await self._answered(lambda encoder: encoder.parts(width, height, client=client))

    async def encode(
        self, picture: Picture, parts: PictureParts, *, client: str | None = None
    ) -> EncodedPicture:
        """See `PictureEncoder.encode`."""
        return await self._answered(lambda encoder: encoder.encode(picture, parts, client=client))

    async def resume(self, link: PictureEncoder) -> None:
        """Encode on another host from now on.

        Raises:
            MeshError: If it does not answer, or has another projector.
        """
        facts, own = await link.facts(), await self._own.facts()
        if replace(facts, identity=own.identity, device=own.device) != own:
            raise ProtocolError(f"an encoder of pictures tells {facts}, and the head's own {own}")
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

    async def _answered(self, ask: Callable[[PictureEncoder], Awaitable[_Answer]]) -> _Answer:
        """Answer of another host while one encodes, else of the head's process."""
        asked: PictureEncoder | None = None
        for _ in range(_MOST_HOSTS):
            if (link := self._link) is None or link is asked:
                break
            asked = link
            try:
                return await ask(link)
            except HostUnreachable as error:
                self._lose(link, error)
            except ClusterError as error:
                log.warning("picture_encoded_on_head", reason=error.message)
        return await ask(self._own)

    def _lose(self, link: PictureEncoder, error: MeshError) -> None:
        if link is self._link:
            log.warning("picture_encoded_on_head", reason=error.message)
            self._link, self._failure = None, error
            self._broken.set()
