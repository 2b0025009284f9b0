"""Tiny random embedding models, made by gguf-py: llama.cpp's own generator leaves these families out."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.support.tiny_models import N_VOCAB, TinyModel, add_vocabulary, write_weights

MEAN, CLS, LAST, RANK = 1, 2, 3, 4
Tensors = dict[str, NDArray[np.float32]]
# What llama.cpp adds up as it is.
_UNQUANTISED = ("token_types.weight", "position_embd.weight")


@dataclass(frozen=True)
class Family:
    """What tells an architecture of embedding models from others."""

    norms_first: bool = False
    """Norms before attention and FFN; otherwise after each, with biases."""
    has_rms: bool = False
    """RMS norms, without biases."""
    has_biases: bool = False
    """Biases of matrices."""
    has_positions: bool = False
    """A table of positions; the others have rope or ALiBi."""
    gate: Literal["none", "own", "half"] = "none"
    """None, a matrix of its own, or the first half of the one that goes up."""
    joins_qkv: bool = False
    """Queries, keys and values out of one matrix."""
    output_norm: str | None = None
    """The last norm; None without."""
    has_window: bool = False
    """Layers with a sliding window."""
    has_head_norms: bool = False
    """Norms of queries and keys, and of what attention and FFN return."""
    has_experts: bool = False
    """Every second layer has experts."""
    has_types: bool = False
    """A table of token types."""


FAMILIES = {
    "bert": Family(has_biases=True, has_positions=True, has_types=True),
    "nomic-bert": Family(gate="own", has_types=True),
    "nomic-bert-moe": Family(has_biases=True, has_experts=True, has_types=True),
    "jina-bert-v2": Family(has_biases=True, gate="own", has_types=True),
    "jina-bert-v3": Family(has_biases=True, has_types=True),
    "modern-bert": Family(
        norms_first=True, gate="half", joins_qkv=True, output_norm="output_norm", has_window=True
    ),
    "neo-bert": Family(
        norms_first=True, has_rms=True, gate="half", joins_qkv=True, output_norm="enc.output_norm"
    ),
    "eurobert": Family(norms_first=True, has_rms=True, gate="own", output_norm="output_norm"),
    "gemma-embedding": Family(
        norms_first=True,
        has_rms=True,
        gate="own",
        output_norm="output_norm",
        has_window=True,
        has_head_norms=True,
    ),
}
_N_EXPERTS = 4


@dataclass(frozen=True)
class TinyEmbedder:
    """The shape of a tiny embedding model whose attention is not causal."""

    architecture: str = "bert"
    """One of `FAMILIES`."""
    pooling: int | None = MEAN
    """`pooling_type`; None leaves it out."""
    n_layers: int = 2
    n_embd: int = 64
    n_ff: int = 96
    n_heads: int = 4
    n_ctx: int = 512
    """Positions that it was trained for."""
    n_vocab: int = N_VOCAB
    """Token ids."""
    window: int = 16
    """Sliding window in positions, where the family has one."""
    window_pattern: int | tuple[bool, ...] | None = 2
    """Every so many layers one has no window, or whether each has one; None leaves it out."""
    is_float: bool = False
    """float32 weights: llama.cpp rounds what it multiplies with quantised ones."""
    seed: int = 1
    """Of the weights."""

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_heads

    @property
    def family(self) -> Family:
        return FAMILIES[self.architecture]

    def write(self, path: Path, *, tensors_per_file: int = 0) -> Path:
        """Write the model, if wanted in several files; returns the file, or the first one."""
        family = self.family
        writer = gguf.GGUFWriter(path, self.architecture, split_max_tensors=tensors_per_file)
        writer.add_name(f"Tiny {self.architecture}")
        writer.add_block_count(self.n_layers)
        writer.add_context_length(self.n_ctx)
        writer.add_embedding_length(self.n_embd)
        writer.add_feed_forward_length(self.n_ff)
        writer.add_head_count(self.n_heads)
        writer.add_head_count_kv(self.n_heads)
        writer.add_token_type_count(2)
        writer.add_rope_freq_base(10_000.0)
        writer.add_causal_attention(value=False)
        if self.pooling is not None:
            writer.add_uint32(f"{self.architecture}.pooling_type", self.pooling)
        if family.has_rms:
            writer.add_layer_norm_rms_eps(1e-6)
        else:
            writer.add_layer_norm_eps(1e-6)
        if family.has_window:
            writer.add_sliding_window(self.window)
            if self.window_pattern is not None:
                writer.add_sliding_window_pattern(self.window_pattern)
        if family.has_experts:
            writer.add_moe_every_n_layers(2)
            writer.add_expert_count(_N_EXPERTS)
            writer.add_expert_used_count(2)
        if self.architecture == "gemma-embedding":
            add_vocabulary(writer)
        else:
            _add_wordpieces(writer, self.n_vocab)
        write_weights(
            writer,
            self._weights(),
            lambda name, each: each.ndim == 1 or name in _UNQUANTISED or self.is_float,
        )
        return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if tensors_per_file else path

    def _weights(self) -> Tensors:
        noise, family = np.random.default_rng(self.seed), self.family

        def matrix(*shape: int) -> NDArray[np.float32]:
            return noise.normal(0.0, 2.0 / np.sqrt(shape[-1]), shape).astype(np.float32)

        def vector(size: int, mean: float = 1.0) -> NDArray[np.float32]:
            return noise.normal(mean, 0.1, size).astype(np.float32)

        def norm(name: str, *, has_bias: bool = not family.norms_first) -> Tensors:
            bias = {f"{name}.bias": vector(self.n_embd, 0.0)} if has_bias else {}
            return {f"{name}.weight": vector(self.n_embd)} | bias

        def linear(name: str, n_out: int, n_in: int) -> Tensors:
            bias = {f"{name}.bias": vector(n_out, 0.0)} if family.has_biases else {}
            return {f"{name}.weight": matrix(n_out, n_in)} | bias

        n_embd, n_ff = self.n_embd, self.n_ff
        weights = {"token_embd.weight": matrix(self.n_vocab, n_embd)}
        if family.output_norm is not None:
            weights |= norm(family.output_norm)
        if not family.has_rms:
            weights |= norm("token_embd_norm")
        if family.has_types:
            weights["token_types.weight"] = matrix(2, n_embd)
        if family.has_positions:
            weights["position_embd.weight"] = matrix(self.n_ctx, n_embd)
        for layer in range(self.n_layers):
            kinds = linear("attn_output", n_embd, n_embd)
            if family.joins_qkv:
                kinds |= linear("attn_qkv", 3 * n_embd, n_embd)
            else:
                for part in "qkv":
                    kinds |= linear(f"attn_{part}", n_embd, n_embd)
            if family.has_experts and layer % 2:
                kinds["ffn_gate_inp.weight"] = matrix(_N_EXPERTS, n_embd)
                kinds["ffn_up_exps.weight"] = matrix(_N_EXPERTS, n_ff, n_embd)
                kinds["ffn_down_exps.weight"] = matrix(_N_EXPERTS, n_embd, n_ff)
            else:
                kinds |= linear("ffn_up", 2 * n_ff if family.gate == "half" else n_ff, n_embd)
                kinds |= linear("ffn_down", n_embd, n_ff)
                if family.gate == "own":
                    kinds["ffn_gate.weight"] = matrix(n_ff, n_embd)
            first, last = (
                ("attn_norm", "ffn_norm") if family.norms_first else ("attn_output_norm", "layer_output_norm")
            )
            kinds |= norm(first) | norm(last)
            if family.has_head_norms:
                kinds |= norm("post_attention_norm") | norm("post_ffw_norm")
                kinds |= {f"attn_{part}_norm.weight": vector(self.head_size) for part in "qk"}
            weights |= {f"blk.{layer}.{kind}": tensor for kind, tensor in kinds.items()}
        return weights


def tiny_chat_model_with_pooling(
    path: Path, architecture: str = "qwen3", pooling: int = LAST, *, is_float: bool = False
) -> Path:
    """A causal model, with a KV cache and logits, that makes vectors as well."""
    model = TinyModel(architecture, is_float=is_float)
    return model.write(path, integers={f"{architecture}.pooling_type": pooling})


def _add_wordpieces(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """A WordPiece vocabulary: special tokens, letters at the start of a word and within, and some words."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [chr(ord("a") + number) for number in range(26)]
    pieces = [f"\u2581{letter}" for letter in letters] + letters
    words = [f"\u2581word{number}" for number in range(n_vocab - len(special) - len(pieces))]
    kinds = [gguf.TokenType.CONTROL, gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 3
    kinds += [gguf.TokenType.NORMAL] * (len(pieces) + len(words))
    writer.add_tokenizer_model("bert")
    writer.add_token_list(special + pieces + words)
    writer.add_token_types(kinds)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    writer.add_mask_token_id(4)
