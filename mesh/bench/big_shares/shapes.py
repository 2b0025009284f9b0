"""Shapes of models of about a billion parameters. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True)
class Shape:
    """Of a model of llama.cpp's architecture `llama`.

    Attributes:
        n_layers: Layers.
        n_embd: Width of the hidden state.
        n_ff: Width inside the feed-forward part.
        n_heads: Heads of queries.
        n_heads_kv: Heads of keys and values.
        n_vocab: Tokens.
        is_tied: Whether the embedding is the head as well.
    """

    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_heads_kv: int
    n_vocab: int
    is_tied: bool

    @property
    def head_width(self) -> int:
        """Elements of one head."""
        return self.n_embd // self.n_heads

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(rows * columns for _, rows, columns in self.matrices()) + sum(
            width for _, width in self.vectors()
        )

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """Name, rows and columns of each matrix, in the order of the file."""
        kv = self.n_heads_kv * self.head_width
        yield "token_embd.weight", self.n_vocab, self.n_embd
        if not self.is_tied:
            yield "output.weight", self.n_vocab, self.n_embd
        for layer in range(self.n_layers):
            for name, rows, columns in (
                ("attn_q", self.n_embd, self.n_embd),
                ("attn_k", kv, self.n_embd),
                ("attn_v", kv, self.n_embd),
                ("attn_output", self.n_embd, self.n_embd),
                ("ffn_gate", self.n_ff, self.n_embd),
                ("ffn_up", self.n_ff, self.n_embd),
                ("ffn_down", self.n_embd, self.n_ff),
            ):
                yield f"blk.{layer}.{name}.weight", rows, columns

    def vectors(self) -> Iterator[tuple[str, int]]:
        """Name and width of each norm."""
        yield "output_norm.weight", self.n_embd
        for layer in range(self.n_layers):
            yield f"blk.{layer}.attn_norm.weight", self.n_embd
            yield f"blk.{layer}.ffn_norm.weight", self.n_embd


SHAPES: Final[Mapping[str, Shape]] = {
    # That of TinyLlama-1.1B.
    "1.1b": Shape(22, 2048, 5632, 32, 4, 32_000, is_tied=False),
    # That of Llama-3.2-1B, with its large vocabulary.
    "1.2b": Shape(16, 2048, 8192, 32, 8, 128_256, is_tied=True),
    # Made in a moment, for a test of all the rest.
    "tiny": Shape(6, 64, 128, 4, 2, 320, is_tied=False),
}
