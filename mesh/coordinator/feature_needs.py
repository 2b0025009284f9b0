"""Hidden states of a target that a drafter reads."""

from __future__ import annotations

from dataclasses import dataclass

from stages.transport.hidden_codec import HiddenType


@dataclass(frozen=True)
class FeatureNeeds:
    """Features that a drafter reads."""

    layers: tuple[int, ...]
    """Layers whose outputs it reads, in its order; the number of the model's layers stands for the head
    state."""
    n_layers: int
    """Layers of the model."""
    n_embd: int
    """Values of a row of one layer."""
    hidden_type: HiddenType = HiddenType.F16
    """Format on the wire."""
    context: int = 512
    """Number of the prompt's last positions whose features are wanted."""

    def bytes_per_token(self) -> int:
        """Size of the features of one position."""
        return len(self.layers) * self.hidden_type.row_bytes(self.n_embd)
