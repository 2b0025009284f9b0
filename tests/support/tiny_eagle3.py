"""Tiny random EAGLE-3 drafters in float32: llama.cpp rounds what it multiplies with other types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import gguf
import numpy as np

from stages.gguf import read_header
from tests.support.gguf_source import GgufSource
from tests.support.tiny_models import N_VOCAB, copy_vocabulary

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

LAYERS: Final = (1, 3, 5)
"""Layers whose inputs it reads, of a model with six."""


@dataclass(frozen=True)
class TinyEagle3:
    """The shape of a drafter; see `mesh.tuning.drafter_file`."""

    norm_before_fc: bool = True
    norm_before_residual: bool = False
    has_rope_factors: bool = False
    own_width: int | None = None
    """Its width, if it is another than the model's: then it has an embedding of its own."""
    num_own_tokens: int = 200
    """Tokens that it drafts; the model's number for all of them, without a list."""
    n_heads: int = 4
    n_heads_kv: int = 2
    head_width: int = 16
    n_rot: int = 16
    n_ff: int = 96
    seed: int = 1
    scaling: str = ""
    """How positions are scaled."""

    def write(self, target: Path, path: Path) -> Path:
        """Write the drafter; its head is the model's, if that is as wide.

        Args:
            target: A tiny model in float32.
            path: Where to.

        Returns:
            The file.
        """
        source = GgufSource(target)
        width = source.header.integer("llama.embedding_length")
        n_embd = self.own_width or width
        weights = self._weights(width, n_embd)
        noise = np.random.default_rng(self.seed + 1)
        if self.num_own_tokens < N_VOCAB:
            own = np.sort(noise.choice(N_VOCAB, self.num_own_tokens, replace=False)).astype(np.int64)
            weights["d2t"] = own
        else:
            own = np.arange(N_VOCAB)
        if self.own_width is None:
            weights["output.weight"] = np.array(source.tensors["output.weight"].data)[own]
        else:
            weights["output.weight"] = noise.standard_normal((len(own), n_embd)).astype(np.float32)
            weights["token_embd.weight"] = noise.standard_normal((N_VOCAB, n_embd)).astype(np.float32)
        writer = gguf.GGUFWriter(path, "eagle3")
        self._add_metadata(writer, width, n_embd)
        copy_vocabulary(writer, target)
        for name, each in weights.items():
            writer.add_tensor(name, each)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert read_header(path).architecture == "eagle3"
        return path

    def _add_metadata(self, writer: gguf.GGUFWriter, width: int, n_embd: int) -> None:
        writer.add_block_count(1)
        writer.add_context_length(1024)
        writer.add_embedding_length(n_embd)
        writer.add_feed_forward_length(self.n_ff)
        writer.add_head_count(self.n_heads)
        writer.add_head_count_kv(self.n_heads_kv)
        writer.add_key_length(self.head_width)
        writer.add_value_length(self.head_width)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10_000.0)
        writer.add_rope_dimension_count(self.n_rot)
        if self.scaling:
            writer.add_string("eagle3.rope.scaling.type", self.scaling)
            writer.add_float32("eagle3.rope.scaling.factor", 2.0)
        writer.add_uint32("eagle3.vocab_size", N_VOCAB)
        writer.add_uint32("eagle3.target_hidden_size", width)
        writer.add_array("eagle3.target_layers", list(LAYERS))
        writer.add_bool("eagle3.norm_before_fc", self.norm_before_fc)
        writer.add_bool("eagle3.norm_before_residual", self.norm_before_residual)

    def _weights(self, width: int, n_embd: int) -> dict[str, NDArray[np.generic]]:
        noise = np.random.default_rng(self.seed)
        heads, heads_kv = self.n_heads * self.head_width, self.n_heads_kv * self.head_width

        def matrix(rows: int, columns: int) -> NDArray[np.float32]:
            return noise.normal(0.0, 2.0 / np.sqrt(columns), (rows, columns)).astype(np.float32)

        def vector(size: int, mean: float = 1.0) -> NDArray[np.float32]:
            return noise.normal(mean, 0.1, size).astype(np.float32)

        weights: dict[str, NDArray[np.generic]] = {
            "fc.weight": matrix(n_embd, len(LAYERS) * width),
            "output_norm.weight": vector(n_embd),
            "blk.0.attn_norm.weight": vector(n_embd),
            "blk.0.attn_norm_2.weight": vector(n_embd),
            "blk.0.attn_q.weight": matrix(heads, 2 * n_embd),
            "blk.0.attn_k.weight": matrix(heads_kv, 2 * n_embd),
            "blk.0.attn_v.weight": matrix(heads_kv, 2 * n_embd),
            "blk.0.attn_output.weight": matrix(n_embd, heads),
            "blk.0.ffn_norm.weight": vector(n_embd),
            "blk.0.ffn_gate.weight": matrix(self.n_ff, n_embd),
            "blk.0.ffn_up.weight": matrix(self.n_ff, n_embd),
            "blk.0.ffn_down.weight": matrix(n_embd, self.n_ff),
        }
        if self.norm_before_fc:
            weights["enc.output_norm.weight"] = vector(len(LAYERS) * width)
        if self.has_rope_factors:
            weights["rope_freqs.weight"] = vector(self.n_rot // 2, 4.0)
        return weights
