"""How long the ring takes: a live model, learned from verdicts. Shared by the sessions of a coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from speculative.moment import Outcome


class Timing:
    """Times of the ring, in milliseconds.

    Attributes:
        draft_ms_per_token: What a token costs the draft model; None without one.
        plain_ms: What a plain window takes while nothing else is under way; None before the first.
    """

    def __init__(self) -> None:
        self.draft_ms_per_token: float | None = None
        self.plain_ms: float | None = None

    def add_plain(self, outcome: Outcome) -> None:
        """Learn from a plain window that had the ring to itself."""
        elapsed_ms = outcome.arrived_ms - outcome.sent_ms
        self.plain_ms = (
            elapsed_ms if self.plain_ms is None else self.plain_ms + (elapsed_ms - self.plain_ms) / 4
        )
