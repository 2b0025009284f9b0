"""Random block drafters for any model: DFlash, DSpark and DFlash2 files as llama.cpp reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import gguf
import numpy as np

from speculative.proposer import DrafterKind
from tests.support.gguf_source import GgufSource
from tests.support.tiny_models import copy_vocabulary, write_weights

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

Tensors = dict[str, "NDArray[np.float32]"]

# Rows of these are read by token id, and not multiplied.
_READ_BY_ID = ("markov_w1.weight", "selector_predecessor.weight", "selector_successor.weight")
_MARKOV_RANK = 32
_SELECTOR_RANK, _NUM_CANDIDATES = 16, 4
_KERNEL, _GROUP = 3, 16


@dataclass(frozen=True)
class BlockDrafter:
    """The shape of a random drafter."""

    kind: DrafterKind = DrafterKind.DFLASH
    """DFLASH, DSPARK or DFLASH2."""
    n_layers: int = 2
    """Layers."""
    block_size: int = 8
    """Rows of a block that it was trained with."""
    reads: tuple[int, ...] | None = None
    """Layers of the model whose input it reads; None for an early, a middle and the last one."""
    is_complete: bool = True
    """Whether it brings embedding and head."""
    num_own_tokens: int = 0
    """Tokens of a vocabulary of its own; 0 for the model's."""
    window: int = 0
    """Sliding window of every other layer, in positions; 0 for none."""
    is_causal: bool = False
    """Whether rows of a block see earlier ones only."""
    has_sections: bool = False
    """Rotary positions in sections (M-RoPE)."""
    has_confidence: bool = True
    """Of DSpark: a head for confidences."""
    samples_anchor: bool = True
    """Of DSpark: the first row foretells the first token."""
    shares_values: bool = False
    """Keys are values."""
    mask_token: int | None = None
    """Id of the mask token; None for the last one."""
    mixing: float = 1.0
    """Factor of what attention adds: random drafters repeat themselves less with more of it."""
    n_heads: int = 4
    n_heads_kv: int = 2
    head_size: int = 16
    n_ff: int = 96
    seed: int = 7
    """Of the weights."""

    def write(self, target: Path, path: Path) -> Path:
        """Write the drafter.

        Args:
            target: The model that it drafts for.
            path: Its file.

        Returns:
            The file.
        """
        source = GgufSource(target)
        architecture, given = source.header.architecture, source.tensors
        n_embd = source.header.integer(f"{architecture}.embedding_length")
        n_target_layers = source.header.integer(f"{architecture}.block_count")
        n_vocab = int(given["token_embd.weight"].shape[1])
        reads = self.reads or (1, n_target_layers // 2, n_target_layers - 1)
        noise = np.random.default_rng(self.seed)
        writer = gguf.GGUFWriter(path, "dflash")
        writer.add_name(f"random {self.kind.value}")
        self._add_metadata(writer, n_embd, n_vocab, reads)
        if architecture == "gemma4":
            writer.add_float32("dflash.embedding_scale", float(n_embd) ** 0.5)
        copy_vocabulary(writer, target, leaves_out=("tokenizer.ggml.mask_token_id",))
        mask = n_vocab - 1 if self.mask_token is None else self.mask_token
        writer.add_uint32("tokenizer.ggml.mask_token_id", mask)
        tensors = self._layers(noise, n_embd) | self._ends(noise, n_embd, n_vocab, len(reads))
        if self.num_own_tokens:
            own = np.sort(noise.choice(n_vocab, self.num_own_tokens, replace=False)).astype(np.int64)
            writer.add_tensor("d2t", own)
            tensors["output.weight"] = _matrix(noise, self.num_own_tokens, n_embd)
        if self.is_complete:
            names = ["token_embd.weight"] if self.num_own_tokens else ["token_embd.weight", "output.weight"]
            for name in names:
                if name in given:
                    writer.add_tensor(name, given[name].data, raw_dtype=given[name].tensor_type)
        write_weights(
            writer,
            tensors,
            lambda name, each: name in _READ_BY_ID or each.ndim != 2 or each.shape[1] % 32,
        )
        return path

    def _add_metadata(
        self, writer: gguf.GGUFWriter, n_embd: int, n_vocab: int, reads: tuple[int, ...]
    ) -> None:
        integers = {
            "block_count": self.n_layers,
            "context_length": 8192,
            "embedding_length": n_embd,
            "feed_forward_length": self.n_ff,
            "vocab_size": n_vocab,
            "block_size": self.block_size,
            "attention.head_count": self.n_heads,
            "attention.head_count_kv": self.n_heads_kv,
            "attention.key_length": self.head_size,
            "attention.value_length": self.head_size,
            "rope.dimension_count": self.head_size,
        }
        if self.window:
            integers["attention.sliding_window"] = self.window
        if self.kind is DrafterKind.DFLASH2:
            integers |= {
                "conv_kernel_size": _KERNEL,
                "conv_group_size": _GROUP,
                "selector_rank": _SELECTOR_RANK,
                "selector_top_k": _NUM_CANDIDATES,
            }
        for key, value in integers.items():
            writer.add_uint32(f"dflash.{key}", value)
        writer.add_float32("dflash.attention.layer_norm_rms_epsilon", 1e-6)
        writer.add_float32("dflash.rope.freq_base", 1e4)
        writer.add_array("dflash.target_layers", list(reads))
        if self.window:
            is_windowed = [layer % 2 == 0 for layer in range(self.n_layers)]
            writer.add_array("dflash.attention.sliding_window_pattern", is_windowed)
        if self.is_causal:
            writer.add_bool("dflash.attention.causal", val=True)
        if self.has_sections:
            writer.add_array("dflash.rope.dimension_sections", [self.head_size // 2, 0, 0, 0])
        if self.kind is DrafterKind.DSPARK:
            writer.add_bool("dflash.sample_from_anchor", val=self.samples_anchor)
            writer.add_bool("dflash.has_confidence_head", val=self.has_confidence)

    def _layers(self, noise: np.random.Generator, n_embd: int) -> Tensors:
        tensors: Tensors = {}
        inner = self.n_heads * self.head_size
        inner_kv = self.n_heads_kv * self.head_size
        for layer in range(self.n_layers):
            own: Tensors = {
                "attn_norm.weight": _vector(noise, n_embd),
                "attn_q.weight": _matrix(noise, inner, n_embd),
                "attn_k.weight": _matrix(noise, inner_kv, n_embd),
                "attn_output.weight": _matrix(noise, n_embd, inner) * np.float32(self.mixing),
                "attn_q_norm.weight": _vector(noise, self.head_size),
                "attn_k_norm.weight": _vector(noise, self.head_size),
                "ffn_norm.weight": _vector(noise, n_embd),
                "ffn_gate.weight": _matrix(noise, self.n_ff, n_embd),
                "ffn_up.weight": _matrix(noise, self.n_ff, n_embd),
                "ffn_down.weight": _matrix(noise, n_embd, self.n_ff),
            }
            if not self.shares_values:
                own["attn_v.weight"] = _matrix(noise, inner_kv, n_embd)
            if self.kind is DrafterKind.DFLASH2:
                num_products = 2 * _KERNEL * (n_embd // _GROUP)
                for part in ("attn", "ffn"):
                    base = noise.normal(0.0, 0.5, (2, _KERNEL, n_embd)).astype(np.float32)
                    own[f"{part}_conv_base"] = base
                    own[f"{part}_conv_proj.weight"] = _matrix(noise, num_products, n_embd)
            tensors |= {f"blk.{layer}.{name}": weights for name, weights in own.items()}
        return tensors

    def _ends(self, noise: np.random.Generator, n_embd: int, n_vocab: int, num_read: int) -> Tensors:
        tensors: Tensors = {
            "fc.weight": _matrix(noise, n_embd, num_read * n_embd),
            "enc.output_norm.weight": _vector(noise, n_embd),
            "output_norm.weight": _vector(noise, n_embd),
        }
        if self.kind is DrafterKind.DSPARK:
            tensors["markov_w1.weight"] = _matrix(noise, n_vocab, _MARKOV_RANK)
            tensors["markov_w2.weight"] = 3 * _matrix(noise, self.num_own_tokens or n_vocab, _MARKOV_RANK)
            if self.has_confidence:
                tensors["conf_proj.weight"] = _matrix(noise, 1, n_embd + _MARKOV_RANK)
                tensors["conf_proj.bias"] = np.zeros(1, np.float32)
        if self.kind is DrafterKind.DFLASH2:
            tensors["selector_predecessor.weight"] = 2 * _matrix(noise, n_vocab, _SELECTOR_RANK)
            tensors["selector_successor.weight"] = 2 * _matrix(noise, n_vocab, _SELECTOR_RANK)
            tensors["selector_hidden.weight"] = _matrix(noise, _SELECTOR_RANK, n_embd)
        return tensors


def _matrix(noise: np.random.Generator, num_outputs: int, num_inputs: int) -> NDArray[np.float32]:
    return noise.normal(0.0, 1.5 / np.sqrt(num_inputs), (num_outputs, num_inputs)).astype(np.float32)


def _vector(noise: np.random.Generator, size: int) -> NDArray[np.float32]:
    return noise.normal(1.0, 0.1, size).astype(np.float32)
