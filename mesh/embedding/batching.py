"""Batches of texts, out of requests of several clients in turn."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mesh.util.fair_queue import FairQueue

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from stages.embedding.model_file import BatchLimits


@dataclass(eq=False)
class TextsRequest:
    """Texts of one request."""

    texts: Sequence[tuple[int, ...]]
    """Token ids of each, at least one text."""
    client: str | None = None
    """Client of the request, for fair turns. None where the API is open."""
    waiting: deque[int] = field(init=False)
    """Indices of the texts that are in no batch yet."""
    num_failures: int = 0
    """Batches with some of its texts that failed. From the first on, it shares no batch: its texts may be
    what ends the process that computes them."""
    num_left: int = field(init=False)
    """Texts without a vector."""
    is_queued: bool = False
    """Whether it is in the queue."""

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.texts)))
        self.num_left = len(self.texts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(map(len, self.texts))


@dataclass(frozen=True)
class BatchPart:
    """Texts of one request in a batch."""

    request: TextsRequest
    """The request."""
    indices: tuple[int, ...]
    """Indices of the texts, in the order of the batch."""


class TextQueue:
    """Requests with texts that wait, and the next batch of them.

    Clients take turns, see `FairQueue`; a request with more texts than fit one batch waits for its next turn.

    Args:
        limits: Limits of a batch. No text is longer than the longest.
        most: Requests that may wait.
    """

    def __init__(self, limits: BatchLimits, most: int) -> None:
        self._limits = limits
        self._queue = FairQueue[str | None, TextsRequest](most)

    def __len__(self) -> int:
        """Number of requests that wait."""
        return len(self._queue)

    @property
    def waiting(self) -> list[TextsRequest]:
        """Requests that wait."""
        return list(self._queue)

    def has_room(self, client: str | None) -> bool:
        """Whether a client may add a request."""
        return self._queue.has_room(client)

    def add(self, request: TextsRequest) -> None:
        """Add a request, or what waits of it, unless it is there already."""
        if not request.is_queued:
            request.is_queued = True
            self._queue.add(request.client, request)

    def discard(self, request: TextsRequest) -> None:
        """Remove a request; no effect if it is not there."""
        if request.is_queued:
            request.is_queued = False
            self._queue.discard(request.client, request)

    def next_batch(self) -> list[BatchPart]:
        """Remove texts for the next batch; empty if none wait."""
        batch: list[BatchPart] = []
        passed_over: list[TextsRequest] = []
        unfinished: list[TextsRequest] = []
        num_texts = num_rows = 0
        while num_texts < self._limits.most_texts and (request := self._queue.next()) is not None:
            request.is_queued = False
            if batch and request.num_failures:
                passed_over.append(request)
                continue
            indices = self._taken(request, num_texts, num_rows)
            if indices:
                batch.append(BatchPart(request, indices))
                num_texts += len(indices)
                num_rows += sum(len(request.texts[index]) for index in indices)
            if request.waiting:
                (unfinished if indices else passed_over).append(request)
                break
            if request.num_failures:
                break
        # Who got nothing is served before who got something.
        for request in (*passed_over, *unfinished):
            self.add(request)
        return batch

    def put_back(self, batch: Collection[BatchPart]) -> None:
        """Let the texts of a batch that failed wait again, before others of their requests."""
        for part in batch:
            part.request.num_failures += 1
            part.request.waiting.extendleft(reversed(part.indices))
            self.add(part.request)

    def _taken(self, request: TextsRequest, num_texts: int, num_rows: int) -> tuple[int, ...]:
        """Take texts of a request, in order, as long as they fit."""
        taken: list[int] = []
        while request.waiting and num_texts + len(taken) < self._limits.most_texts:
            length = len(request.texts[request.waiting[0]])
            if num_rows and num_rows + length > self._limits.shared_rows:
                break
            num_rows += length
            taken.append(request.waiting.popleft())
        return tuple(taken)


def texts_of(batch: Collection[BatchPart]) -> list[tuple[int, ...]]:
    """Texts of a batch, in order."""
    return [part.request.texts[index] for part in batch for index in part.indices]
