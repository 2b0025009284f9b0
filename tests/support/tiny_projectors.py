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
MINICPM_WIDTH: Final = 128
"""Width of a model for the projector of `minicpmv`."""
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


def qwen25vl(path: Path) -> Path:
    """As `qwen2vl`, with attention in windows in every second layer."""
    noise = np.random.default_rng(15)
    patches = {f"v.patch_embd.weight{end}": _matrix(noise, _WIDTH, 3, PATCH, PATCH) for end in ("", ".1")}
    tensors = _tower(noise, side=1) | _gates(noise) | patches | _two_layers(noise, 4 * _WIDTH)
    for absent in ("v.position_embd.weight", "v.patch_embd.bias"):
        del tensors[absent]
    numbers = {"image_size": 560, "n_wa_pattern": 2}
    return write_projector(path, "qwen2.5vl_merger", tensors, numbers | _numbers())


def qwen3vl(path: Path, num_deepstack: int = 2) -> Path:
    """A row of each 32 x 32 pixels, in a grid, wider by the model's width for each layer of DeepStack."""
    noise = np.random.default_rng(17)
    tensors = _tower(noise, side=16, patch=16, is_fused=True) | _two_layers(noise, 4 * _WIDTH)
    tensors["v.patch_embd.weight.1"] = _matrix(noise, _WIDTH, 3, 16, 16)
    for layer in range(num_deepstack):
        at, width = f"v.deepstack.{layer}.", 4 * _WIDTH
        for part, rows in (("fc1", width), ("fc2", N_EMBD)):
            tensors[f"{at}{part}.weight"] = _matrix(noise, rows, width)
            tensors[f"{at}{part}.bias"] = _vector(noise, rows)
        tensors[at + "norm.weight"], tensors[at + "norm.bias"] = (_vector(noise, width) for _ in range(2))
    numbers = _numbers() | {"image_size": 256, "patch_size": 16}
    return write_projector(path, "qwen3vl_merger", tensors, numbers)


def glm4v(path: Path) -> Path:
    """A row of each 28 x 28 pixels, in a grid."""
    noise = np.random.default_rng(18)
    tensors = _tower(noise, side=8) | _gates(noise)
    for absent in [name for name in tensors if name.endswith((".ln1.bias", ".ln2.bias", "post_ln.bias"))]:
        del tensors[absent]
    tensors |= {
        "v.patch_embd.weight.1": _matrix(noise, _WIDTH, 3, PATCH, PATCH),
        "v.norm_embd.weight": _vector(noise, _WIDTH),
        "mm.patch_merger.weight": _matrix(noise, N_EMBD, _WIDTH, 2, 2),
        "mm.patch_merger.bias": _vector(noise, N_EMBD),
        "mm.model.fc.weight": _matrix(noise, N_EMBD, N_EMBD),
        "mm.post_norm.weight": _vector(noise, N_EMBD),
        "mm.post_norm.bias": _vector(noise, N_EMBD),
        **_gated_layer(noise),
    }
    numbers = {"image_size": 8 * PATCH, "spatial_merge_size": 2}
    return write_projector(path, "glm4v", tensors, numbers | _numbers())


def cogvlm(path: Path) -> Path:
    """16 rows of any picture, and one before and behind them."""
    noise = np.random.default_rng(19)
    tensors = _tower(noise, side=4, is_fused=True) | {
        "v.class_embd": _vector(noise, _WIDTH),
        "v.position_embd.weight": _matrix(noise, 17, _WIDTH),
        "mm.model.fc.weight": _matrix(noise, N_EMBD, _WIDTH),
        "mm.post_fc_norm.weight": _vector(noise, N_EMBD),
        "mm.post_fc_norm.bias": _vector(noise, N_EMBD),
        "v.boi": _matrix(noise, 1, N_EMBD),
        "v.eoi": _matrix(noise, 1, N_EMBD),
        **_gated_layer(noise),
    }
    return write_projector(path, "cogvlm", tensors, {"image_size": 4 * PATCH} | _numbers())


def pixtral(path: Path, *, is_merged: bool = False) -> Path:
    """A row of each 14 x 14 pixels, and one behind each line; of four of them, as Mistral 3 has it."""
    noise = np.random.default_rng(20)
    tensors = _tower(noise, side=1) | _gates(noise) | _mlp(noise, _WIDTH)
    for absent in ("v.position_embd.weight", "v.patch_embd.bias", "v.post_ln.weight", "v.post_ln.bias"):
        del tensors[absent]
    tensors["v.pre_ln.weight"] = _vector(noise, _WIDTH)
    tensors["v.token_embd.img_break"] = _vector(noise, N_EMBD)
    if is_merged:
        tensors["mm.input_norm.weight"] = _vector(noise, _WIDTH)
        tensors["mm.patch_merger.weight"] = _matrix(noise, _WIDTH, 4 * _WIDTH)
    numbers = {"image_size": 560, "spatial_merge_size": 1 + is_merged}
    return write_projector(path, "pixtral", tensors, numbers | _numbers())


