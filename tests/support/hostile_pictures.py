"""Pictures as hostile clients send them: bombs, cut and changed files, false sizes, other formats."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import TYPE_CHECKING, Any, Final

from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KINDS: Final = ("PNG", "JPEG", "WEBP", "GIF")
# Where a file of this kind has its size, and how.
_SIZES: Final = {"PNG": (16, ">II"), "JPEG": (-1, ">HH"), "WEBP": (26, "<HH"), "GIF": (6, "<HH")}
_EXTREMES: Final = (0, 1, 2, 255, 3000, 16383, 32767, 65535, 2**31 - 1, 2**32 - 1)


def saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def photograph(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours with some noise: compressed it is neither tiny nor large."""
    noise = random.Random(seed).randbytes(64 * 64 * 3)
    return Image.frombytes("RGB", (64, 64), noise).resize((width, height), Image.Resampling.BICUBIC)


def png(width: int, height: int, pixels: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of 24 bits a pixel with this header, these compressed pixels, and other chunks before them."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), *chunks, (b"IDAT", pixels), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in parts
    )


def squeezed(num_bytes: int) -> bytes:
    """So many zeros, compressed."""
    squeezer = zlib.compressobj(9)
    blocks = [squeezer.compress(bytes(min(2**20, num_bytes - at))) for at in range(0, num_bytes, 2**20)]
    return b"".join((*blocks, squeezer.flush()))


def webp(kind: str, width: int, height: int) -> bytes:
    """A small WebP whose header tells this size: its canvas's (VP8X), or its frame's, without loss (VP8L)."""
    data = bytearray(saved(photograph(40, 30), "WEBP", lossless=kind == "VP8L"))
    if kind == "VP8L":
        struct.pack_into("<I", data, 21, width - 1 | height - 1 << 14)
    elif kind == "VP8 ":
        struct.pack_into("<HH", data, 26, width, height)
    else:
        canvas = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
        data[12:12] = b"VP8X" + struct.pack("<I", len(canvas)) + canvas
        struct.pack_into("<I", data, 4, len(data) - 8)
    return bytes(data)


def _gif(num_frames: int) -> bytes:
    frames = [Image.new("P", (400, 300), shade % 256) for shade in range(num_frames)]
    return saved(frames[0], "GIF", save_all=True, append_images=frames[1:])


REFUSED: Final[dict[str, tuple[Callable[[], bytes], str]]] = {
    "nothing": (lambda: b"", "is no PNG, JPEG, WebP or GIF"),
    "TIFF": (lambda: saved(photograph(40, 30), "TIFF"), "is no PNG"),
    "BMP": (lambda: saved(photograph(40, 30), "BMP"), "is no PNG"),
    "ICO": (lambda: saved(photograph(40, 30), "ICO"), "is no PNG"),
    "TGA": (lambda: saved(photograph(40, 30), "TGA"), "is no PNG"),
    "SVG": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no PNG"),
    "PostScript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\n", "is no PNG"),
    "a program": (lambda: b"\x7fELF" + bytes(4000), "is no PNG"),
    "all bytes": (lambda: bytes(range(256)) * 4000, "is no PNG"),
    "too many bytes": (lambda: bytes(20 * 2**20 + 1), "20971520 are the most"),
    "a bomb": (lambda: png(12_000, 12_000, squeezed(2**24)), "12000 × 12000 pixels, 16 megapixels"),
    "a size beyond all": (lambda: png(2**31 - 1, 2**31 - 1, b"x"), "16 megapixels are the most"),
    "no width": (lambda: png(0, 30, squeezed(30)), ""),
    "fewer pixels than told": (lambda: png(4000, 4000, squeezed(2**20)), "is damaged"),
    "text of 64 MB": (
        lambda: png(40, 30, squeezed(30 * 121), (b"zTXt", b"Comment\0\0" + squeezed(2**26))),
        "is damaged",
    ),
    "a profile of 64 MB": (
        lambda: png(40, 30, b"x", (b"iCCP", b"icc\0\0" + squeezed(2**26))),
        "is damaged",
    ),
    "1 × 3000": (lambda: saved(Image.new("RGB", (1, 3000)), "PNG"), "100 times the other"),
    "3000 × 1": (lambda: saved(Image.new("RGB", (3000, 1)), "GIF"), "100 times the other"),
    "a JPEG of 60000 × 60": (lambda: saved(Image.new("L", (60_000, 60)), "JPEG"), "100 times the other"),
    "a GIF's screen of 65535²": (
        lambda: b"GIF89a" + struct.pack("<HH", 65535, 65535) + _gif(1)[10:],
        "16 megapixels are the most",
    ),
    "a WebP's canvas of 2²⁴": (lambda: webp("VP8X", 2**24, 2**24), "16 megapixels are the most"),
    "a WebP of 16383²": (lambda: webp("VP8 ", 16383, 16383), "16383 × 16383 pixels, 16 megapixels are"),
    "a WebP of 16384 × 5000": (lambda: webp("VP8L", 16384, 5000), "16384 × 5000 pixels, 16 megapixels are"),
    "a WebP's canvas that is a strip": (lambda: webp("VP8X", 4000, 30), "4000 × 30 pixels, and one side"),
    "half a JPEG": (lambda: saved(photograph(400, 300), "JPEG")[:3000], "is damaged"),
    "half a PNG": (lambda: saved(photograph(400, 300), "PNG")[:3000], "is damaged"),
    "half a WebP": (lambda: saved(photograph(400, 300), "WEBP")[:1500], "is damaged"),
    "the start of a GIF": (lambda: _gif(300)[:40], ""),
}
"""By name: makes a picture, and a part of the reason for which it is refused."""


