"""Embedding metrics: counts of requests, texts and batches of one embedding model."""

from __future__ import annotations

from collections import Counter
from typing import Final, Literal

from mesh.metrics.request_metrics import Histogram
from mesh.status import EmbeddingCounts

EMBEDDING_OUTCOMES: Final[tuple[EmbeddingOutcome, ...]] = ("stop", "abort", "error")
_REQUEST_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)

EmbeddingOutcome = Literal["stop", "abort", "error"]


class EmbeddingStatistics:
    """Since the model was loaded.

    Attributes:
        whole_s: Time from a request to its last vector.
        finished: Requests by how they ended: answered, left by their client, or failed.
        num_texts: Texts whose vectors were computed.
        num_tokens: Their tokens.
        num_batches: Batches that were computed.
        compute_s: Time that llama.cpp computed.
    """

    def __init__(self) -> None:
        self.whole_s = Histogram(_REQUEST_S)
        self.finished: Counter[EmbeddingOutcome] = Counter()
        self.num_texts = 0
        self.num_tokens = 0
        self.num_batches = 0
        self.compute_s = 0.0

    def computed(self, num_texts: int, num_tokens: int, compute_s: float) -> None:
        """Record a batch."""
        self.num_batches += 1
        self.num_texts += num_texts
        self.num_tokens += num_tokens
        self.compute_s += compute_s

    def ended(self, outcome: EmbeddingOutcome, took_s: float) -> None:
        """Record the end of a request."""
        self.finished[outcome] += 1
        if outcome == "stop":
            self.whole_s.observe(took_s)

    def counts(self, num_waiting: int) -> EmbeddingCounts:
        """For the status.

        Args:
            num_waiting: Requests with texts that wait now.
        """
        return EmbeddingCounts(
            waiting=num_waiting,
            requests=self.finished.total(),
            texts=self.num_texts,
            tokens=self.num_tokens,
            batches=self.num_batches,
            compute_ms=round(self.compute_s * 1e3, 3),
        )
