"""Tiny random models of several architectures, made by gguf-py, that llama.cpp loads in milliseconds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from tests.support.gguf_source import GgufSource

N_VOCAB = 320


@dataclass(frozen=True)
class TinyModel:
    """The shape of a tiny model."""

    architecture: str
    """llama, qwen2, qwen2vl, qwen3, gemma2, gemma3, internlm2 or granite."""
    n_layers: int = 6
    """Layers."""
    is_tied: bool = False
    """No head of its own."""
    has_rope_factors: bool = False
    """One tensor of rope factors for all layers, as in Llama 3."""
    window: int = 16
    """Sliding window in positions, gemma3 only."""
    n_embd: int = 64
    """Width."""
    n_ff: int = 96
    n_heads: int = 4
    n_heads_kv: int = 2
    head_size: int = 16
    seed: int = 1
    """Of the weights."""
    n_ctx_train: int = 1024
    is_float: bool = False
    """float32 weights: llama.cpp rounds what it multiplies with quantised ones."""

    def write(
        self,
        path: Path,
        *,
        without: frozenset[str] = frozenset(),
        integers: dict[str, int] | None = None,
        arrays: dict[str, list[int]] | None = None,
        alignment: int | None = None,
        tensors_per_file: int = 0,
        controls: tuple[str, ...] = (),
    ) -> Path:
        """Write the model, if wanted without some tensors, with more metadata or tokens, or in several files.

        Returns:
            The file, or the first one.
        """
        writer = gguf.GGUFWriter(path, self.architecture, split_max_tensors=tensors_per_file)
        self._add_metadata(writer)
        if alignment is not None:
            writer.add_custom_alignment(alignment)
        for key, number in (integers or {}).items():
            writer.add_uint32(key, number)
        for key, numbers in (arrays or {}).items():
            writer.add_array(key, numbers)
        add_vocabulary(writer, controls)
        weights = {name: each for name, each in self._weights().items() if name not in without}
        write_weights(writer, weights, lambda _, each: each.ndim == 1 or self.is_float)
        return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if tensors_per_file else path

    def _add_metadata(self, writer: gguf.GGUFWriter) -> None:
        writer.add_name(f"Tiny {self.architecture}")
        writer.add_block_count(self.n_layers)
        writer.add_context_length(self.n_ctx_train)
        writer.add_embedding_length(self.n_embd)
        writer.add_feed_forward_length(self.n_ff)
        writer.add_head_count(self.n_heads)
        writer.add_head_count_kv(self.n_heads_kv)
        writer.add_key_length(self.head_size)
        writer.add_value_length(self.head_size)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(10_000.0)
        if self.architecture == "gemma3":
            writer.add_sliding_window(self.window)
        if self.architecture == "granite":
            writer.add_embedding_scale(12.0)
            writer.add_residual_scale(0.5)
            writer.add_logit_scale(2.0)

    def _weights(self) -> dict[str, NDArray[np.float32]]:
        noise = np.random.default_rng(self.seed)
        heads, heads_kv = self.n_heads * self.head_size, self.n_heads_kv * self.head_size

        def matrix(rows: int, columns: int) -> NDArray[np.float32]:
            return noise.normal(0.0, 2.0 / np.sqrt(columns), (rows, columns)).astype(np.float32)

        def vector(size: int, mean: float = 1.0) -> NDArray[np.float32]:
            return noise.normal(mean, 0.1, size).astype(np.float32)

        weights = {
            "token_embd.weight": matrix(N_VOCAB, self.n_embd),
            "output_norm.weight": vector(self.n_embd),
        }
        if not self.is_tied:
            weights["output.weight"] = matrix(N_VOCAB, self.n_embd)
        if self.has_rope_factors:
            weights["rope_freqs.weight"] = vector(self.head_size // 2, 4.0)
        for layer in range(self.n_layers):
            kinds = {
                "attn_norm.weight": vector(self.n_embd),
                "attn_q.weight": matrix(heads, self.n_embd),
                "attn_k.weight": matrix(heads_kv, self.n_embd),
                "attn_v.weight": matrix(heads_kv, self.n_embd),
                "attn_output.weight": matrix(self.n_embd, heads),
                "ffn_norm.weight": vector(self.n_embd),
                "ffn_gate.weight": matrix(self.n_ff, self.n_embd),
                "ffn_up.weight": matrix(self.n_ff, self.n_embd),
                "ffn_down.weight": matrix(self.n_embd, self.n_ff),
            }
            if self.architecture in ("qwen2", "qwen2vl"):
                kinds |= {
                    f"attn_{part}.bias": vector(size, 0.0)
                    for part, size in zip("qkv", (heads, heads_kv, heads_kv), strict=True)
                }
            if self.architecture in ("qwen3", "gemma3"):
                kinds |= {f"attn_{part}_norm.weight": vector(self.head_size) for part in "qk"}
            if self.architecture in ("gemma2", "gemma3"):
                kinds |= {f"post_{part}_norm.weight": vector(self.n_embd) for part in ("attention", "ffw")}
            weights |= {f"blk.{layer}.{kind}": tensor for kind, tensor in kinds.items()}
        return weights


def write_weights(
    writer: gguf.GGUFWriter,
    weights: Mapping[str, NDArray[np.float32]],
    is_kept: Callable[[str, NDArray[np.float32]], Any],
) -> None:
    """Write tensors in Q8_0, or as they are, behind the metadata, and close the file.

    Args:
        writer: Has all metadata.
        weights: By name.
        is_kept: Whether a tensor stays as it is.
    """
    for name, each in weights.items():
        if is_kept(name, each):
            writer.add_tensor(name, each)
        else:
            packed = gguf.quants.quantize(each, GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(
    writer: gguf.GGUFWriter, controls: tuple[str, ...] = (), *, n_vocab: int = N_VOCAB
) -> None:
    """A SentencePiece vocabulary: three special tokens, every byte, some letters, and further controls.

    Tokens beyond `N_VOCAB` are controls as well.
    """
    unused = tuple(f"<unused{number}>" for number in range(n_vocab - N_VOCAB))
    special = ["<unk>", "<s>", "</s>"]
    encoded_bytes = [f"<0x{number:02X}>" for number in range(256)]
    num_letters = N_VOCAB - len(special) - len(encoded_bytes) - len(controls)
    letters = [chr(ord("A") + number) for number in range(num_letters)]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * len(encoded_bytes) + [gguf.TokenType.NORMAL] * len(letters)
    kinds += [gguf.TokenType.CONTROL] * (len(controls) + len(unused))
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *encoded_bytes, *letters, *controls, *unused])
    writer.add_token_scores([-float(number) for number in range(n_vocab)])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def copy_vocabulary(writer: gguf.GGUFWriter, model: Path, *, leaves_out: tuple[str, ...] = ()) -> None:
    """Write a model's vocabulary and chat template.

    Args:
        writer: Of another file.
        model: The model's file.
        leaves_out: Keys of its metadata.
    """
    GgufSource(model).copy_metadata(
        writer, lambda key: key.startswith("tokenizer.") and key not in leaves_out
    )