def mistral3(path: Path) -> Path:
    """See `pixtral`."""
    return pixtral(path, is_merged=True)


def internvl(path: Path) -> Path:
    """4 rows of each tile."""
    noise = np.random.default_rng(21)
    tensors = _tower(noise, side=4) | {
        "v.class_embd": _vector(noise, _WIDTH),
        "v.position_embd.weight": _matrix(noise, 17, _WIDTH),
        "mm.model.mlp.0.weight": _vector(noise, 4 * _WIDTH),
        "mm.model.mlp.0.bias": _vector(noise, 4 * _WIDTH),
        "mm.model.mlp.1.weight": _matrix(noise, N_EMBD, 4 * _WIDTH),
        "mm.model.mlp.1.bias": _vector(noise, N_EMBD),
        "mm.model.mlp.3.weight": _matrix(noise, N_EMBD, N_EMBD),
        "mm.model.mlp.3.bias": _vector(noise, N_EMBD),
    }
    numbers = {"image_size": 4 * PATCH, "projector.scale_factor": 2}
    return write_projector(path, "internvl", tensors, numbers | _numbers())


def minicpmv(path: Path) -> Path:
    """64 rows of each slice, twice as wide as those of others: its heads have 128 values."""
    noise = np.random.default_rng(22)
    width = MINICPM_WIDTH
    tensors = _tower(noise, side=70) | {
        "resampler.pos_embed_k": _matrix(noise, 16, width),
        "resampler.query": _matrix(noise, 64, width),
        "resampler.proj.weight": _matrix(noise, width, width),
        "resampler.kv.weight": _matrix(noise, width, _WIDTH),
    }
    for part in ("q", "k", "v", "out"):
        tensors[f"resampler.attn.{part}.weight"] = _matrix(noise, width, width)
        tensors[f"resampler.attn.{part}.bias"] = _vector(noise, width)
    for part in ("q", "kv", "post"):
        tensors[f"resampler.ln_{part}.weight"] = _vector(noise, width)
        tensors[f"resampler.ln_{part}.bias"] = _vector(noise, width)
    more = {"clip.minicpmv_version": np.int32(3), "clip.minicpmv_query_num": 64}
    numbers = _numbers() | {"image_size": 16 * PATCH, "projection_dim": width}
    return write_projector(path, "resampler", tensors, numbers, more)


def lfm2(path: Path) -> Path:
    """A row of each 28 x 28 pixels, 64 at least; slices of large pictures."""
    noise = np.random.default_rng(23)
    tensors = _tower(noise, side=16) | _mlp(noise, 4 * _WIDTH)
    numbers = {"image_size": 16 * PATCH, "projector.scale_factor": 2}
    return write_projector(path, "lfm2", tensors, numbers | _numbers())


def kimivl(path: Path) -> Path:
    """A row of each 28 x 28 pixels."""
    noise = np.random.default_rng(24)
    tensors = _tower(noise, side=16) | _mlp(noise, 4 * _WIDTH)
    tensors["mm.input_norm.weight"], tensors["mm.input_norm.bias"] = (_vector(noise, _WIDTH) for _ in "wb")
    numbers = {"image_size": 16 * PATCH, "projector.scale_factor": 2}
    return write_projector(path, "kimivl", tensors, numbers | _numbers())


def llama4(path: Path) -> Path:
    """4 rows of each tile."""
    noise = np.random.default_rng(25)
    tensors = _tower(noise, side=4) | {
        # As the fully connected layer that it is.
        "v.patch_embd.weight": _matrix(noise, _WIDTH, 3 * PATCH * PATCH),
        "v.class_embd": _vector(noise, _WIDTH),
        "v.position_embd.weight": _matrix(noise, 17, _WIDTH),
        "mm.model.mlp.1.weight": _matrix(noise, _WIDTH, 4 * _WIDTH),
        "mm.model.mlp.2.weight": _matrix(noise, _WIDTH, _WIDTH),
        "mm.model.fc.weight": _matrix(noise, N_EMBD, _WIDTH),
    }
    del tensors["v.patch_embd.bias"]
    numbers = {"image_size": 4 * PATCH, "projector.scale_factor": 2}
    return write_projector(path, "llama4", tensors, numbers | _numbers())


def phi4(path: Path) -> Path:
    """A row of each 14 x 14 pixels."""
    noise = np.random.default_rng(26)
    tensors = _tower(noise, side=16) | _two_layers(noise, _WIDTH)
    numbers = {"image_size": 16 * PATCH, "image_min_pixels": 28 * 28, "image_max_pixels": 112 * 112}
    return write_projector(path, "phi4", tensors, numbers | _numbers())


def gemma4(path: Path, n_embd: int = N_EMBD) -> Path:
    """At least 70 rows, and a table of 128 positions a side: more patches side by side end the process."""
    noise = np.random.default_rng(16)
    tower = {name: each for name, each in _tower(noise, side=1).items() if not name.endswith(".bias")}
    tensors = tower | {
        "v.patch_embd.weight": _matrix(noise, _WIDTH, 3, 16, 16),
        "v.position_embd.weight": _matrix(noise, 2, 128, _WIDTH),
        "mm.input_projection.weight": _matrix(noise, n_embd, _WIDTH),
    }
    del tensors["v.post_ln.weight"]
    numbers = _numbers() | {"image_size": 0, "patch_size": 16, "projection_dim": n_embd}
    return write_projector(path, "gemma4v", tensors, numbers)


