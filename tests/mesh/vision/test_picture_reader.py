"""Pictures of clients: what becomes of their pixels, what is refused, and what hostile ones do not do."""

from __future__ import annotations

import asyncio
import io
import struct
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import psutil
import pytest
from PIL import Image

from mesh.util.worker_pool import WorkerPool
from mesh.vision.picture_reader import PictureReader, shared_picture_pool
from spanmesh_proto.errors import InvalidRequest, ProtocolError
from stages.vision.picture import Picture
from tests.support.hostile_pictures import REFUSED, changed, photograph, png, saved, squeezed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
# Of one process; its address space may have 1 GiB.
MOST_RESIDENT_BYTES: Final = 600 * 2**20


@pytest.fixture(scope="module")
def reader() -> Iterator[PictureReader]:
    shared_picture_pool.cache_clear()
    yield PictureReader()
    shared_picture_pool().close()
    shared_picture_pool.cache_clear()


def read(reader: PictureReader, data: bytes, most_side: int = 0) -> NDArray[np.uint8]:
    """uint8 (height, width, 3)."""
    picture = asyncio.run(reader.read(data, most_side=most_side))
    return np.frombuffer(picture.rgb, np.uint8).reshape(picture.height, picture.width, 3)


def corners() -> Image.Image:
    """3 × 2 pixels, black but for three corners: red, green to its right, blue below it."""
    picture = Image.new("RGB", (3, 2))
    picture.putpixel((0, 0), RED)
    picture.putpixel((2, 0), GREEN)
    picture.putpixel((0, 1), BLUE)
    return picture


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("GIF", {})])
def test_pixels_come_through_as_they_are(reader: PictureReader, kind: str, options: dict[str, bool]) -> None:
    pixels = read(reader, saved(corners(), kind, **options))
    assert np.array_equal(pixels, np.asarray(corners()))


def test_a_jpeg_comes_as_pillow_decodes_it(reader: PictureReader) -> None:
    data = saved(photograph(300, 200), "JPEG")
    assert np.array_equal(read(reader, data), np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_picture_is_turned_upright(reader: PictureReader, kind: str, orientation: int) -> None:
    """Stored as a camera stores it: turned the other way."""
    turns: dict[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
        1: lambda pixels: pixels,
        2: lambda pixels: pixels[:, ::-1],
        3: lambda pixels: pixels[::-1, ::-1],
        4: lambda pixels: pixels[::-1],
        5: lambda pixels: pixels.transpose(1, 0, 2),
        6: lambda pixels: np.rot90(pixels, 1),
        7: lambda pixels: np.rot90(pixels, 2).transpose(1, 0, 2),
        8: lambda pixels: np.rot90(pixels, -1),
    }
    upright = np.asarray(corners().resize((48, 32), Image.Resampling.NEAREST))
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 100} if kind == "JPEG" else {"lossless": True} if kind == "WEBP" else {}
    stored = Image.fromarray(np.ascontiguousarray(turns[orientation](upright)))
    pixels = read(reader, saved(stored, kind, exif=exif, **options))
    assert pixels.shape == upright.shape
    middle = pixels[8::16, 8::16].astype(int)
    assert np.abs(middle - upright[8::16, 8::16]).max() < 40


def _clear(kind: str) -> bytes:
    if kind in {"PNG", "WEBP"}:
        picture = Image.new("RGBA", (2, 1), (*RED, 255))
        picture.putpixel((1, 0), (*BLUE, 0))
        return saved(picture, kind, lossless=True)
    picture = Image.new("P", (2, 1))
    picture.putpalette([*RED, *BLUE])
    picture.putpixel((1, 0), 1)
    return saved(picture, kind.removesuffix(" palette"), transparency=1)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "PNG palette"])
def test_what_is_transparent_is_white(reader: PictureReader, kind: str) -> None:
    assert read(reader, _clear(kind)).tolist() == [[list(RED), list(WHITE)]]


def test_half_transparent_is_half_white(reader: PictureReader) -> None:
    picture = Image.new("LA", (1, 1), (0, 128))
    assert np.abs(read(reader, saved(picture, "PNG")).astype(int) - 127).max() <= 1


@pytest.mark.parametrize(
    ("picture", "colour"),
    [
        (Image.new("1", (1, 1), 1), WHITE),
        (Image.new("L", (1, 1), 77), (77, 77, 77)),
        (Image.new("I;16", (1, 1), 40_000), (156, 156, 156)),
    ],
    ids=lambda value: getattr(value, "mode", None),
)
def test_greys_of_1_8_and_16_bits(
    reader: PictureReader, picture: Image.Image, colour: tuple[int, int, int]
) -> None:
    assert read(reader, saved(picture, "PNG")).tolist() == [[list(colour)]]


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
def test_of_several_frames_the_first_counts(reader: PictureReader, kind: str) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in (GREEN, RED)]
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
    assert read(reader, data)[0, 0].tolist() == list(GREEN)


def test_a_picture_is_scaled_down_to_the_side_that_is_wanted(reader: PictureReader) -> None:
    data = saved(photograph(300, 100), "PNG")
    assert read(reader, data, most_side=150).shape == (50, 150, 3)
    assert read(reader, data, most_side=512).shape == (100, 300, 3)


@pytest.mark.parametrize(("width", "height"), [(4096, 4096), (1, 100), (1600, 16)])
def test_the_largest_and_the_longest_are_read(reader: PictureReader, width: int, height: int) -> None:
    assert read(reader, saved(Image.new("L", (width, height)), "PNG")).shape == (height, width, 3)


