"""Chunks of a picture: how many rows of a prompt it becomes, between which tokens, and under which ids.

A picture becomes rows of the projector, which enter the first stage in place of embeddings of tokens. Rows
that belong together, those of a picture or of one slice of it, are a chunk. A row is not a position: under
M-RoPE the rows of a chunk lie in a grid, which takes as many positions as its longer side.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from spanmesh_proto.image_chunk import ImageChunk
from spanmesh_proto.row_ids import FIRST_ROW_ID

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stages.vision.picture import Picture

# Raised when ids of the same rows are to differ from those of before.
_VERSION: Final = b"spanmesh picture rows 1"
_SIZE: Final = struct.Struct("<II")
_NUMBER: Final = struct.Struct("<I")

Part: TypeAlias = "tuple[int, ...] | ImageChunk"
"""Ids of tokens, or a chunk."""


@dataclass(frozen=True)
class PictureParts:
    """What becomes of a picture of some size, whatever its pixels are."""

    parts: tuple[Part, ...]
    """In order; first rows of chunks are counted, tokens included, from the picture's own first row on."""

    @property
    def chunks(self) -> tuple[ImageChunk, ...]:
        """Its chunks, in order."""
        return tuple(part for part in self.parts if isinstance(part, ImageChunk))

    @property
    def tokens(self) -> tuple[int, ...]:
        """Ids of its tokens."""
        return tuple(token for part in self.parts if not isinstance(part, ImageChunk) for token in part)

    @property
    def num_rows(self) -> int:
        """Rows of all chunks."""
        return sum(chunk.num_rows for chunk in self.chunks)

    def told(self) -> list[Any]:
        """For JSON."""
        return [asdict(part) if isinstance(part, ImageChunk) else part for part in self.parts]

    @classmethod
    def of(cls, told: Sequence[Any]) -> PictureParts:
        """The parts of `told`."""
        return cls(tuple(ImageChunk(**part) if isinstance(part, dict) else tuple(part) for part in told))


def encoder_identity(projector_sha256: bytes, library: bytes, settings: str) -> bytes:
    """Digest of everything besides pixels that rows depend on, 32 bytes.

    Args:
        projector_sha256: SHA-256 of what the projector's file holds.
        library: SHA-256 of libmtmd's file.
        settings: What the preprocessor was told, and what computes.
    """
    digest = hashlib.sha256(_VERSION + projector_sha256 + library)
    digest.update(settings.encode())
    return digest.digest()


def ids_of(identity: bytes, picture: Picture, parts: PictureParts) -> tuple[int, ...]:
    """Ids of a picture's rows, and of the tokens beside them.

    Ids of rows are above those of all tokens, and equal where pixels and encoder are equal. Where all ids of
    a chunk agree, so do its rows, as far as SHA-256 can tell: each id has 31 bits of a stream of SHAKE-256
    over the chunk's digest.

    Args:
        identity: See `encoder_identity`.
        picture: The picture.
        parts: Its parts.
    """
    pixels = hashlib.sha256(_SIZE.pack(picture.width, picture.height))
    pixels.update(picture.rgb)
    whole = identity + pixels.digest()
    ids: list[int] = []
    number = 0
    for part in parts.parts:
        if isinstance(part, ImageChunk):
            ids.extend(_row_ids(whole, number, part.num_rows))
            number += 1
        else:
            ids.extend(part)
    return tuple(ids)


def _row_ids(whole: bytes, number: int, num_rows: int) -> list[int]:
    digest = hashlib.sha256(whole + _NUMBER.pack(number)).digest()
    stream = np.frombuffer(hashlib.shake_256(digest).digest(4 * num_rows), "<u4")
    found: list[int] = (stream | np.uint32(FIRST_ROW_ID)).tolist()
    return found
