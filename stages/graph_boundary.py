"""Graph boundary: names and widths of the tensors where hidden states leave and enter a graph.

llama.cpp takes hidden states in place of an embedding's rows and, in many families, does with them what it
does with an embedding: scales them, norms them, adds learned positions. Such a stage is given token ids
instead, and what the graph made of them is replaced by the hidden states, in the tensor that the first layer
reads (the *inlet*). What follows is then the whole model's own arithmetic on the whole model's own numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DEFAULT_OUTLET: Final = "l_out"
_PREFIX: Final = "spanmesh."


@dataclass(frozen=True)
class GraphBoundary:
    """How a stage's graph is entered and left.

    Attributes:
        row_width: float32 values of one row of hidden states.
        outlet: Name of the tensor that is a layer's output, without the layer's number.
        inlet: Name of the tensor that incoming hidden states replace; None if they go in as embeddings.
        takes_tokens: Whether the stage looks at the token ids themselves, whatever its layers.
        blanks_before: Layers without weights that stand in the file before the stage's own, see
            `stages.slicing.architectures.rules.Blanks`.
        blanks_after: The same after them.
    """

    row_width: int
    outlet: str = DEFAULT_OUTLET
    inlet: str | None = None
    takes_tokens: bool = False
    blanks_before: int = 0
    blanks_after: int = 0

    def outlet_of(self, layer: int) -> str:
        """Name of one layer's output in llama.cpp's graph, counted from 0 within the stage."""
        return f"{self.outlet}-{self.blanks_before + layer}"

    def to_metadata(self, n_embd: int) -> Mapping[str, str | int | bool]:
        """What a stage file says of it: nothing that is usual, so that most files say nothing."""
        usual = GraphBoundary(n_embd)
        return {
            _PREFIX + name: value
            for name, value in vars(self).items()
            if value is not None and value != getattr(usual, name)
        }

    @classmethod
    def from_metadata(cls, text_of: Callable[[str], str | None], n_embd: int) -> GraphBoundary:
        """What a loaded file says.

        Args:
            text_of: Gives a metadata value as text, or None.
            n_embd: Width of the model.
        """
        return cls(
            row_width=int(text_of(_PREFIX + "row_width") or n_embd),
            outlet=text_of(_PREFIX + "outlet") or DEFAULT_OUTLET,
            inlet=text_of(_PREFIX + "inlet"),
            takes_tokens=text_of(_PREFIX + "takes_tokens") == "true",
            blanks_before=int(text_of(_PREFIX + "blanks_before") or 0),
            blanks_after=int(text_of(_PREFIX + "blanks_after") or 0),
        )
