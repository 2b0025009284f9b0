"""A GGUF of any shape with random weights, already quantised, written tensor by tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from mesh.bench.big_shares.shapes import Shape

WeightType = Literal["Q4_0", "Q8_0"]

# Elements that share a scale, which comes first, in float16.
_BLOCK: Final = 32
_SCALE_BYTES: Final = 2
# Bytes of a block without its scale, and the spread of what random bytes there mean.
_BODIES: Final[dict[WeightType, tuple[int, float]]] = {"Q4_0": (16, 4.61), "Q8_0": (32, 73.9)}
_CONTEXT: Final = 4096
# Tokens that are no words: <unk>, <s>, </s>, and one for each byte.
_SPECIAL: Final = ("<unk>", "<s>", "</s>")


def write_random_gguf(path: Path, shape: Shape, weight_type: WeightType, *, seed: int = 1) -> None:
    """Write a model that computes like any other, and says nonsense.

    Memory for one tensor at a time is taken.

    Args:
        path: Of the file.
        shape: Of the model.
        weight_type: Of its matrices; norms are float32.
        seed: The same seed, the same bytes.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(f"Random {shape.num_parameters / 1e9:.1f}B")
    writer.add_block_count(shape.n_layers)
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_heads_kv)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_layer_norm_rms_eps(1e-5)
    _add_vocabulary(writer, shape.n_vocab)
    raw = GGMLQuantizationType[weight_type]
    for name, rows, columns in shape.matrices():
        row_bytes = columns // _BLOCK * (_SCALE_BYTES + _BODIES[weight_type][0])
        writer.add_tensor_info(name, (rows, row_bytes), np.dtype(np.uint8), rows * row_bytes, raw_dtype=raw)
    for name, width in shape.vectors():
        writer.add_tensor_info(name, (width,), np.dtype(np.float32), 4 * width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    noise = np.random.default_rng(seed)
    for _, rows, columns in shape.matrices():
        writer.write_tensor_data(_blocks(noise, rows, columns, weight_type))
    for _, width in shape.vectors():
        writer.write_tensor_data(noise.normal(1.0, 0.1, width).astype(np.float32))
    writer.close()


def _blocks(
    noise: np.random.Generator, rows: int, columns: int, weight_type: WeightType
) -> NDArray[np.uint8]:
    """Random blocks, uint8 (rows, bytes of a row), whose values spread by the inverse root of the width."""
    body_bytes, spread = _BODIES[weight_type]
    num_blocks = rows * columns // _BLOCK
    blocks = np.empty((num_blocks, _SCALE_BYTES + body_bytes), np.uint8)
    blocks[:, _SCALE_BYTES:] = noise.integers(0, 256, (num_blocks, body_bytes), np.uint8)
    scale = np.array([1.0 / (spread * np.sqrt(columns))], np.float16)
    blocks[:, :_SCALE_BYTES] = scale.view(np.uint8)
    return blocks.reshape(rows, -1)


def _add_vocabulary(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """A SentencePiece vocabulary: special tokens, every byte, and made-up words."""
    encoded_bytes = [f"<0x{number:02X}>" for number in range(256)]
    words = [f"\u2581w{number}" for number in range(n_vocab - len(_SPECIAL) - len(encoded_bytes))]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * len(encoded_bytes) + [gguf.TokenType.NORMAL] * len(words)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*_SPECIAL, *encoded_bytes, *words])
    writer.add_token_scores([-float(number) for number in range(n_vocab)])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
