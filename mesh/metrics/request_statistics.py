"""Counts and times of requests, kept as they run; whoever publishes them reads them. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Final, Literal

from mesh.metrics.histogram import Histogram

FinishReason = Literal["stop", "length", "abort", "error"]
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


class RequestStatistics:
    """Since the server started.

    Attributes:
        time_to_first_token_s: From asking the engine to the first token: waiting for a slot included.
        inter_token_s: From one token to the next; those that come together share the time since those before.
        whole_s: From asking to the last token.
        queue_s: Waiting for a slot, or for a ring that is being repaired.
        prefill_s: From the first window sent to the first token.
        decode_s: From the first token to the last.
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
