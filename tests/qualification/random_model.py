"""Random models, dense and with experts, for measurements whose text does not matter.

They compute like the trained ones of their shapes, and say nonsense.

    python -m tests.qualification.random_model FILE.gguf --shape 1.1b
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import click
import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

# Elements that share a scale, which comes first, in float16.
_BLOCK: Final = 32
_SCALE_BYTES: Final = 2
# Bytes of a block without its scale, and the spread of what random bytes there mean.
_BODIES: Final[dict[WeightType, tuple[int, float]]] = {"Q4_0": (16, 4.61), "Q8_0": (32, 73.9)}
_CONTEXT: Final = 4096
# Tokens that are no words: <unk>, <s>, </s>, and one for each byte.
_SPECIAL: Final = ("<unk>", "<s>", "</s>")

WeightType = Literal["Q4_0", "Q8_0"]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model of llama.cpp's architecture `llama`, or with experts `qwen3moe`."""

    n_layers: int
    """Layers."""
    n_embd: int
    """Width of the hidden state."""
    n_ff: int
    """Width inside the feed-forward part."""
    n_heads: int
    """Heads of queries."""
    n_heads_kv: int
    """Heads of keys and values."""
    n_vocab: int
    """Tokens."""
    is_tied: bool
    """Whether the embedding is the head as well."""
    own_head_width: int = 0
    """Elements of one head; 0 for the width of the hidden state, divided by the heads."""
    n_experts: int = 0
    """Experts of each layer, in place of one feed-forward part; 0 for none."""
    n_experts_used: int = 0
    """Experts that compute a token."""
    n_ff_expert: int = 0
    """Width inside an expert."""

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return "qwen3moe" if self.n_experts else "llama"

    @property
    def head_width(self) -> int:
        """Elements of one head."""
        return self.own_head_width or self.n_embd // self.n_heads

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        matrices = sum(int(np.prod(sizes)) for _, sizes in self.matrices())
        return matrices + sum(int(np.prod(sizes)) for _, sizes, _, _ in self.small())

    def matrices(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name of each quantised tensor, and its sizes, columns last, in the order of the file."""
        queries, kv = self.n_heads * self.head_width, self.n_heads_kv * self.head_width
        yield "token_embd.weight", (self.n_vocab, self.n_embd)
        if not self.is_tied:
            yield "output.weight", (self.n_vocab, self.n_embd)
        for layer in range(self.n_layers):
            block = f"blk.{layer}."
            yield block + "attn_q.weight", (queries, self.n_embd)
            yield block + "attn_k.weight", (kv, self.n_embd)
            yield block + "attn_v.weight", (kv, self.n_embd)
            yield block + "attn_output.weight", (self.n_embd, queries)
            if self.n_experts:
                yield block + "ffn_gate_exps.weight", (self.n_experts, self.n_ff_expert, self.n_embd)
                yield block + "ffn_up_exps.weight", (self.n_experts, self.n_ff_expert, self.n_embd)
                yield block + "ffn_down_exps.weight", (self.n_experts, self.n_embd, self.n_ff_expert)
            else:
                yield block + "ffn_gate.weight", (self.n_ff, self.n_embd)
                yield block + "ffn_up.weight", (self.n_ff, self.n_embd)
                yield block + "ffn_down.weight", (self.n_embd, self.n_ff)

    def small(self) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
        """Name, sizes, mean and spread of each tensor in float32."""
        yield "output_norm.weight", (self.n_embd,), 1.0, 0.1
        for layer in range(self.n_layers):
            block = f"blk.{layer}."
            yield block + "attn_norm.weight", (self.n_embd,), 1.0, 0.1
            yield block + "ffn_norm.weight", (self.n_embd,), 1.0, 0.1
            if self.n_experts:
                yield block + "attn_q_norm.weight", (self.head_width,), 1.0, 0.1
                yield block + "attn_k_norm.weight", (self.head_width,), 1.0, 0.1
                yield block + "ffn_gate_inp.weight", (self.n_experts, self.n_embd), 0.0, self.n_embd**-0.5


SHAPES: Final[Mapping[str, Shape]] = {
    # That of TinyLlama-1.1B.
    "1.1b": Shape(22, 2048, 5632, 32, 4, 32_000, is_tied=False),
    # That of Llama-3.2-1B, with its large vocabulary.
    "1.2b": Shape(16, 2048, 8192, 32, 8, 128_256, is_tied=True),
    # That of Llama-3.1-8B.
    "8b": Shape(32, 4096, 14_336, 32, 8, 128_256, is_tied=False),
    # That of Qwen3-32B, whose heads are wider than its hidden state has room for.
    "32b": Shape(64, 5120, 25_600, 64, 8, 151_936, is_tied=False, own_head_width=128),
    # That of Qwen3-30B-A3B: 3 of 30 billion parameters compute a token.
    "30b-a3b": Shape(
        *(48, 2048, 6144, 32, 4, 151_936),
        is_tied=False,
        own_head_width=128,
        n_experts=128,
        n_experts_used=8,
        n_ff_expert=768,
    ),
    # Large enough for kernels to divide their work, and made in a moment.
    "small": Shape(8, 512, 1536, 8, 4, 4096, is_tied=False),
    "small-moe": Shape(
        *(8, 512, 1536, 8, 4, 4096), is_tied=False, n_experts=16, n_experts_used=4, n_ff_expert=256
    ),
    # For a test of all the rest.
    "tiny": Shape(6, 64, 128, 4, 2, 320, is_tied=False),
    "tiny-moe": Shape(*(6, 64, 128, 4, 2, 320), is_tied=False, n_experts=8, n_experts_used=2, n_ff_expert=64),
}


def write_random_gguf(
    path: Path, shape: Shape, weight_type: WeightType, *, seed: int = 1, n_ctx_train: int = _CONTEXT
) -> None:
    """Write a model; memory for one tensor at a time is taken.

    Args:
        path: Path of the file.
        shape: Sizes of the model.
        weight_type: Format of its matrices; norms and routers are float32.
        seed: The same seed gives the same bytes.
        n_ctx_train: Positions that it claims to be trained for.
    """
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name(f"Random {shape.num_parameters / 1e9:.1f}B")
    writer.add_block_count(shape.n_layers)
    writer.add_context_length(n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_heads_kv)
    writer.add_key_length(shape.head_width)
    writer.add_value_length(shape.head_width)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_layer_norm_rms_eps(1e-5)
    if shape.n_experts:
        writer.add_expert_count(shape.n_experts)
        writer.add_expert_used_count(shape.n_experts_used)
        writer.add_expert_feed_forward_length(shape.n_ff_expert)
    add_vocabulary(writer, shape.n_vocab)
    raw = GGMLQuantizationType[weight_type]
    block_bytes = _SCALE_BYTES + _BODIES[weight_type][0]
    for name, sizes in shape.matrices():
        stored = (*sizes[:-1], sizes[-1] // _BLOCK * block_bytes)
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), int(np.prod(stored)), raw_dtype=raw)
    for name, sizes, _, _ in shape.small():
        writer.add_tensor_info(name, sizes, np.dtype(np.float32), 4 * int(np.prod(sizes)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    noise = np.random.default_rng(seed)
    for _, sizes in shape.matrices():
        rows = int(np.prod(sizes[:-1]))
        writer.write_tensor_data(random_blocks(noise, rows, sizes[-1], weight_type))
    for _, sizes, mean, spread in shape.small():
        writer.write_tensor_data(noise.normal(mean, spread, sizes).astype(np.float32))
    writer.close()


def random_blocks(
    noise: np.random.Generator, rows: int, columns: int, weight_type: WeightType
) -> NDArray[np.uint8]:
    """Random blocks, uint8 (rows, bytes of a row), whose values spread by the inverse root of the width.

    Args:
        noise: Source of the values.
        rows: Rows of the matrix.
        columns: Its columns, a multiple of 32.
        weight_type: Format of the blocks.
    """
    body_bytes, spread = _BODIES[weight_type]
    num_blocks = rows * columns // _BLOCK
    blocks = np.empty((num_blocks, _SCALE_BYTES + body_bytes), np.uint8)
    blocks[:, _SCALE_BYTES:] = noise.integers(0, 256, (num_blocks, body_bytes), np.uint8)
    scale = np.array([1.0 / (spread * np.sqrt(columns))], np.float16)
    blocks[:, :_SCALE_BYTES] = scale.view(np.uint8)
    return blocks.reshape(rows, -1)


def add_vocabulary(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """Add a SentencePiece vocabulary: special tokens, every byte, and made-up words."""
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


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--shape", type=click.Choice(list(SHAPES)), default="1.1b", show_default=True)
@click.option("--weights", type=click.Choice(["Q4_0", "Q8_0"]), default="Q4_0", show_default=True)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the weights.")
def main(path: Path, shape: str, weights: WeightType, seed: int) -> None:
    """Write a random model to PATH."""
    write_random_gguf(path, SHAPES[shape], weights, seed=seed)


if __name__ == "__main__":
    main()
