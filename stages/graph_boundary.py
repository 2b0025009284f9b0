"""Graph boundary: names and widths of the tensors where hidden states leave and enter a graph.

llama.cpp takes hidden states in place of an embedding's rows and, in many families, treats them as an
embedding: scales them, norms them, adds learned positions. Such a stage gets token ids instead, and the
hidden states replace the result in the tensor that the first layer reads (the *inlet*). All later arithmetic
is then the whole model's own, on the whole model's own numbers.
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
    """Entry and exit of a stage's graph."""

    row_width: int
    """float32 values of one row of hidden states."""
    outlet: str = DEFAULT_OUTLET
    """Name of the tensor that is a layer's output, without the layer's number."""
    outlet_shift: int = 0
    """1 if that tensor has the number of the next layer, whose input it is."""
    inlet: str | None = None
    """Name of the tensor that hidden states replace; None if they go in as embeddings."""
    takes_tokens: bool = False
    """Whether layers of the stage use token ids."""
    takes_rows: bool = False
    """Whether they use the embedding again: rows that are no tokens come with hidden states, as they entered
    the first stage."""
    hands_on_rows: bool = False
    """Whether layers of a later stage do, so that such rows go on with hidden states."""
    marks_all_rows: bool = False
    """Whether all rows have to be marked as outputs where any is: the head does not gather those that are
    marked, and llama.cpp would take the logits of the first rows for theirs."""
    barred_from: int = 0
    """First of the tokens that are never sampled; llama.cpp bars them in the first row of a batch only."""
    barred_to: int = 0
    """The last of them plus one; 0 if there are none."""
    blanks_before: int = 0
    """Layers without weights in the file before the stage's own, see
    `stages.slicing.architectures.rule_types.Blanks`."""
    blanks_after: int = 0
    """The same after them."""

    def outlet_of(self, layer: int) -> str:
        """Name of one layer's output in llama.cpp's graph, counted from 0 within the stage."""
        return f"{self.outlet}-{self.blanks_before + layer + self.outlet_shift}"

    def to_metadata(self, n_embd: int) -> Mapping[str, str | int | bool]:
        """Metadata of a stage file; empty for the usual values, so for most files."""
        usual = GraphBoundary(n_embd)
        return {
            _PREFIX + name: value
            for name, value in vars(self).items()
            if value is not None and value != getattr(usual, name)
        }

    @classmethod
    def from_metadata(cls, text_of: Callable[[str], str | None], n_embd: int) -> GraphBoundary:
        """The boundary from a loaded file's metadata.

        Args:
            text_of: Returns a metadata value as text, or None.
            n_embd: Width of the model.
        """
        return cls(
            row_width=int(text_of(_PREFIX + "row_width") or n_embd),
            outlet=text_of(_PREFIX + "outlet") or DEFAULT_OUTLET,
            outlet_shift=int(text_of(_PREFIX + "outlet_shift") or 0),
            inlet=text_of(_PREFIX + "inlet"),
            takes_tokens=text_of(_PREFIX + "takes_tokens") == "true",
            takes_rows=text_of(_PREFIX + "takes_rows") == "true",
            hands_on_rows=text_of(_PREFIX + "hands_on_rows") == "true",
            marks_all_rows=text_of(_PREFIX + "marks_all_rows") == "true",
            barred_from=int(text_of(_PREFIX + "barred_from") or 0),
            barred_to=int(text_of(_PREFIX + "barred_to") or 0),
            blanks_before=int(text_of(_PREFIX + "blanks_before") or 0),
            blanks_after=int(text_of(_PREFIX + "blanks_after") or 0),
        )
