"""Tiny random embedding models, made by gguf-py: llama.cpp's own generator leaves these families out."""

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from tests.support.tiny_models import N_VOCAB, TinyModel, add_vocabulary

MEAN, CLS, LAST, RANK = 1, 2, 3, 4
Tensors = dict[str, NDArray[np.float32]]
# What llama.cpp adds up as it is.
_UNQUANTISED = ("token_types.weight", "position_embd.weight")


@dataclass(frozen=True)
class TinyEmbedder:
    """The shape of a tiny embedding model whose attention is not causal.

    Attributes:
        architecture: bert, nomic-bert, jina-bert-v2 or gemma-embedding.
        pooling: `pooling_type`; None leaves it out.
        n_ctx: Positions that it was trained for.
        n_vocab: Token ids.
        seed: Of the weights.
    """

    architecture: str = "bert"
    pooling: int | None = MEAN
    n_layers: int = 2
    n_embd: int = 64
    n_ff: int = 96
    n_heads: int = 4
    n_ctx: int = 512
    n_vocab: int = N_VOCAB
    window: int = 16
    seed: int = 1

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_heads

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        writer.add_name(f"Tiny {self.architecture}")
        writer.add_block_count(self.n_layers)
        writer.add_context_length(self.n_ctx)
        writer.add_embedding_length(self.n_embd)
        writer.add_feed_forward_length(self.n_ff)
        writer.add_head_count(self.n_heads)
        writer.add_token_type_count(2)
        if self.pooling is not None:
            writer.add_uint32(f"{self.architecture}.pooling_type", self.pooling)
        if self.architecture == "gemma-embedding":
            writer.add_head_count_kv(self.n_heads)
            writer.add_key_length(self.head_size)
            writer.add_value_length(self.head_size)
            writer.add_layer_norm_rms_eps(1e-6)
            writer.add_sliding_window(self.window)
            writer.add_rope_freq_base(10_000.0)
            add_vocabulary(writer)
        else:
            writer.add_layer_norm_eps(1e-6)
            writer.add_causal_attention(value=False)
            if self.architecture == "nomic-bert":
                writer.add_rope_freq_base(10_000.0)
            _add_wordpieces(writer, self.n_vocab)
        for name, weights in self._weights().items():
            if weights.ndim == 1 or name in _UNQUANTISED:
                writer.add_tensor(name, weights)
            else:
                packed = gguf.quants.quantize(weights, GGMLQuantizationType.Q8_0)
                writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _weights(self) -> Tensors:
        noise = np.random.default_rng(self.seed)

        def matrix(rows: int, columns: int) -> NDArray[np.float32]:
            return noise.normal(0.0, 2.0 / np.sqrt(columns), (rows, columns)).astype(np.float32)

        def vector(size: int, mean: float = 1.0) -> NDArray[np.float32]:
            return noise.normal(mean, 0.1, size).astype(np.float32)

        def norm(name: str) -> Tensors:
            return {f"{name}.weight": vector(self.n_embd), f"{name}.bias": vector(self.n_embd, 0.0)}

        n_embd, n_ff = self.n_embd, self.n_ff
        weights = {"token_embd.weight": matrix(self.n_vocab, n_embd)}
        if self.architecture == "gemma-embedding":
            weights["output_norm.weight"] = vector(n_embd)
        else:
            weights["token_types.weight"] = matrix(2, n_embd)
            weights |= norm("token_embd_norm")
        if self.architecture == "bert":
            weights["position_embd.weight"] = matrix(self.n_ctx, n_embd)
        has_biases, has_gate = self.architecture in ("bert", "jina-bert-v2"), self.architecture != "bert"
        for layer in range(self.n_layers):
            kinds: Tensors = {f"attn_{part}.weight": matrix(n_embd, n_embd) for part in "qkv"}
            kinds["attn_output.weight"] = matrix(n_embd, n_embd)
            kinds |= {"ffn_up.weight": matrix(n_ff, n_embd), "ffn_down.weight": matrix(n_embd, n_ff)}
            if has_gate:
                kinds["ffn_gate.weight"] = matrix(n_ff, n_embd)
            if self.architecture == "gemma-embedding":
                names = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
                kinds |= {f"{name}.weight": vector(n_embd) for name in names}
                kinds |= {f"attn_{part}_norm.weight": vector(self.head_size) for part in "qk"}
            else:
                kinds |= norm("attn_output_norm") | norm("layer_output_norm")
            if has_biases:
                kinds |= {f"attn_{part}.bias": vector(n_embd, 0.0) for part in ("q", "k", "v", "output")}
                kinds["ffn_down.bias"] = vector(n_embd, 0.0)
            if self.architecture == "bert":
                kinds["ffn_up.bias"] = vector(n_ff, 0.0)
            weights |= {f"blk.{layer}.{kind}": tensor for kind, tensor in kinds.items()}
        return weights


def tiny_chat_model_with_pooling(path: Path, architecture: str = "qwen3", pooling: int = LAST) -> Path:
    """A causal model, with a KV cache and logits, that makes vectors as well."""
    return TinyModel(architecture).write(path, integers={f"{architecture}.pooling_type": pooling})


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
