"""Process that decodes pictures of clients, for `mesh.vision.picture_reader`: bytes to pixels, or a reason.

Four formats and no others. The header tells the size, which is bounded before pixels are decoded. The process
has no environment, and by `mesh.util.confinement` neither files nor network where the system can do that; see
`mesh.util.worker_main` for its other bounds.
"""

from __future__ import annotations

import io
from functools import cache
from typing import Final

from PIL import Image, UnidentifiedImageError

from mesh.util.confinement import confine
from mesh.vision.picture_frames import ANSWER, JOB, MOST_PIXELS, MOST_RATIO

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
_WEBP_HEADER_BYTES: Final = 30
_ORIENTATION: Final = 0x0112
# By EXIF's orientation: what turns the stored picture upright.
_TURNS: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class _Refusal(Exception):
    """A picture that is not decoded, and why."""


def handle(header: bytes, payload: bytes) -> bytes:
    """Answer a job: `JOB` and the bytes of a picture; `ANSWER` and pixels, or a reason, of the answer."""
    _prepare()
    (most_side,) = JOB.unpack(header)
    try:
        picture = _decoded(payload, most_side)
    except MemoryError:
        raise
    except _Refusal as refusal:
        return ANSWER.pack(0, 0) + str(refusal).encode()
    except Exception as error:  # noqa: BLE001 - decoders of foreign bytes raise whatever they come upon
        reason = f"is damaged ({str(error)[:200] or type(error).__name__})"
        return ANSWER.pack(0, 0) + reason.encode(errors="replace")
    return ANSWER.pack(picture.width, picture.height) + picture.tobytes()


@cache
def _prepare() -> None:
    """Decode a picture of each format, so that everything is imported, and confine the process."""
    # Sizes are checked here, with messages of ours.
    Image.MAX_IMAGE_PIXELS = None
    picture = Image.new("RGBA", (8, 8))
    exif = Image.Exif()
    exif[_ORIENTATION] = 6
    for kind in FORMATS:
        out = io.BytesIO()
        (picture.convert("RGB") if kind == "JPEG" else picture).save(out, kind, exif=exif)
        _decoded(out.getvalue(), 4)
    confine()


def _decoded(data: bytes, most_side: int) -> Image.Image:
    # Pillow tells a WebP's size only when it has memory for all pixels.
    if (size := _webp_size(data)) is not None:
        _check_size(*size)
    try:
        opened = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise _Refusal("is no PNG, JPEG, WebP or GIF") from None
    with opened:
        _check_size(*opened.size)
        # Of several frames the first one.
        opened.load()
        picture = _opaque(opened)
        turn = _TURNS.get(_orientation(opened))
    if turn is not None:
        picture = picture.transpose(turn)
    if most_side:
        picture.thumbnail((most_side, most_side))
    return picture


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """Width and height in the header of a WebP; None if it is none.

    Format: https://developers.google.com/speed/webp/docs/riff_container.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < _WEBP_HEADER_BYTES:
        return None
    match data[12:16]:
        case b"VP8X":
            return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
        case b"VP8L":
            both = int.from_bytes(data[21:25], "little")
            return (both & 0x3FFF) + 1, (both >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            width, height = (int.from_bytes(data[at : at + 2], "little") & 0x3FFF for at in (26, 28))
            return width, height
    return None


def _check_size(width: int, height: int) -> None:
    if min(width, height) < 1:
        raise _Refusal(f"has {width} × {height} pixels, and needs one at least")
    if width * height > MOST_PIXELS:
        raise _Refusal(
            f"has {width} × {height} pixels, {MOST_PIXELS // 2**20} megapixels are the most: scale it down"
        )
    if max(width, height) > MOST_RATIO * min(width, height):
        raise _Refusal(
            f"has {width} × {height} pixels, and one side may be {MOST_RATIO} times the other: cut it up"
        )


def _orientation(opened: Image.Image) -> int:
    try:
        return int(opened.getexif().get(_ORIENTATION, 1))
    except Exception:  # noqa: BLE001 - a picture is of use without what its camera wrote beside it
        return 1


def _opaque(picture: Image.Image) -> Image.Image:
    """The picture in RGB, what is transparent over white."""
    if picture.mode.startswith("I"):
        # Greys of 16 bits: the upper eight.
        return picture.point(lambda grey: grey / 256).convert("L").convert("RGB")
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