def gemma4_unified(path: Path) -> Path:
    """As `gemma4`, without layers of its own: a row of each 48 x 48 pixels."""
    noise = np.random.default_rng(27)
    pixels = 3 * 48 * 48
    tensors = {
        "v.patch_embd.weight": _matrix(noise, _WIDTH, pixels),
        "v.patch_embd.bias": _vector(noise, _WIDTH),
        "v.position_embd.weight": _matrix(noise, 2, 128, _WIDTH),
        "mm.input_projection.weight": _matrix(noise, N_EMBD, _WIDTH),
    }
    for number, size in ((1, pixels), (2, _WIDTH), (3, _WIDTH)):
        tensors[f"v.patch_norm.{number}.weight"] = _vector(noise, size)
        tensors[f"v.patch_norm.{number}.bias"] = _vector(noise, size)
    numbers = _numbers() | {"image_size": 0, "patch_size": 16, "block_count": 0}
    return write_projector(path, "gemma4uv", tensors, numbers)


def janus(path: Path) -> Path:
    """16 rows of any picture."""
    noise = np.random.default_rng(28)
    tensors = _tower(noise, side=4) | _layers(noise, _WIDTH, {0: N_EMBD, 1: N_EMBD})
    return write_projector(path, "janus_pro", tensors, {"image_size": 4 * PATCH} | _numbers())


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
        np.int32: writer.add_int32,
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


def _tower(noise: np.random.Generator, side: int, *, patch: int = PATCH, is_fused: bool = False) -> Tensors:
    """Layers of the encoder, and a table of side x side positions."""
    tensors = {
        "v.patch_embd.weight": _matrix(noise, _WIDTH, 3, patch, patch),
        "v.patch_embd.bias": _vector(noise, _WIDTH),
        "v.position_embd.weight": _matrix(noise, side * side, _WIDTH),
        "v.post_ln.weight": _vector(noise, _WIDTH),
        "v.post_ln.bias": _vector(noise, _WIDTH),
    }
    parts = {"attn_qkv": 3 * _WIDTH} if is_fused else dict.fromkeys(("attn_q", "attn_k", "attn_v"), _WIDTH)
    for layer in range(_N_LAYERS):
        for part, rows in (parts | {"attn_out": _WIDTH}).items():
            tensors[f"v.blk.{layer}.{part}.weight"] = _matrix(noise, rows, _WIDTH)
            tensors[f"v.blk.{layer}.{part}.bias"] = _vector(noise, rows)
        for norm in ("ln1", "ln2"):
            tensors[f"v.blk.{layer}.{norm}.weight"] = _vector(noise, _WIDTH)
            tensors[f"v.blk.{layer}.{norm}.bias"] = _vector(noise, _WIDTH)
        tensors[f"v.blk.{layer}.ffn_up.weight"] = _matrix(noise, _N_FF, _WIDTH)
        tensors[f"v.blk.{layer}.ffn_up.bias"] = _vector(noise, _N_FF)
        tensors[f"v.blk.{layer}.ffn_down.weight"] = _matrix(noise, _WIDTH, _N_FF)
        tensors[f"v.blk.{layer}.ffn_down.bias"] = _vector(noise, _WIDTH)
    return tensors


def _gates(noise: np.random.Generator) -> Tensors:
    return {f"v.blk.{layer}.ffn_gate.weight": _matrix(noise, _N_FF, _WIDTH) for layer in range(_N_LAYERS)}


def _two_layers(noise: np.random.Generator, width: int) -> Tensors:
    return _layers(noise, width, {0: width, 2: N_EMBD})


def _mlp(noise: np.random.Generator, width: int) -> Tensors:
    """As `_two_layers`, by the numbers of other kinds."""
    return _layers(noise, width, {1: width, 2: N_EMBD})


def _layers(noise: np.random.Generator, width: int, rows_of: Mapping[int, int]) -> Tensors:
    tensors = {}
    for number, rows in rows_of.items():
        tensors[f"mm.{number}.weight"] = _matrix(noise, rows, width)
        tensors[f"mm.{number}.bias"] = _vector(noise, rows)
    return tensors


def _gated_layer(noise: np.random.Generator) -> Tensors:
    sizes = {"up": (_N_FF, N_EMBD), "gate": (_N_FF, N_EMBD), "down": (N_EMBD, _N_FF)}
    return {f"mm.{part}.weight": _matrix(noise, *size) for part, size in sizes.items()}


def _matrix(noise: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return noise.normal(0.0, 1 / np.sqrt(np.prod(shape[1:])), shape).astype(np.float32)


def _vector(noise: np.random.Generator, size: int) -> NDArray[np.float32]:
    return noise.normal(1.0, 0.1, size).astype(np.float32)
