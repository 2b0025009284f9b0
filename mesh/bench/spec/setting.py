"""What is compared: ways to speculate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mesh.engine import SpeculationMode


@dataclass(frozen=True)
class Setting:
    """How one request may speculate.

    Attributes:
        mode: Who proposes.
        max_width: Most proposed tokens in one window (`--draft-max`), or None for the server's bound.
        depth: Most windows in flight, or None for the server's bound.
        label: What tables call it, or None for a name made of the limits.
    """

    mode: SpeculationMode
    max_width: int | None = None
    depth: int | None = None
    label: str | None = None

    @property
    def name(self) -> str:
        """Short, for tables: `auto`, `draft/4`, `ngram/8 depth 1`."""
        if self.label is not None:
            return self.label
        width = "" if self.max_width is None else f"/{self.max_width}"
        depth = "" if self.depth is None else f" depth {self.depth}"
        return f"{self.mode}{width}{depth}"

    @property
    def fields(self) -> dict[str, Any]:
        """Of the request body."""
        limits = {"mode": self.mode, "max_width": self.max_width, "depth": self.depth}
        return {"speculation": {name: value for name, value in limits.items() if value is not None}}


OFF: Final = Setting("off")
# What a comparison shows where there is no difference: the noise of the machine.
OFF_AGAIN: Final = Setting("off", label="off again")
AUTO: Final = Setting("auto")
DRAFT: Final = Setting("draft")
NGRAM: Final = Setting("ngram")
REPLAY: Final = Setting("replay")
