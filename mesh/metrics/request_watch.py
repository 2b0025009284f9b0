"""One request's steps, entered into the statistics as they come. Pure but for the span that it writes to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh.engine import Committed, GenerationRequest
    from mesh.metrics.request_statistics import FinishReason, RequestStatistics
    from mesh.tracing.request_span import RequestSpan


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
