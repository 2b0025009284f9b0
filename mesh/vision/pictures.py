"""Pictures of requests to one model: from bytes to ids in a prompt, and to rows when these are needed."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mesh.vision.picture_reader import PictureReader
from spanmesh_proto.errors import InvalidRequest
from stages.vision.chunks import PictureParts, ids_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import numpy as np
    from numpy.typing import NDArray

    from mesh.vision.encoder import PictureEncoder
    from spanmesh_proto.image_chunk import ImageChunk
    from stages.vision.picture import Picture

# Chats show the same pictures in each turn. An id takes 40 bytes.
_MOST_REMEMBERED_IDS: Final = 2**18
_MOST_SIZES: Final = 4096


@dataclass(frozen=True)
class PictureLayout:
    """A picture in a prompt."""

    ids: tuple[int, ...]
    """Ids of its rows, and of the tokens around and between them, in order."""
    chunks: tuple[ImageChunk, ...]
    """Its chunks, in order; first rows are counted from `ids[0]` on."""
    load: Callable[[int], Awaitable[NDArray[np.float32]]]
    """Rows of the chunk of this number: float32 (num_rows, width). Encodes the picture, which may fail with a
    `MeshError`; what it is asked for again, it encodes again."""
    is_carried: Callable[[], bool]
    """Whether rows that were loaded are of another encoder than the one that the ids name: it has moved."""


class _Key(NamedTuple):
    """Of what is remembered."""

    client: str | None
    sha256: bytes
    most_side: int
    identity: str


class ModelPictures:
    """Pictures for one model.

    A picture whose rows nothing asks for is not encoded. One that the same client showed before is not even
    decoded; others' are, so that the time of an answer says nothing about them.

    Args:
        encoder: The model's projector.
        reader: Decodes pictures.
    """

    def __init__(self, encoder: PictureEncoder, reader: PictureReader | None = None) -> None:
        self._encoder = encoder
        self._reader = reader or PictureReader()
        self._known: OrderedDict[_Key, tuple[tuple[int, ...], PictureParts]] = OrderedDict()
        self._num_known_ids = 0
        self._sizes: OrderedDict[tuple[int, int], PictureParts] = OrderedDict()

    async def layout(
        self, data: bytes, *, most_side: int = 0, client: str | None = None, param: str | None = None
    ) -> PictureLayout:
        """What becomes of a picture in a prompt.

        Args:
            data: Bytes of a PNG, JPEG, WebP or GIF; kept as long as the layout.
            most_side: Pixels of the longer side to which it is scaled down; 0 for as it is.
            client: Client of the request, for fair turns.
            param: The request's field with the picture, for errors.

        Raises:
            InvalidRequest: If it is not decoded, or the projector takes none of its size.
            Overloaded: If too many pictures wait.
            MeshError: If the projector does not compute.
        """
        identity = (await self._encoder.facts()).identity
        sha256 = await asyncio.to_thread(lambda: hashlib.sha256(data).digest())
        key = _Key(client, sha256, most_side, identity)
        known = self._known.get(key)
        if known is None:
            known = await self._read(data, most_side, identity, client, param)
            self._remember(key, known)
        else:
            self._known.move_to_end(key)
        ids, parts = known
        read = partial(self._reader.read, data, client=client, most_side=most_side)
        rows = _Rows(self._encoder, read, parts, identity)
        return PictureLayout(ids, parts.chunks, partial(rows.load, client), lambda: rows.is_carried)

    async def _read(
        self, data: bytes, most_side: int, identity: str, client: str | None, param: str | None
    ) -> tuple[tuple[int, ...], PictureParts]:
        picture = await self._reader.read(data, client=client, most_side=most_side, param=param)
        try:
            parts = await self._parts(picture.width, picture.height, client)
        except InvalidRequest as error:
            error.param = param
            raise
        return await asyncio.to_thread(ids_of, bytes.fromhex(identity), picture, parts), parts

    async def _parts(self, width: int, height: int, client: str | None) -> PictureParts:
        known = self._sizes.get((width, height))
        if known is None:
            known = await self._encoder.parts(width, height, client=client)
            self._sizes[width, height] = known
            if len(self._sizes) > _MOST_SIZES:
                self._sizes.popitem(last=False)
        return known

    def _remember(self, key: _Key, known: tuple[tuple[int, ...], PictureParts]) -> None:
        if key not in self._known:
            self._num_known_ids += len(known[0])
        self._known[key] = known
        while self._num_known_ids > _MOST_REMEMBERED_IDS:
            _, (ids, _) = self._known.popitem(last=False)
            self._num_known_ids -= len(ids)


class _Rows:
    """Rows of one picture of a request, encoded when the first of its chunks is asked for.

    Args:
        encoder: The model's projector.
        read: Decodes the picture.
        parts: Its parts.
        identity: That of the projector which its ids name.

    Attributes:
        is_carried: See `PictureLayout.is_carried`.
    """

    def __init__(
        self,
        encoder: PictureEncoder,
        read: Callable[[], Awaitable[Picture]],
        parts: PictureParts,
        identity: str,
    ) -> None:
        self.is_carried = False
        self._identity = identity
        self._encoder = encoder
        self._read = read
        self._parts = parts
        self._lock = asyncio.Lock()
        # Of chunks that nothing has asked for since the picture was encoded.
        self._encoded: dict[int, NDArray[np.float32]] = {}

    async def load(self, client: str | None, number: int) -> NDArray[np.float32]:
        """See `PictureLayout.load`."""
        async with self._lock:
            if number not in self._encoded:
                encoded = await self._encoder.encode(await self._read(), self._parts, client=client)
                self.is_carried |= encoded.identity != self._identity
                self._encoded = dict(enumerate(encoded.chunks))
            # They are asked for in order: those before it are cached elsewhere.
            self._encoded = {each: rows for each, rows in self._encoded.items() if each >= number}
            return self._encoded.pop(number)
