"""SmolLM2 that reads pictures: each patch is the word of its colour, so answers can be foretold."""

from __future__ import annotations

import base64
import io
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from PIL import Image

from mesh.text.tokenizer import Tokenizer
from mesh.vision.encoder import EncodedPicture, EncoderProcess
from stages.vision.projector import ProjectorOptions
from tests.support.tiny_projectors import ColourWords, embeddings_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stages.vision.chunks import PictureParts
    from stages.vision.picture import Picture

NUM_ROWS: Final = ColourWords.SIDE**2
"""Rows of a picture, whatever its size is."""


def write_colours(path: Path, model: Path) -> Path:
    """Write the projector of a model whose vocabulary has the words."""
    tokenizer = Tokenizer(model)
    tokens = []
    for word in ColourWords.WORDS:
        (token,) = tokenizer.encode(word, add_special=False, parse_special=False)
        tokens.append(token)
    return ColourWords.write(path, embeddings_of(model, tokens))


def png(*words: str) -> bytes:
    """A picture of these colours, one for all patches or one for each."""
    pixels = ColourWords.picture(words * NUM_ROWS if len(words) == 1 else words)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    """The address that holds a picture."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_url(*words: str) -> dict[str, object]:
    """A picture as a part of a chat's message."""
    return {"type": "image_url", "image_url": {"url": data_url(png(*words))}}


class CountingEncoder(EncoderProcess):
    """An encoder that counts what it encodes."""

    num_encoded: int = 0

    async def encode(
        self, picture: Picture, parts: PictureParts, *, client: str | None = None
    ) -> EncodedPicture:
        """See `EncoderProcess.encode`."""
        self.num_encoded += 1
        return await super().encode(picture, parts, client=client)


@contextmanager
def counting_encoder(projector: Path, model: Path) -> Iterator[CountingEncoder]:
    """The projector of a model in its process."""
    encoder = CountingEncoder(ProjectorOptions(str(projector), str(model), num_threads=1))
    try:
        yield encoder
    finally:
        encoder.close()
