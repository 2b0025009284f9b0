"""What an answer cost: OpenAI's `usage`, and `timings` as llama-server has them."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, Any

from speculative.lookup_proposers import PredictionProposer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.api.answer import AnswerPart
    from mesh.api.job import Job


def usage(jobs: Sequence[Job], last_parts: Sequence[AnswerPart]) -> dict[str, Any]:
    """Token counts, summed over the answers of one request. A prompt with several answers counts once.

    Tokens of a prediction are those of the request's `prediction`, as OpenAI means them; `timings` counts
    what all proposers said.
    """
    first = [not job.is_further for job in jobs]
    prompt_tokens = sum(len(job.request.prompt) for job in compress(jobs, first))
    completion_tokens = sum(part.num_tokens for part in last_parts)
    predictions = [_prediction_tokens(job, part) for job, part in zip(jobs, last_parts, strict=True)]
    cached = sum(part.stats.num_cached for part in compress(last_parts, first))
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": sum(part.num_reasoning for part in last_parts),
            "accepted_prediction_tokens": sum(accepted for accepted, _ in predictions),
            "rejected_prediction_tokens": sum(rejected for _, rejected in predictions),
        },
    }


def timings(job: Job, last: AnswerPart) -> dict[str, Any]:
    """Times of one answer. The first token belongs to the prompt's time, so rates leave it out."""
    stats = last.stats
    num_prompt, num_decoded = len(job.request.prompt) - stats.num_cached, max(last.num_tokens - 1, 0)
    times: dict[str, Any] = {
        "cache_n": stats.num_cached,
        "prompt_n": num_prompt,
        "prompt_ms": round(stats.prefill_ms, 3),
        "prompt_per_token_ms": _ratio(stats.prefill_ms, num_prompt),
        "prompt_per_second": _ratio(num_prompt * 1000, stats.prefill_ms),
        "predicted_n": last.num_tokens,
        "predicted_ms": round(stats.decode_ms, 3),
        "predicted_per_token_ms": _ratio(stats.decode_ms, num_decoded),
        "predicted_per_second": _ratio(num_decoded * 1000, stats.decode_ms),
        "draft_n": stats.num_proposed,
        "draft_n_accepted": stats.num_accepted,
    }
    if stats.ring is not None:
        times |= stats.ring().as_dict()
    return times if stats.report is None else times | {"speculation": stats.report().as_dict()}


def _prediction_tokens(job: Job, last: AnswerPart) -> tuple[int, int]:
    """How many tokens of the request's own prediction were accepted and rejected."""
    if not job.request.prediction or last.stats.report is None:
        return 0, 0
    counts = last.stats.report().by_proposer.get(PredictionProposer.name)
    return (0, 0) if counts is None else (counts.num_accepted, counts.num_proposed - counts.num_accepted)


def _ratio(amount: float, per: float) -> float:
    return round(amount / per, 3) if per > 0 else 0.0
