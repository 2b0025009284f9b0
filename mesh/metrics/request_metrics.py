"""Request metrics of chats and embeddings: counts, histograms and the engine that feeds them."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from contextlib import aclosing
from typing import TYPE_CHECKING, Final, Literal

from mesh.metrics.tracing import CURRENT_SPAN
from mesh.status import EmbeddingCounts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

    from mesh.engine import Committed, Engine, GenerationRequest
    from mesh.metrics.tracing import RequestSpan

FINISH_REASONS: Final[tuple[FinishReason, ...]] = ("stop", "length", "abort", "error")
_FIRST_TOKEN_S: Final = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_BETWEEN_TOKENS_S: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10),
)
_WHOLE_REQUEST_S: Final = (
    *(0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50),
    *(60, 120, 240, 480, 960, 1920),
)
FinishReason = Literal["stop", "length", "abort", "error"]
EMBEDDING_OUTCOMES: Final[tuple[EmbeddingOutcome, ...]] = ("stop", "abort", "error")
_REQUEST_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
EmbeddingOutcome = Literal["stop", "abort", "error"]


class Histogram:
    """Counts between fixed bounds.

    Args:
        bounds: Upper bounds, each included, ascending; whatever is larger is counted beyond the last.

    Attributes:
        total: Of all values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add a value that many times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.total += value * count

    @property
    def count(self) -> int:
        """Values so far."""
        return sum(self._counts)

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Each bound, infinity last, and how many values do not exceed it."""
        num_below = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            num_below += count
            yield bound, num_below


class RequestStatistics:
    """Since the server started.

    Attributes:
        time_to_first_token_s: From asking the engine to the first token: waiting for a slot included.
        inter_token_s: From one token to the next; those that come together share the time since those before.
        whole_s: Time from the request to the last token.
        queue_s: Waiting for a slot, or for a ring that is being repaired.
        prefill_s: From the first window sent to the first token.
        decode_s: Time from the first token to the last.
        num_prompt_tokens: Of requests that had a first token.
        num_generated_tokens: End tokens included.
        num_cache_queries: Tokens of prompts that might have been in the stages' caches.
        num_cache_hits: Those that were.
        num_replays: Sessions that began again because a stage was lost or moved.
        finished: Requests by how they ended.
    """

    def __init__(self) -> None:
        self.time_to_first_token_s = Histogram(_FIRST_TOKEN_S)
        self.inter_token_s = Histogram(_BETWEEN_TOKENS_S)
        self.whole_s = Histogram(_WHOLE_REQUEST_S)
        self.queue_s = Histogram(_WHOLE_REQUEST_S)
        self.prefill_s = Histogram(_WHOLE_REQUEST_S)
        self.decode_s = Histogram(_WHOLE_REQUEST_S)
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_cache_queries = 0
        self.num_cache_hits = 0
        self.num_replays = 0
        self.finished: Counter[FinishReason] = Counter()


class RequestWatch:
    """From its beginning to its end.

    Args:
        statistics: Of all requests.
        span: Its own, if it is traced.
        request: What was asked for.
        now_s: When, by a monotonic clock in seconds.
    """

    def __init__(
        self,
        statistics: RequestStatistics,
        span: RequestSpan | None,
        request: GenerationRequest,
        now_s: float,
    ) -> None:
        self._statistics = statistics
        self._span = span
        self._request = request
        self._started_s = now_s
        self._first_s: float | None = None
        self._latest_s = now_s
        self._num_tokens = 0
        self._num_replays = 0
        self._finish: FinishReason | None = None

    def step(self, step: Committed, now_s: float) -> None:
        """Tokens came."""
        statistics, num_tokens = self._statistics, len(step.tokens)
        if self._first_s is None:
            self._begin(step, now_s)
        else:
            statistics.inter_token_s.observe((now_s - self._latest_s) / num_tokens, num_tokens)
        self._latest_s = now_s
        self._num_tokens += num_tokens
        statistics.num_generated_tokens += num_tokens
        if step.stats.num_replays != self._num_replays:
            statistics.num_replays += step.stats.num_replays - self._num_replays
            self._num_replays = step.stats.num_replays
            if self._span is not None:
                self._span.event("repair", num_replays=self._num_replays)
        self._finish = step.finish

    def end(self, reason: FinishReason | None, now_s: float) -> None:
        """It is over; the first call counts.

        Args:
            reason: Why, or None if its last step said so.
            now_s: When.
        """
        # Closed behind its last step: that one knows better.
        known: FinishReason = self._finish or reason or "error"
        statistics = self._statistics
        statistics.finished[known] += 1
        if self._first_s is not None and known not in {"abort", "error"}:
            statistics.whole_s.observe(now_s - self._started_s)
            statistics.decode_s.observe(self._latest_s - self._first_s)
        if self._span is not None:
            self._span.finished(
                known, num_prompt_tokens=len(self._request.prompt), num_answer_tokens=self._num_tokens
            )

    def _begin(self, step: Committed, now_s: float) -> None:
        statistics, request, stats = self._statistics, self._request, step.stats
        self._first_s = now_s
        elapsed_s, prefill_s = now_s - self._started_s, stats.prefill_ms / 1000
        statistics.time_to_first_token_s.observe(elapsed_s)
        statistics.prefill_s.observe(prefill_s)
        # What of it was not computing the prompt.
        statistics.queue_s.observe(max(0.0, elapsed_s - prefill_s))
        statistics.num_prompt_tokens += len(request.prompt)
        if request.uses_cache:
            statistics.num_cache_queries += len(request.prompt)
            statistics.num_cache_hits += stats.num_cached
        if self._span is not None:
            self._span.event("first_token", num_cached_tokens=stats.num_cached)


class ObservedEngine:
    """Passes everything on. Costs a few microseconds a step, after the next window has left.

    Args:
        engine: Makes the tokens.
        statistics: Where they are counted.
        clock_s: Monotonic, seconds.
    """

    def __init__(self, engine: Engine, statistics: RequestStatistics, clock_s: Callable[[], float]) -> None:
        self._engine = engine
        self._statistics = statistics
        self._clock_s = clock_s

    @property
    def context_length(self) -> int:
        """The engine's."""
        return self._engine.context_length

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Committed, None]:
        """As the engine does."""
        clock_s = self._clock_s
        watch = RequestWatch(self._statistics, CURRENT_SPAN.get(), request, clock_s())
        try:
            async with aclosing(self._engine.generate(request)) as steps:
                async for step in steps:
                    watch.step(step, clock_s())
                    yield step
        except GeneratorExit:
            # The reader has enough, as after a stop string, or its client left and it was cancelled.
            watch.end("abort" if _is_cancelled() else "stop", clock_s())
            raise
        except asyncio.CancelledError:
            watch.end("abort", clock_s())
            raise
        except Exception:
            watch.end("error", clock_s())
            raise
        else:
            watch.end(None, clock_s())


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


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
