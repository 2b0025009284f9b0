"""Sizes of a random Gemma 4 and of its assistant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support.tiny_families import HEADS, N_EMBD

if TYPE_CHECKING:
    from tests.support.tiny_families import Metadata


@dataclass(frozen=True)
class Gemma4Shape:
    """Sizes of a model or of its assistant, which have the same keys."""

    windows: tuple[bool, ...]
    """For each layer whether it has a window; the last but one has, the last has not."""
    n_embd: int = N_EMBD
    """Width."""
    n_ff: int = 128
    heads: int = HEADS
    narrow: int = 64
    """Values of a head with a window."""
    narrow_kv: int = 2
    """Heads of keys with a window."""
    broad: int = 128
    """Values of a head without a window."""
    broad_kv: int = 1
    """Heads of keys without a window."""
    window: int = 16
    """Positions."""
    narrow_base: float = 1_000.0
    """Base of the rotations with a window."""
    broad_base: float = 10_000.0
    """Base of the rotations without a window."""
    n_ctx: int = 512
    """Positions that the model was trained with."""

    def head(self, layer: int) -> int:
        """Values of a head."""
        return self.narrow if self.windows[layer] else self.broad

    def heads_kv(self, layer: int) -> int:
        """Heads of keys."""
        return self.narrow_kv if self.windows[layer] else self.broad_kv

    def metadata(self) -> Metadata:
        """What model and assistant say, below the name of the architecture."""
        return {
            "block_count": len(self.windows),
            "context_length": self.n_ctx,
            "embedding_length": self.n_embd,
            "embedding_length_per_layer_input": 0,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.heads,
            "attention.head_count_kv": [self.heads_kv(layer) for layer in range(len(self.windows))],
            "attention.key_length": self.broad,
            "attention.value_length": self.broad,
            "attention.key_length_swa": self.narrow,
            "attention.value_length_swa": self.narrow,
            "attention.sliding_window": self.window,
            "attention.sliding_window_pattern": [*self.windows],
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.dimension_count": self.broad,
            "rope.dimension_count_swa": self.narrow,
            "rope.freq_base": self.broad_base,
            "rope.freq_base_swa": self.narrow_base,
        }
