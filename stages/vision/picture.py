"""Picture: its pixels, as every part behind the decoder knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from spanmesh_proto.errors import ProtocolError

CHANNELS: Final = 3


@dataclass(frozen=True)
class Picture:
    """Pixels of a picture, upright and without transparency.

    Raises:
        ProtocolError: If there are not as many bytes as pixels.
    """

    width: int
    """Pixels of a row."""
    height: int
    """Rows."""
    rgb: bytes | memoryview
    """Red, green and blue of each pixel, a byte each, row by row from the top left."""

    def __post_init__(self) -> None:
        if min(self.width, self.height) < 1 or len(self.rgb) != self.width * self.height * CHANNELS:
            raise ProtocolError(
                f"a picture of {self.width} × {self.height} pixels came with {len(self.rgb)} bytes"
            )
