"""A projector in the sizes of a real one, for measurements whose text does not matter.

Sizes are those of SmolVLM-256M (https://huggingface.co/HuggingFaceTB/SmolVLM-256M-Instruct): SigLIP's
base tower, tiles of 512 pixels, rows as wide as the embedding of SmolLM2-135M. Weights are random.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from PIL import Image

from stages.files import ModelFile, Region
from stages.gguf import Value, ValueType, read_header
from stages.slicing.layout import StageLayout, StageTensor
from stages.slicing.stage_writer import StageWriter
from tests.support.colour_words import data_url
from tests.support.tiny_projectors import write_projector

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    from numpy.typing import NDArray

SIDE: Final = 896
"""Pixels of a side of the pictures that are measured."""
_TOKENS: Final = "tokenizer.ggml.tokens"
_WIDTH, _N_FF, _N_LAYERS, _N_HEADS = 768, 3072, 12, 12
_PATCH, _TILE, _MERGED, _N_EMBD = 16, 512, 4, 576
# A picture is scaled to so many pixels, which are four tiles, and is a fifth one as a whole.
_LONGEST: Final = 1024
_SEED: Final = 256
# Tokens of the model without a use here, and those that the projector puts beside its rows.
_SPARE: Final = ("<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<gh_stars>", "<issue_start>")
_PLACES: Final = (
    *("<fake_token_around_image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)


@dataclass(frozen=True)
class VisionFiles:
    """Files of a model that reads pictures."""

    model: Path
    """The model."""
    projector: Path
    """Its projector."""


def write_real_sizes(model: Path, folder: Path) -> VisionFiles:
    """Write a projector, and the model with the tokens that it needs.

    Args:
        model: SmolLM2-135M.
        folder: For the files.
    """
    files = VisionFiles(folder / "vision-model.gguf", folder / "mmproj-vision-model.gguf")
    _write_model(model, files.model)
    numbers = {
        "image_size": _TILE,
        "patch_size": _PATCH,
        "embedding_length": _WIDTH,
        "attention.head_count": _N_HEADS,
        "feed_forward_length": _N_FF,
        "block_count": _N_LAYERS,
        "projection_dim": _N_EMBD,
        "projector.scale_factor": _MERGED,
        "preproc_image_size": _LONGEST,
    }
    write_projector(files.projector, "idefics3", _tensors(), numbers)
    return files


def picture(seed: int, side: int = SIDE) -> bytes:
    """A JPEG of smooth colours; another one for each seed."""
    noise = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).resize((side, side), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()


def asked(seed: int, max_tokens: int, question: str = "What is it?") -> Mapping[str, Any]:
    """Fields of a chat's body that shows this picture, the same for every server that speaks OpenAI's API."""
    shown = {"type": "image_url", "image_url": {"url": data_url(picture(seed), "image/jpeg")}}
    messages = [{"role": "user", "content": [shown, {"type": "text", "text": question}]}]
    return {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def _write_model(source: Path, output: Path) -> None:
    header = read_header(source)
    places = dict(zip(_SPARE, _PLACES, strict=True))
    known = header.metadata[_TOKENS].decode()
    texts = [Value.of(ValueType.STRING, places.get(str(text), str(text))).payload for text in known]  # type: ignore[union-attr]
    tokens = replace(header.metadata[_TOKENS], payload=b"".join(texts))
    tensors = tuple(
        StageTensor(
            each.name, each.shape, each.type, each.n_bytes, Region(0, each.offset_bytes, each.n_bytes)
        )
        for each in header.tensors.values()
    )
    layout = StageLayout(header.alignment, {**header.metadata, _TOKENS: tokens}, tensors)
    with ModelFile(source) as reader, output.open("wb") as file:
        StageWriter(reader, file, lambda _count: None).write(layout)


def _tensors() -> dict[str, NDArray[Any]]:
    noise = np.random.default_rng(_SEED)

    def matrix(*shape: int) -> NDArray[np.float16]:
        drawn = noise.standard_normal(shape, np.float32) / np.sqrt(np.prod(shape[1:]))
        found: NDArray[np.float16] = drawn.astype(np.float16)
        return found

    def vector(size: int, middle: float = 0.0) -> NDArray[np.float32]:
        return (middle + 0.1 * noise.standard_normal(size, np.float32)).astype(np.float32)

    found: dict[str, NDArray[Any]] = {
        "v.patch_embd.weight": matrix(_WIDTH, 3, _PATCH, _PATCH),
        "v.patch_embd.bias": vector(_WIDTH),
        "v.position_embd.weight": matrix((_TILE // _PATCH) ** 2, _WIDTH).astype(np.float32),
        "v.post_ln.weight": vector(_WIDTH, 1.0),
        "v.post_ln.bias": vector(_WIDTH),
        "mm.model.fc.weight": matrix(_N_EMBD, _WIDTH * _MERGED**2),
    }
    for layer in range(_N_LAYERS):
        block = f"v.blk.{layer}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            found |= {f"{block}{name}.weight": matrix(_WIDTH, _WIDTH), f"{block}{name}.bias": vector(_WIDTH)}
        for name in ("ln1", "ln2"):
            found |= {f"{block}{name}.weight": vector(_WIDTH, 1.0), f"{block}{name}.bias": vector(_WIDTH)}
        for name, rows, columns in (("ffn_up", _N_FF, _WIDTH), ("ffn_down", _WIDTH, _N_FF)):
            found |= {f"{block}{name}.weight": matrix(rows, columns), f"{block}{name}.bias": vector(rows)}
    return found