def changed(seed: int) -> Iterator[bytes]:
    """Pictures without end, each a valid one with some changes; some of them are pictures still."""
    chance = random.Random(seed)
    originals = _originals(seed)
    while True:
        kind = chance.choice(KINDS)
        data = bytearray(chance.choice(originals[kind]))
        for _ in range(chance.choice((1, 1, 2, 5, 20))):
            _change(data, kind, chance)
        yield bytes(data)


def _originals(seed: int) -> dict[str, list[bytes]]:
    picture = photograph(57, 43, seed)
    exif = Image.Exif()
    exif[0x0112] = 6
    greys, palette = picture.convert("L"), picture.convert("P")
    clear = picture.convert("RGBA")
    clear.putalpha(greys)
    deep = greys.convert("I").point(lambda grey: grey * 257).convert("I;16")
    frames = [photograph(57, 43, seed + number) for number in range(1, 4)]
    moving = {"save_all": True, "append_images": frames}
    return {
        "PNG": [
            *(saved(each, "PNG", exif=exif) for each in (picture, greys, palette, clear, deep)),
            saved(palette, "PNG", transparency=3),
            saved(picture, "PNG", **moving),
        ],
        "JPEG": [
            saved(picture, "JPEG", exif=exif, progressive=True),
            saved(greys, "JPEG"),
            saved(picture.convert("CMYK"), "JPEG"),
        ],
        "WEBP": [
            saved(picture, "WEBP", exif=exif),
            saved(clear, "WEBP", lossless=True),
            saved(picture, "WEBP", **moving),
        ],
        "GIF": [saved(palette, "GIF", transparency=5), saved(picture, "GIF", **moving)],
    }


def _change(data: bytearray, kind: str, chance: random.Random) -> None:
    if len(data) < 16:
        return
    at = chance.randrange(len(data))
    match chance.randrange(7):
        case 0:
            del data[at:]
        case 1:
            data[at] ^= 1 << chance.randrange(8)
        case 2:
            data[at : at + 4] = struct.pack(">I", chance.choice(_EXTREMES))
        case 3:
            data[at:at] = chance.randbytes(chance.randrange(1, 64))
        case 4:
            del data[at : at + chance.randrange(1, 64)]
        case 5:
            other = chance.randrange(len(data))
            data[at : at + 32] = data[other : other + 32]
        case 6:
            _tell_other_size(data, kind, chance)
    if kind == "PNG":
        _mend_sums(data)


def _tell_other_size(data: bytearray, kind: str, chance: random.Random) -> None:
    at, form = _SIZES[kind]
    if kind == "JPEG":
        at = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2")) + 5
    most = 2 ** (8 * struct.calcsize(form) // 2) - 1
    if len(data) >= at + 8 > 8:
        struct.pack_into(form, data, at, *(min(most, chance.choice(_EXTREMES)) for _ in range(2)))


def _mend_sums(data: bytearray) -> None:
    """Sums of a PNG's chunks as they should be, so that decoders read on."""
    at = 8
    while at + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        if at + 12 + length > len(data):
            return
        struct.pack_into(">I", data, at + 8 + length, zlib.crc32(data[at + 4 : at + 8 + length]))
        at += 12 + length
