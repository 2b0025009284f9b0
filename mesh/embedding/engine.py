"""Embedding engine: requests in fair turns, batches under way, and both when a host is lost."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NoReturn

import numpy as np
import structlog

from mesh.coordinator.heartbeat import longest_batch_s
from mesh.coordinator.request_queue import HoldTimes
from mesh.metrics.request_metrics import EmbeddingStatistics
from mesh.util.fair_queue import FairQueue
from spanmesh_proto.errors import ClusterError, HostUnreachable, MeshError, Overloaded, StageFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray

    from mesh.embedding.link import BatchLink, ComputedBatch
    from mesh.metrics.request_metrics import EmbeddingOutcome
    from stages.embedding.model_file import BatchLimits

# Batches under way: one is computed, the next one is on its way.
_NUM_UNDER_WAY: Final = 2
# A request whose batches failed this often is answered with the error.
_MOST_FAILURES: Final = 2
# Requests wait this long for a lost model to be loaded elsewhere; later ones are refused meanwhile.
_PATIENCE_S: Final = 20.0
_RETRY_AFTER_S: Final = 5
_LOADING_RETRY_S: Final = 2
# While this process stands still, no more than so much passes for a batch: its answer may be there unread.
_LOOK_S: Final = 1.0
log = structlog.get_logger()


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


@dataclass(frozen=True, eq=False)
class _Job:
    """A request and its answer."""

    rows: NDArray[np.float32]
    """float32 (texts, width), filled batch by batch."""
    is_done: asyncio.Future[None]
    """Resolved once all rows are there; fails with the error if they will not be."""


@dataclass(frozen=True, eq=False)
class _Batch:
    """A batch under way."""

    parts: Sequence[BatchPart]
    """Its texts."""
    num_tokens: int
    """Tokens of all of them."""
    call: asyncio.Future[ComputedBatch]
    """Its computation on the host."""


class EmbeddingEngine:
    """Answers requests for vectors with the model's host, while there is one.

    Args:
        limits: Limits of a batch.
        width: Numbers of a vector.
        max_waiting: Requests that may wait.
        clock_s: Monotonic clock, seconds.
        patience_s: Longest wait of requests while there is no host, in seconds.
        most_batch_s: Longest time of a batch, as `longest_batch_s` has it.

    Attributes:
        statistics: Counts since the model was loaded.
        refusal: Error for all requests, while it is known that they cannot be answered.
    """

    def __init__(
        self,
        limits: BatchLimits,
        width: int,
        *,
        max_waiting: int,
        clock_s: Callable[[], float],
        patience_s: float = _PATIENCE_S,
        most_batch_s: Callable[[int, int, float], float] = longest_batch_s,
    ) -> None:
        self.statistics = EmbeddingStatistics()
        self.refusal: MeshError | None = None
        self._width = width
        self._clock_s = clock_s
        self._patience_s = patience_s
        self._most_batch_s = most_batch_s
        self._queue = TextQueue(limits, max_waiting)
        self._hold_times = HoldTimes(1)
        self._jobs: dict[TextsRequest, _Job] = {}
        self._batches: set[_Batch] = set()
        self._link: BatchLink | None = None
        self._has_served = False
        self._patience: asyncio.TimerHandle | None = None
        # Set where a worker may have something to do.
        self._changed = asyncio.Event()
        self._broken = asyncio.Event()
        self._failure: MeshError | None = None

    @property
    def is_serving(self) -> bool:
        """Whether the model was loaded; stays true while it is loaded on another host."""
        return self._has_served

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered at once."""
        return self._link is not None

    @property
    def num_requests(self) -> int:
        """Requests that are not answered yet."""
        return len(self._jobs)

    @property
    def num_waiting(self) -> int:
        """Requests with texts that are in no batch yet."""
        return len(self._queue)

    async def embed(self, texts: Sequence[tuple[int, ...]], client: str | None = None) -> NDArray[np.float32]:
        """Vectors of some texts. Being cancelled removes the texts that are not computed.

        Args:
            texts: Token ids of each: at least one text, none longer than the longest.
            client: Client of the request, for fair turns; None where the API is open.

        Returns:
            float32 (texts, width), each row of Euclidean length 1.

        Raises:
            Overloaded: If too many requests wait.
            ClusterError: If there is no host for the model.
        """
        self._refuse(client)
        request = TextsRequest(texts, client)
        job = _Job(
            np.empty((len(texts), self._width), np.float32), asyncio.get_running_loop().create_future()
        )
        self._jobs[request] = job
        self._queue.add(request)
        self._changed.set()
        started_s = self._clock_s()
        outcome: EmbeddingOutcome = "abort"
        try:
            await job.is_done
            outcome = "stop"
        except MeshError:
            outcome = "error"
            raise
        finally:
            took_s = self._clock_s() - started_s
            self._forget(request, outcome, took_s)
        self._hold_times.add(took_s, request.num_tokens)
        return job.rows

    def resume(self, link: BatchLink) -> None:
        """Answer with this host from now on; batches under way on another one go on there."""
        self._stop_waiting()
        self._link, self._has_served, self.refusal = link, True, None
        self._failure = None
        self._broken.clear()
        self._changed.set()

    def suspend(self) -> None:
        """Let requests wait for another host, for a while."""
        self._link = None
        self._stop_waiting()
        self._patience = asyncio.get_running_loop().call_later(self._patience_s, self._lose_patience)

    def give_up(self, error: MeshError) -> None:
        """Fail all requests, and refuse others until `resume`."""
        self._stop_waiting()
        self._link, self.refusal = None, error
        for request, job in tuple(self._jobs.items()):
            self._fail(request, job, error)

    async def broken(self) -> MeshError:
        """Return the reason when the host is of no use: `HostUnreachable` if there is no connection to it.

        With any other the process stands still, and another connection does not help.
        """
        await self._broken.wait()
        return self._failure or StageFailed("the embedding model does not answer")

    async def run(self) -> NoReturn:
        """Compute batches until cancelled."""
        workers = [asyncio.create_task(self._work()) for _ in range(_NUM_UNDER_WAY)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            self._stop_waiting()
        raise StageFailed("the embedding engine ended unexpectedly")

    def _refuse(self, client: str | None) -> None:
        if self.refusal is not None:
            raise self.refusal
        if not self._has_served:
            raise ClusterError(
                "the model is still loading: try again in a moment", retry_after_s=_LOADING_RETRY_S
            )
        if not self._queue.has_room(client):
            seconds = self._hold_times.retry_after_s(
                [request.num_tokens for request in self._queue.waiting] or [1]
            )
            raise Overloaded(
                f"{len(self._queue)} requests for vectors wait, which is as many as may: try again in "
                f"{seconds} s, or load the model with a larger --max-waiting",
                retry_after_s=seconds,
            )

    async def _work(self) -> NoReturn:
        while True:
            while (link := self._link) is None or not len(self._queue):
                self._changed.clear()
                await self._changed.wait()
            await self._compute(link, self._queue.next_batch())

    async def _compute(self, link: BatchLink, parts: Sequence[BatchPart]) -> None:
        texts = texts_of(parts)
        batch = _Batch(parts, sum(map(len, texts)), asyncio.ensure_future(link.embed(texts)))
        self._batches.add(batch)
        is_answered = False
        try:
            is_answered = await self._is_answered(batch)
        finally:
            self._batches.discard(batch)
            if not batch.call.done():
                batch.call.cancel()
                await asyncio.gather(batch.call, return_exceptions=True)
        if not is_answered:
            still = StageFailed("the embedding model does not end a batch")
            self._on_failure(link, parts, still, is_still=True)
            return
        if batch.call.cancelled():
            # By its clients, or with the channel of a host that was given up.
            self._on_failure(link, parts, HostUnreachable("the connection to the embedding model was closed"))
            return
        error = batch.call.exception()
        if error is None:
            self._deliver(parts, batch.call.result(), batch.num_tokens)
        elif isinstance(error, MeshError):
            self._on_failure(link, parts, error)
        else:
            log.error("batch_failed_unexpectedly", error=repr(error))
            self._on_failure(link, parts, StageFailed(f"a batch of texts failed: {type(error).__name__}"))

    async def _is_answered(self, batch: _Batch) -> bool:
        """Wait for a batch; returns whether it ended before the host must stand still.

        The host computes the batches under way one after the other, so that time counts from the latest
        that it computed, and for all of them.
        """
        num_computed, waited_s = self.statistics.num_batches, 0.0
        while not batch.call.done():
            told = self.statistics
            if told.num_batches > num_computed:
                num_computed, waited_s = told.num_batches, 0.0
            num_tokens = sum(each.num_tokens for each in self._batches)
            left_s = self._most_batch_s(num_tokens, told.num_tokens, told.compute_s) - waited_s
            if left_s <= 0:
                return False
            step_s = min(_LOOK_S, left_s)
            await asyncio.wait([batch.call], timeout=step_s)
            waited_s += step_s
        return True

    def _deliver(self, parts: Sequence[BatchPart], computed: ComputedBatch, num_tokens: int) -> None:
        self.statistics.computed(len(computed.rows), num_tokens, computed.compute_s)
        start = 0
        for part in parts:
            stop = start + len(part.indices)
            job = self._jobs.get(part.request)
            if job is not None:
                job.rows[list(part.indices)] = computed.rows[start:stop]
                part.request.num_left -= len(part.indices)
                if not part.request.num_left and not job.is_done.done():
                    job.is_done.set_result(None)
            start = stop

    def _on_failure(
        self, link: BatchLink, parts: Sequence[BatchPart], error: MeshError, *, is_still: bool = False
    ) -> None:
        """Let the texts wait again, and report the host if it does not answer or stands still."""
        wanted = [part for part in parts if part.request in self._jobs]
        if not wanted:
            return
        log.warning("batch_failed", reason=error.message, texts=len(texts_of(wanted)))
        self._queue.put_back(wanted)
        for part in wanted:
            if part.request.num_failures >= _MOST_FAILURES:
                failed = StageFailed(
                    f"the embedding model failed on these texts: {error.message}",
                    retry_after_s=_RETRY_AFTER_S,
                )
                self._fail(part.request, self._jobs[part.request], failed)
        self._changed.set()
        if (is_still or isinstance(error, HostUnreachable)) and link is self._link:
            self._link, self._failure = None, error
            self._broken.set()

    def _fail(self, request: TextsRequest, job: _Job, error: MeshError) -> None:
        self._queue.discard(request)
        if not job.is_done.done():
            job.is_done.set_exception(error)

    def _forget(self, request: TextsRequest, outcome: EmbeddingOutcome, took_s: float) -> None:
        """Remove a request that is over, and batches without a waiting request."""
        self.statistics.ended(outcome, took_s)
        self._queue.discard(request)
        del self._jobs[request]
        for batch in self._batches:
            if not any(part.request in self._jobs for part in batch.parts):
                batch.call.cancel()

    def _lose_patience(self) -> None:
        self._patience = None
        if self._link is None:
            self.give_up(
                ClusterError(
                    "the embedding model is being loaded on another host: try again in a moment",
                    retry_after_s=_RETRY_AFTER_S,
                )
            )

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


def texts_of(batch: Collection[BatchPart]) -> list[tuple[int, ...]]:
    """Texts of a batch, in order."""
    return [part.request.texts[index] for part in batch for index in part.indices]
