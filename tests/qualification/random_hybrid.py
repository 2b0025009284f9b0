"""Random models of Qwen3.5's architecture: three of four layers recurrent, the fourth with attention.

With the sizes of its smallest model by default, and any vocabulary. They compute like the trained ones, and
say nonsense.

    python -m tests.qualification.random_hybrid FILE.gguf
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType

from tests.qualification.random_model import add_vocabulary, random_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

_CONTEXT: Final = 4096
# Q4_0: elements and bytes of a block.
_BLOCK, _BLOCK_BYTES = 32, 18
_EVERY: Final = 4
_ROPE_SECTIONS: Final = (11, 11, 10, 0)


@dataclass(frozen=True)
class HybridShape:
    """Sizes of a model; by default Qwen3.5-0.8B's."""

    n_layers: int = 24
    """Layers of the trunk."""
    n_embd: int = 1024
    """Width of the hidden states."""
    n_ff: int = 3584
    """Width inside the feed-forward part."""
    n_vocab: int = 32_768
    """Tokens."""
    n_heads: int = 8
    """Heads of queries, in the layers with attention."""
    n_heads_kv: int = 2
    """Heads of keys and values there."""
    head_width: int = 256
    """Elements of each."""
    n_state_heads: int = 16
    """Heads of the recurrent state."""
    state_width: int = 128
    """The state of a head is this number squared."""
    conv_width: int = 4
    """Positions that a recurrent layer's convolution spans."""
    n_prediction_layers: int = 0
    """Layers for multi-token prediction, 0 or 1."""

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer has a recurrent state instead of attention."""
        return layer < self.n_layers and (layer + 1) % _EVERY != 0

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """Name, rows and columns of each matrix in Q4_0."""
        inner = self.n_state_heads * self.state_width
        yield "token_embd.weight", self.n_vocab, self.n_embd
        yield "output.weight", self.n_vocab, self.n_embd
        for layer in range(self.n_layers + self.n_prediction_layers):
            block = f"blk.{layer}."
            if self.is_recurrent(layer):
                yield block + "attn_qkv.weight", 3 * inner, self.n_embd
                yield block + "attn_gate.weight", inner, self.n_embd
                yield block + "ssm_out.weight", self.n_embd, inner
            else:
                yield block + "attn_q.weight", 2 * self.n_heads * self.head_width, self.n_embd
                yield block + "attn_k.weight", self.n_heads_kv * self.head_width, self.n_embd
                yield block + "attn_v.weight", self.n_heads_kv * self.head_width, self.n_embd
                yield block + "attn_output.weight", self.n_embd, self.n_heads * self.head_width
            yield block + "ffn_gate.weight", self.n_ff, self.n_embd
            yield block + "ffn_up.weight", self.n_ff, self.n_embd
            yield block + "ffn_down.weight", self.n_embd, self.n_ff
            if layer >= self.n_layers:
                yield block + "nextn.eh_proj.weight", self.n_embd, 2 * self.n_embd

    def small(self) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
        """Name, shape, mean and spread of each tensor in float32."""
        yield "output_norm.weight", (self.n_embd,), 1.0, 0.1
        heads = self.n_state_heads
        for layer in range(self.n_layers + self.n_prediction_layers):
            block = f"blk.{layer}."
            yield block + "attn_norm.weight", (self.n_embd,), 1.0, 0.1
            yield block + "post_attention_norm.weight", (self.n_embd,), 1.0, 0.1
            if self.is_recurrent(layer):
                spread = self.n_embd**-0.5
                channels = 3 * heads * self.state_width
                yield block + "ssm_conv1d.weight", (channels, self.conv_width), 0.0, 0.5
                yield block + "ssm_dt.bias", (heads,), -3.0, 1.0
                yield block + "ssm_a", (heads,), -1.0, 0.2
                yield block + "ssm_beta.weight", (heads, self.n_embd), 0.0, spread
                yield block + "ssm_alpha.weight", (heads, self.n_embd), 0.0, spread
                yield block + "ssm_norm.weight", (self.state_width,), 1.0, 0.1
            else:
                yield block + "attn_q_norm.weight", (self.head_width,), 1.0, 0.1
                yield block + "attn_k_norm.weight", (self.head_width,), 1.0, 0.1
            if layer >= self.n_layers:
                for name in ("enorm", "hnorm", "shared_head_norm"):
                    yield f"{block}nextn.{name}.weight", (self.n_embd,), 1.0, 0.1


def write_random_hybrid(path: Path, shape: HybridShape | None = None, *, seed: int = 1) -> None:
    """Write a model; memory for one tensor at a time is taken.

    Args:
        path: Path of the file.
        shape: Sizes of the model.
        seed: The same seed gives the same bytes.
    """
    shape = shape or HybridShape()
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_name("Random hybrid")
    writer.add_block_count(shape.n_layers + shape.n_prediction_layers)
    if shape.n_prediction_layers:
        writer.add_nextn_predict_layers(shape.n_prediction_layers)
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_heads_kv)
    writer.add_key_length(shape.head_width)
    writer.add_value_length(shape.head_width)
    writer.add_rope_dimension_count(shape.head_width // 4)
    writer.add_rope_dimension_sections(_ROPE_SECTIONS)
    writer.add_rope_freq_base(10_000_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_full_attention_interval(_EVERY)
    writer.add_ssm_conv_kernel(shape.conv_width)
    writer.add_ssm_inner_size(shape.n_state_heads * shape.state_width)
    writer.add_ssm_state_size(shape.state_width)
    writer.add_ssm_time_step_rank(shape.n_state_heads)
    writer.add_ssm_group_count(shape.n_state_heads)
    add_vocabulary(writer, shape.n_vocab)
    for name, rows, columns in shape.matrices():
        row_bytes = columns // _BLOCK * _BLOCK_BYTES
        writer.add_tensor_info(
            name, (rows, row_bytes), np.dtype(np.uint8), rows * row_bytes, raw_dtype=GGMLQuantizationType.Q4_0
        )
    for name, dimensions, _, _ in shape.small():
        writer.add_tensor_info(name, dimensions, np.dtype(np.float32), 4 * int(np.prod(dimensions)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    noise = np.random.default_rng(seed)
    for _, rows, columns in shape.matrices():
        writer.write_tensor_data(random_blocks(noise, rows, columns, "Q4_0"))
    for _, dimensions, mean, spread in shape.small():
        writer.write_tensor_data(noise.normal(mean, spread, dimensions).astype(np.float32))
    writer.close()


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the weights.")
@click.option(
    "--prediction-layers",
    type=click.IntRange(0, 1),
    default=0,
    show_default=True,
    help="Layers for multi-token prediction.",
)
def main(path: Path, seed: int, prediction_layers: int) -> None:
    """Write a random model with recurrent layers to PATH."""
    write_random_hybrid(path, HybridShape(n_prediction_layers=prediction_layers), seed=seed)


if __name__ == "__main__":
    main()
