"""Where the bytes of a stage came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Transfer:
    """Counts of one stage, or of several.

    Attributes:
        reused_bytes: Of weights that the host had: in another stage, in a model file, from an earlier try.
        head_bytes: Of weights that the head sent.
        hub_bytes: Of weights that came straight from the hub.
        wrong_pieces: Pieces that did not have their hash, and were fetched once more.
    """

    reused_bytes: int = 0
    head_bytes: int = 0
    hub_bytes: int = 0
    wrong_pieces: int = 0

    def __add__(self, other: Transfer) -> Transfer:
        """Both together."""
        return Transfer(
            self.reused_bytes + other.reused_bytes,
            self.head_bytes + other.head_bytes,
            self.hub_bytes + other.hub_bytes,
            self.wrong_pieces + other.wrong_pieces,
        )

    @property
    def moved_bytes(self) -> int:
        """What crossed a network."""
        return self.head_bytes + self.hub_bytes
