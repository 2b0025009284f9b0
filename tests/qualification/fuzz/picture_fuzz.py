"""Fuzzing with pictures: changed files for the decoder, odd sizes for encoders, parts for all APIs."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import tempfile
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mesh.serve.pictures import ServedPictures
from mesh.vision.encoder import EncoderProcess
from mesh.vision.picture_frames import MOST_PIXELS
from mesh.vision.picture_reader import PictureReader, shared_picture_pool
from spanmesh_proto.errors import InvalidRequest
from stages.vision.picture import CHANNELS, Picture
from stages.vision.projector import ProjectorOptions
from tests.qualification.fuzz.mutations import TEXTS, damaged_value
from tests.qualification.fuzz.report import Tally
from tests.support import tiny_projectors
from tests.support.colour_words import counting_encoder, write_colours
from tests.support.hostile_pictures import REFUSED, changed, photograph, saved
from tests.support.mesh_in_process import mesh_in_process

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mesh.vision.encoder import EncodedPicture
    from tests.qualification.fuzz.report import FuzzOptions, FuzzReport

# A reason in which a process ended by a signal that no limit sends.
_CRASH: Final = "ended its process"
# The decoder's own limit by the clock, and time for a busy machine.
_SLOW_S: Final = 60.0
_PROJECTORS: Final = {"llava": "llama", "idefics3": "llama", "gemma3": "gemma3", "qwen2vl": "qwen2vl"}
# Odd ones: patches are 14 pixels, slices 224.
_SIDES: Final = (1, 2, 13, 14, 15, 27, 28, 29, 223, 224, 225, 333, 448, 1000)
_PLAIN: Final = Picture(90, 70, bytes(range(210)) * 90)
_MOST_SIDE: Final = 4096
_URLS: Final = (
    "", "data:", "data:,", "data:;base64,", "data:image/png;base64,", "data:image/png,raw", "data:image/png",
    "http://127.0.0.1/x.png", "https://example.org/x.png", "file:///etc/passwd", "ftp://a/b", "blob:x",
    "DATA:image/png;BASE64,AAAA", "data:image/png;base64;base64,AAAA", "data:text/html;base64,PGI+",
    "data:image/png;base64,====", "data:image/png;base64,\u0000", "x" * 5000,
)  # fmt: skip
_FAULT: Final = 500


def changed_pictures(random: Random) -> Iterator[bytes]:
    """Without end: files of all formats with bytes changed, and those that are refused for other reasons."""
    some = changed(random.getrandbits(32))
    while True:
        if random.random() < 0.9:
            yield next(some)
        else:
            make, _ = random.choice(list(REFUSED.values()))
            yield make()


def fuzz_pictures(options: FuzzOptions) -> FuzzReport:
    """Whatever a file holds, it is decoded or refused with a reason, and its process ends by no signal.

    Args:
        options: Options of the run; the model does not matter.
    """
    tally, random = Tally("pictures", options, time.monotonic), Random(options.seed)

    async def run() -> None:
        reader = PictureReader()
        for data in itertools.islice(changed_pictures(random), options.num_cases):
            begun_s = time.monotonic()
            try:
                picture = await reader.read(data)
                tally.count("decoded")
                if picture.width * picture.height > MOST_PIXELS:
                    tally.fail("fault", data, f"{picture.width} × {picture.height} pixels")
            except InvalidRequest as error:
                tally.count("refused")
                if _CRASH in error.message:
                    tally.fail("crash", data, error.message)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is what we look for
                tally.count("crash")
                tally.fail("crash", data, repr(error))
            if time.monotonic() - begun_s > _SLOW_S:
                tally.fail("hang", data, f"took more than {_SLOW_S:g} s")

    try:
        asyncio.run(run())
    finally:
        shared_picture_pool().close()
        shared_picture_pool.cache_clear()
    return tally.report()


def odd_sizes(random: Random) -> Iterator[tuple[int, int]]:
    """Without end: widths and heights beside those of patches and slices, strips, and any others."""
    while True:
        if random.random() < 0.7:
            yield random.choice(_SIDES), random.choice(_SIDES)
        else:
            long, short = random.randint(1, _MOST_SIDE), random.randint(1, 64)
            yield random.choice(((long, short), (short, long)))


def fuzz_encoders(options: FuzzOptions) -> FuzzReport:
    """Whatever size a picture has, it gets rows or a reason, and pictures after it have the rows of before.

    A process that ends is no failure: libmtmd aborts on what it does not expect, and is apart for that.

    Args:
        options: Options of the run; the model does not matter.
    """
    tally, random = Tally("encoders", options, time.monotonic), Random(options.seed)

    async def run(folder: Path) -> None:
        encoders, plain = {}, {}
        for kind, architecture in _PROJECTORS.items():
            model = tiny_projectors.text_model(folder / f"{architecture}-{kind}.gguf", architecture)
            path = getattr(tiny_projectors, kind)(folder / f"mmproj-{kind}.gguf")
            encoders[kind] = EncoderProcess(ProjectorOptions(str(path), str(model), 1, most_tokens=256))
            plain[kind] = await _encoded(encoders[kind], _PLAIN)
        try:
            for width, height in itertools.islice(odd_sizes(random), options.num_cases):
                kind = random.choice(list(encoders))
                case = json.dumps([kind, width, height]).encode()
                try:
                    encoded = await _encoded(
                        encoders[kind], Picture(width, height, random.randbytes(width * height * CHANNELS))
                    )
                    tally.count("encoded")
                    if not all(np.isfinite(rows).all() for rows in encoded.chunks):
                        tally.fail("fault", case, "rows that hold no numbers")
                except InvalidRequest as error:
                    tally.count("ended" if _CRASH in error.message else "refused")
                    again = await _encoded(encoders[kind], _PLAIN)
                    if not all(map(np.array_equal, again.chunks, plain[kind].chunks)):
                        tally.fail("fault", case, "the next picture has other rows than before")
                except Exception as error:  # noqa: BLE001 - whatever it is, it is what we look for
                    tally.count("crash")
                    tally.fail("crash", case, repr(error))
        finally:
            for encoder in encoders.values():
                encoder.close()

    with tempfile.TemporaryDirectory() as name:
        asyncio.run(run(Path(name)))
    return tally.report()


async def _encoded(encoder: EncoderProcess, picture: Picture) -> EncodedPicture:
    return await encoder.encode(picture, await encoder.parts(picture.width, picture.height))


def bodies_with_pictures(random: Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """Without end: paths of the three APIs, and bodies with pictures that are whole, damaged or none."""
    pictures = changed_pictures(random)
    whole = saved(photograph(40, 30), "PNG")
    while True:
        count = random.choice((1, 1, 1, 2, 9, 70))
        urls = []
        for _ in range(count):
            data = whole if random.random() < 0.4 else next(pictures)
            url = f"data:image/{random.choice(('png', 'jpeg', 'x'))};base64,{base64.b64encode(data).decode()}"
            urls.append(random.choice(_URLS) if random.random() < 0.3 else url)
        path, body = random.choice((_chat, _response, _messages))(urls, random.choice(TEXTS), random)
        if random.random() < 0.5:
            body = damaged_value(body, random)
        yield path, body if isinstance(body, dict) else {"messages": body}


def _chat(urls: list[str], text: str, random: Random) -> tuple[str, dict[str, Any]]:
    detail = random.choice(({}, {"detail": "low"}, {"detail": "auto"}, {"detail": "x"}))
    parts: list[Any] = [
        {"type": "image_url", "image_url": random.choice((url, {"url": url, **detail}))} for url in urls
    ]
    role = random.choice(("user", "user", "system", "assistant"))
    message = {"role": role, "content": [*parts, {"type": "text", "text": text}]}
    return "/v1/chat/completions", {"messages": [message], "max_tokens": 1}


def _response(urls: list[str], text: str, random: Random) -> tuple[str, dict[str, Any]]:
    parts: list[Any] = [{"type": "input_image", "image_url": url} for url in urls]
    if random.random() < 0.2:
        parts[0] = {"type": "input_image", "file_id": "file-1"}
    content = [*parts, {"type": "input_text", "text": text}]
    return "/v1/responses", {"input": [{"role": "user", "content": content}], "max_output_tokens": 16}


def _messages(urls: list[str], text: str, random: Random) -> tuple[str, dict[str, Any]]:
    parts: list[Any] = []
    for url in urls:
        data = url.partition(",")[2]
        source: dict[str, Any] = {"type": "base64", "media_type": "image/png", "data": data}
        parts.append(
            {"type": "image", "source": random.choice((source, source, {"type": "url", "url": url}))}
        )
    content: Any = [*parts, {"type": "text", "text": text}]
    if random.random() < 0.3:
        content = [{"type": "tool_result", "tool_use_id": "t", "content": parts}]
    return "/v1/messages", {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


def fuzz_picture_parts(options: FuzzOptions) -> FuzzReport:
    """Whatever parts of a request hold, no API blames the server.

    Args:
        options: Options of the run; the model has the words of colours in its vocabulary, as the demo's.
    """
    tally, random = Tally("picture-parts", options, time.monotonic), Random(options.seed)

    async def run(folder: Path) -> None:
        projector = write_colours(folder / "mmproj.gguf", options.model)
        with counting_encoder(projector, options.model) as encoder:
            async with mesh_in_process(options.model, pictures=ServedPictures.of(encoder)) as served:
                for path, body in itertools.islice(bodies_with_pictures(random), options.num_cases):
                    data = json.dumps(body).encode("utf-8", "surrogatepass")
                    headers = {"Content-Type": "application/json"}
                    answer = await served.api.http.post(path, content=data, headers=headers)
                    tally.count(str(answer.status_code))
                    if answer.status_code >= _FAULT:
                        tally.fail("fault", data, f"{path}: {answer.text[:500]}")

    with tempfile.TemporaryDirectory() as name:
        asyncio.run(run(Path(name)))
    return tally.report()