def test_a_damaged_orientation_costs_no_picture(reader: PictureReader) -> None:
    data = saved(corners(), "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff" + bytes(40))
    assert read(reader, data)[0, 0].tolist() == list(RED)


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_picture_is_refused_with_a_reason(reader: PictureReader, name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(InvalidRequest) as caught:
        asyncio.run(reader.read(make(), param="messages"))
    assert caught.value.message.startswith("the picture ")
    assert reason in caught.value.message
    assert caught.value.param == "messages"


def test_a_picture_that_takes_too_long_is_refused_and_others_are_read() -> None:
    pool = WorkerPool(
        "mesh.vision.picture_worker", num_workers=1, cpu_limit_s=60, wall_limit_s=60, memory_bytes=2**30
    )
    reader = PictureReader(pool)
    quick = saved(corners(), "PNG")
    try:
        read(reader, quick)
        pool._cpu_limit_s = 0.02
        with pytest.raises(InvalidRequest, match=r"took more than 0\.02 s of computing while it was decoded"):
            read(reader, png(4096, 4096, squeezed(4096 * 12_289)))
        pool._cpu_limit_s = 60
        assert read(reader, quick).shape == (2, 3, 3)
    finally:
        pool.close()


def test_a_picture_that_takes_too_much_memory_is_refused_and_others_are_read() -> None:
    pool = WorkerPool(
        "mesh.vision.picture_worker", num_workers=1, cpu_limit_s=60, wall_limit_s=60, memory_bytes=100 * 2**20
    )
    reader = PictureReader(pool)
    try:
        with pytest.raises(InvalidRequest, match=r"needed more than 100 MiB of memory"):
            read(reader, png(4000, 4000, squeezed(4000 * 12_001)))
        assert read(reader, saved(corners(), "PNG")).shape == (2, 3, 3)
    finally:
        pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="a filter of Linux")
def test_the_processes_are_confined_before_they_see_a_picture(reader: PictureReader) -> None:
    read(reader, saved(corners(), "PNG"))
    (status,) = [
        Path(f"/proc/{child.pid}/status").read_text()
        for child in psutil.Process().children()
        if "mesh.vision.picture_worker" in child.cmdline()
    ][:1]
    assert "Seccomp:\t2\n" in status
    assert "NoNewPrivs:\t1\n" in status


@pytest.mark.parametrize(
    ("width", "height", "num_bytes", "reason"),
    [
        (5000, 5000, 75_000_000, "answered with 5000 × 5000 pixels"),
        (3, 2, 17, "3 × 2 pixels came with 17 bytes"),
        (2**32 - 1, 2**32 - 1, 0, "answered with 4294967295 × 4294967295 pixels"),
    ],
)
def test_a_process_that_was_taken_over_gets_no_pixels_beyond_the_bounds(
    width: int, height: int, num_bytes: int, reason: str
) -> None:
    class TakenOver(WorkerPool):
        async def run(self, *_arguments: object, **_options: object) -> bytes:
            return struct.pack("<II", width, height) + bytes(num_bytes)

    pool = TakenOver("tests", num_workers=1, cpu_limit_s=1, wall_limit_s=1, memory_bytes=1)
    with pytest.raises(ProtocolError, match=reason):
        asyncio.run(PictureReader(pool).read(b"x"))


def test_a_picture_has_as_many_bytes_as_pixels() -> None:
    with pytest.raises(ProtocolError, match="2 × 1 pixels came with 5 bytes"):
        Picture(2, 1, bytes(5))


async def read_all(reader: PictureReader, pictures: Iterator[bytes], count: int) -> tuple[Counter[str], int]:
    """Outcomes of so many pictures, of two clients at once, and the most memory of a process, in bytes."""
    outcomes: Counter[str] = Counter()
    most_bytes = 0

    async def client(name: str) -> None:
        nonlocal most_bytes
        for data in islice(pictures, count // 2):
            try:
                await reader.read(data, client=name)
                outcomes["read"] += 1
            except InvalidRequest as error:
                outcomes[error.message] += 1
            most_bytes = max(most_bytes, *map(resident_bytes, psutil.Process().children()))

    await asyncio.gather(client("a"), client("b"))
    return outcomes, most_bytes


def resident_bytes(process: psutil.Process) -> int:
    try:
        # One that is just started shares the memory of this one.
        return int(process.memory_info().rss) if "mesh.vision.picture_worker" in process.cmdline() else 0
    except psutil.NoSuchProcess:
        return 0


def outcomes_of(reader: PictureReader, seed: int, count: int) -> Counter[str]:
    outcomes, most_bytes = asyncio.run(read_all(reader, changed(seed), count))
    assert outcomes.total() == count
    assert most_bytes < MOST_RESIDENT_BYTES
    for reason in outcomes:
        # Else a decoder wanted a file or a module: it has to be there before the process is confined.
        assert "permitted" not in reason
        assert "import" not in reason
    assert read(reader, saved(corners(), "PNG")).shape == (2, 3, 3)
    return outcomes


def test_changed_pictures_are_read_or_refused(reader: PictureReader) -> None:
    outcomes = outcomes_of(reader, 56, 1000)
    assert outcomes["read"] > 100
    assert outcomes.total() - outcomes["read"] > 300


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(10))
def test_changed_pictures_are_read_or_refused_at_length(reader: PictureReader, seed: int) -> None:
    outcomes_of(reader, seed, 10_000)
