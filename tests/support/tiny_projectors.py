"""Tiny projectors made by gguf-py: random ones of several kinds, and one that turns colours into words.

Random weights have no sense; what is checked is how many rows a picture becomes, where, and with which bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import gguf
import numpy as np

from stages.gguf import read_header
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

Tensors = dict[str, "NDArray[np.float32]"]
N_EMBD: Final = 64
PATCH: Final = 14
_WIDTH, _N_FF, _N_LAYERS = 64, 96, 2
_SLICES: Final = [f"<row_{row}_col_{column}>" for row in range(1, 6) for column in range(1, 6)]
CONTROLS: Final = (
    *("\n\n", "<fake_token_around_image>", "<global-img>", *_SLICES),
    *("<|vision_start|>", "<|vision_end|>", "<start_of_image>", "<end_of_image>", "<|image>", "<image|>"),
)
"""Tokens that the projectors put beside pictures."""


def text_model(path: Path, architecture: str = "llama", *, controls: tuple[str, ...] = CONTROLS) -> Path:
    """Write a model whose vocabulary has the tokens of pictures: llama, gemma3 or qwen2vl."""
    arrays = {"qwen2vl.rope.dimension_sections": [2, 3, 3, 0]} if architecture == "qwen2vl" else {}
    return TinyModel(architecture, n_layers=2).write(path, arrays=arrays, controls=controls)


def llava(path: Path, **metadata: object) -> Path:
    """16 rows of any picture, one position each."""
    noise = np.random.default_rng(11)
    tensors = _tower(noise, side=4) | _two_layers(noise, _WIDTH)
    return write_projector(path, "mlp", tensors, {"image_size": 4 * PATCH} | _numbers(), metadata)


def idefics3(path: Path) -> Path:
    """Slices of 4 rows each, with tokens between them."""
    noise = np.random.default_rng(12)
    tensors = _tower(noise, side=4) | {"mm.model.fc.weight": _matrix(noise, N_EMBD, 4 * _WIDTH)}
    numbers = {"image_size": 4 * PATCH, "projector.scale_factor": 2, "preproc_image_size": 16 * PATCH}
    return write_projector(path, "idefics3", tensors, numbers | _numbers())


def gemma3(path: Path) -> Path:
    """16 rows of any picture, which all see each other."""
    noise = np.random.default_rng(13)
    tensors = _tower(noise, side=8) | {
        "mm.input_projection.weight": _matrix(noise, _WIDTH, N_EMBD),
        "mm.soft_emb_norm.weight": _vector(noise, _WIDTH),
    }
    numbers = {"image_size": 8 * PATCH, "projector.scale_factor": 2}
    return write_projector(path, "gemma3", tensors, numbers | _numbers())


def qwen2vl(path: Path) -> Path:
    """A row of each 28 x 28 pixels, in a grid."""
    noise = np.random.default_rng(14)
    patches = {f"v.patch_embd.weight{end}": _matrix(noise, _WIDTH, 3, PATCH, PATCH) for end in ("", ".1")}
    tensors = _tower(noise, side=1) | patches | _two_layers(noise, 4 * _WIDTH)
    for absent in ("v.position_embd.weight", "v.patch_embd.bias"):
        del tensors[absent]
    return write_projector(path, "qwen2vl_merger", tensors, {"image_size": 560} | _numbers())


def gemma4(path: Path) -> Path:
    """At least 70 rows, and a table of 128 positions a side: more patches side by side end the process."""
    noise = np.random.default_rng(16)
    tower = {name: each for name, each in _tower(noise, side=1).items() if not name.endswith(".bias")}
    tensors = tower | {
        "v.patch_embd.weight": _matrix(noise, _WIDTH, 3, 16, 16),
        "v.position_embd.weight": _matrix(noise, 2, 128, _WIDTH),
        "mm.input_projection.weight": _matrix(noise, N_EMBD, _WIDTH),
    }
    del tensors["v.post_ln.weight"]
    return write_projector(path, "gemma4v", tensors, {"image_size": 0, "patch_size": 16} | _numbers())


class ColourWords:
    """A projector of LLaVA's kind that makes of each patch the embedding of its colour's word, bit for bit.

    The convolution takes the pixel in the middle of a patch; a layer of eight units finds its corner of the
    colour cube (GELU is the identity from 10 on, and zero below -10); the last layer holds the embeddings,
    divided by 16, which loses no bit. So a model must answer as to the words in place of the picture.
    """

    SIDE: Final = 4
    WORDS: Final = {
        " red": (255, 0, 0),
        " green": (0, 255, 0),
        " blue": (0, 0, 255),
        " white": (255, 255, 255),
        " black": (0, 0, 0),
        " yellow": (255, 255, 0),
        " pink": (255, 0, 255),
        " cyan": (0, 255, 255),
    }

    @classmethod
    def write(cls, path: Path, embeddings: NDArray[np.float32]) -> Path:
        """Write it.

        Args:
            path: The file.
            embeddings: float32 (8, n_embd): of the tokens of `WORDS`.
        """
        width, n_embd = 32, embeddings.shape[1]
        patch = np.zeros((width, 3, PATCH, PATCH), np.float32)
        for channel in range(3):
            patch[channel, channel, PATCH // 2, PATCH // 2] = 1.0
        first = np.zeros((8, width), np.float32)
        first[:, :3] = 16.0 * np.sign(np.array(list(cls.WORDS.values()), np.float32) - 1)
        tensors = {
            "v.patch_embd.weight": patch,
            # No class embedding: llama.cpp appends it, but leaves out the first row.
            "v.position_embd.weight": np.zeros((cls.SIDE**2, width), np.float32),
            "mm.0.weight": first,
            "mm.0.bias": np.full(8, -32.0, np.float32),
            "mm.2.weight": np.ascontiguousarray(embeddings.T / 16.0),
            "mm.2.bias": np.zeros(n_embd, np.float32),
        }
        # LLaVA leaves out the last layer; a file has one all the same.
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            tensors[f"v.blk.0.{part}.weight"] = np.zeros((width, width), np.float32)
        for norm in ("ln1", "ln2"):
            tensors[f"v.blk.0.{norm}.weight"] = np.ones(width, np.float32)
            tensors[f"v.blk.0.{norm}.bias"] = np.zeros(width, np.float32)
        tensors["v.blk.0.ffn_up.weight"] = np.zeros((2 * width, width), np.float32)
        tensors["v.blk.0.ffn_down.weight"] = np.zeros((width, 2 * width), np.float32)
        numbers = {"image_size": cls.SIDE * PATCH, "embedding_length": width, "block_count": 1}
        numbers |= {"attention.head_count": 1, "feed_forward_length": 2 * width, "projection_dim": n_embd}
        return write_projector(path, "mlp", tensors, numbers)

    @classmethod
    def picture(cls, words: Sequence[str]) -> NDArray[np.uint8]:
        """uint8 (height, width, 3): 4 x 4 patches of these colours, row by row."""
        cells = np.array([cls.WORDS[word] for word in words], np.uint8).reshape(cls.SIDE, cls.SIDE, 3)
        return cells.repeat(PATCH, axis=0).repeat(PATCH, axis=1)


def embeddings_of(model: Path, tokens: Sequence[int]) -> NDArray[np.float32]:
    """float32 (tokens, n_embd): rows of a model's embedding as llama.cpp looks them up."""
    # gguf-py's reader takes seconds for a vocabulary.
    tensor = read_header(model).tensors["token_embd.weight"]
    data = np.memmap(
        model, np.uint8, "r", tensor.offset_bytes, (tensor.shape[1], tensor.n_bytes // tensor.shape[1])
    )
    found: NDArray[np.float32] = gguf.quants.dequantize(data[list(tokens)], tensor.type).view(np.float32)
    return found


def write_projector(
    path: Path,
    kind: str,
    tensors: Tensors,
    numbers: Mapping[str, int],
    metadata: Mapping[str, object] | None = None,
) -> Path:
    """Write a projector.

    Args:
        path: The file.
        kind: llama.cpp's name of its kind.
        tensors: By name.
        numbers: Metadata below `clip.vision.`.
        metadata: More of it, or other; None for a key that is to be absent.
    """
    told: dict[str, Any] = {
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": kind,
        "clip.use_gelu": True,
        "clip.vision.patch_size": PATCH,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_mean": [0.5, 0.5, 0.5],
        "clip.vision.image_std": [0.5, 0.5, 0.5],
        **{f"clip.vision.{key}": number for key, number in numbers.items()},
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, "clip")
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in told.items():
        if value is not None:
            adders.get(type(value), writer.add_array)(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _numbers() -> dict[str, int]:
    return {
        "embedding_length": _WIDTH,
        "attention.head_count": 2,
        "feed_forward_length": _N_FF,
        "block_count": _N_LAYERS,
        "projection_dim": N_EMBD,
    }


def _tower(noise: np.random.Generator, side: int) -> Tensors:
    tensors = {
        "v.patch_embd.weight": _matrix(noise, _WIDTH, 3, PATCH, PATCH),
        "v.patch_embd.bias": _vector(noise, _WIDTH),
        "v.position_embd.weight": _matrix(noise, side * side, _WIDTH),
        "v.post_ln.weight": _vector(noise, _WIDTH),
        "v.post_ln.bias": _vector(noise, _WIDTH),
    }
    for layer in range(_N_LAYERS):
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            tensors[f"v.blk.{layer}.{part}.weight"] = _matrix(noise, _WIDTH, _WIDTH)
            tensors[f"v.blk.{layer}.{part}.bias"] = _vector(noise, _WIDTH)
        for norm in ("ln1", "ln2"):
            tensors[f"v.blk.{layer}.{norm}.weight"] = _vector(noise, _WIDTH)
            tensors[f"v.blk.{layer}.{norm}.bias"] = _vector(noise, _WIDTH)
        tensors[f"v.blk.{layer}.ffn_up.weight"] = _matrix(noise, _N_FF, _WIDTH)
        tensors[f"v.blk.{layer}.ffn_up.bias"] = _vector(noise, _N_FF)
        tensors[f"v.blk.{layer}.ffn_down.weight"] = _matrix(noise, _WIDTH, _N_FF)
        tensors[f"v.blk.{layer}.ffn_down.bias"] = _vector(noise, _WIDTH)
    return tensors


def _two_layers(noise: np.random.Generator, width: int) -> Tensors:
    return {
        "mm.0.weight": _matrix(noise, width, width),
        "mm.0.bias": _vector(noise, width),
        "mm.2.weight": _matrix(noise, N_EMBD, width),
        "mm.2.bias": _vector(noise, N_EMBD),
    }


def _matrix(noise: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return noise.normal(0.0, 1 / np.sqrt(np.prod(shape[1:])), shape).astype(np.float32)


def _vector(noise: np.random.Generator, size: int) -> NDArray[np.float32]:
    return noise.normal(1.0, 0.1, size).astype(np.float32)
