"""Serving metrics: latencies, throughput and goodput.

Names and definitions are those of vLLM's `bench serve`, but that nothing is 0 where nothing was measured.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeGuard

import numpy as np

from meshbench.request_record import REJECTED, UNFINISHED
from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from meshbench.request_record import Record

_NAMES: Final[tuple[SloName, ...]] = ("ttft", "tpot", "e2el")

SloName = Literal["ttft", "tpot", "e2el"]


@dataclass(frozen=True)
class Slo:
    """A service level objective."""

    name: SloName
    """Which latency."""
    limit_ms: float
    """It may be that long."""


@dataclass(frozen=True)
class Spread:
    """Statistics of times in milliseconds."""

    count: int
    """How many there were; at least one."""
    mean: float
    """Their mean."""
    median: float
    """The middle one."""
    std: float
    """Standard deviation of just these."""
    highest: float
    """The longest."""
    percentiles: dict[float, float]
    """Of those asked for: the number in [0, 100], and what so many percent do not exceed, between two of them
    in a straight line."""


@dataclass(frozen=True)
class FailureCount:
    """Failures of one kind."""

    kind: str
    """See `request_record.Failure`."""
    count: int
    """How many."""
    example: str
    """Text of the first one."""


@dataclass(frozen=True)
class Figures:
    """A run, worked out."""

    duration_s: float
    """From the start to the end of the last request."""
    num_requests: int
    """That were sent."""
    completed: int
    """Answered in full."""
    failed: int
    """Not answered, or not in full; but for the next two."""
    rejected: int
    """Turned away with 429."""
    unfinished: int
    """Under way when the run was ended."""
    failures: tuple[FailureCount, ...]
    """All that are not completed, by kind, the most frequent first."""
    retry_after: dict[str, int]
    """Values of `Retry-After`, with their counts."""
    total_input_tokens: int | None
    """Of completed requests, by the server's count; None if it counts none."""
    total_cached_tokens: int | None
    """Of these, tokens that the server had computed before; None if unknown."""
    total_output_tokens: int
    """Of completed requests."""
    num_without_usage: int
    """Completed requests whose tokens the server did not count: their streamed parts are counted instead,
    which is too few where a part holds several tokens."""
    num_stopped_early: int
    """Completed requests that ended before the most tokens they might have."""
    request_throughput: float
    """Completed requests a second."""
    output_throughput: float
    """Output tokens a second."""
    total_token_throughput: float | None
    """Input and output tokens a second; None without a count of input tokens."""
    request_goodput: float | None
    """Requests a second that met all limits; None without limits."""
    good_share: float | None
    """Share of good requests among all that ended, refused and failed ones included, in [0, 1]."""
    scheduled_good_share: float | None
    """The same with TTFT and E2EL from when the request was to be sent."""
    ttft_ms: Spread | None
    """Time to first token: from sending the request to the first part of its answer."""
    tpot_ms: Spread | None
    """Time per output token without the first, (E2EL - TTFT) / (output tokens - 1), of each answer."""
    itl_ms: Spread | None
    """Inter-token latency: from each part of an answer to the next, of all answers together."""
    e2el_ms: Spread | None
    """End-to-end latency: from sending the request to the end of its answer."""
    scheduled_ttft_ms: Spread | None
    """TTFT from when the request was to be sent."""
    scheduled_e2el_ms: Spread | None
    """E2EL from when the request was to be sent."""
    queue_ms: Spread | None
    """How long requests that were due waited here for a place under the limit."""
    lag_ms: Spread | None
    """How late this client was apart from that."""
    mean_concurrency: float
    """Requests under way, mean over the run."""
    max_concurrency: int
    """Most requests under way at once."""


def parse_slo(text: str) -> Slo:
    """From `ttft:500`, in milliseconds.

    Raises:
        InvalidRequest: If it is not of that form.
    """
    name, _, limit = text.partition(":")
    if not _is_name(name):
        raise InvalidRequest(f"{name!r} is not a latency; there are {', '.join(_NAMES)}", param="--goodput")
    try:
        limit_ms = float(limit)
    except ValueError:
        limit_ms = math.nan
    if not limit_ms > 0:
        raise InvalidRequest(f"{text!r} has no limit above 0 ms; write {name}:500", param="--goodput")
    return Slo(name, limit_ms)


def is_good(record: Record, slos: tuple[Slo, ...], *, from_schedule: bool = False) -> bool:
    """Whether a request was answered in full within all limits.

    As in vLLM, an answer of one token has no time per output token that could be too long.

    Args:
        record: The request.
        slos: The limits.
        from_schedule: Whether TTFT and E2EL count from when the request was to be sent.
    """
    if record.failure is not None:
        return False
    delay_ms = record.delay_ms if from_schedule else 0.0
    measured_ms = {
        "ttft": record.ttft_ms + delay_ms,
        "tpot": record.tpot_ms or 0.0,
        "e2el": record.e2el_ms + delay_ms,
    }
    return all(measured_ms[slo.name] <= slo.limit_ms for slo in slos)


def _is_name(name: str) -> TypeGuard[SloName]:
    return name in _NAMES


def spread(values_ms: Sequence[float], percentiles: Sequence[float]) -> Spread | None:
    """Statistics of times; None without any: nothing measured is not zero."""
    if not values_ms:
        return None
    values = np.asarray(values_ms)
    return Spread(
        count=len(values),
        mean=float(values.mean()),
        median=float(np.median(values)),
        std=float(values.std()),
        highest=float(values.max()),
        percentiles={wanted: float(np.percentile(values, wanted)) for wanted in percentiles},
    )


def work_out(
    records: Sequence[Record], duration_s: float, *, percentiles: Sequence[float], slos: tuple[Slo, ...]
) -> Figures:
    """All figures of a measurement.

    Args:
        records: One for each request sent.
        duration_s: Above 0.
        percentiles: Which, in [0, 100].
        slos: Limits for goodput; may be empty.
    """
    answered = [record for record in records if record.failure is None]
    kinds = Counter(record.failure.kind for record in records if record.failure is not None)
    num_ended = len(records) - kinds[UNFINISHED]
    num_input = _total(record.num_input_tokens for record in answered)
    num_output = sum(record.num_output_tokens for record in answered)
    good, scheduled_good = (
        [record for record in answered if is_good(record, slos, from_schedule=from_schedule)]
        for from_schedule in (False, True)
    )
    has_goodput = bool(slos and num_ended)
    return Figures(
        duration_s=duration_s,
        num_requests=len(records),
        completed=len(answered),
        failed=num_ended - len(answered) - kinds[REJECTED],
        rejected=kinds[REJECTED],
        unfinished=kinds[UNFINISHED],
        failures=_failures(records),
        retry_after=dict(
            Counter(
                record.failure.retry_after
                for record in records
                if record.failure and record.failure.retry_after
            )
        ),
        total_input_tokens=num_input,
        total_cached_tokens=_total(record.num_cached_tokens for record in answered),
        total_output_tokens=num_output,
        num_without_usage=sum(not record.has_usage for record in answered),
        num_stopped_early=sum(record.finish == "stop" for record in answered),
        request_throughput=len(answered) / duration_s,
        output_throughput=num_output / duration_s,
        total_token_throughput=None if num_input is None else (num_input + num_output) / duration_s,
        request_goodput=len(good) / duration_s if has_goodput else None,
        good_share=len(good) / num_ended if has_goodput else None,
        scheduled_good_share=len(scheduled_good) / num_ended if has_goodput else None,
        ttft_ms=spread([record.ttft_ms for record in answered], percentiles),
        tpot_ms=spread([record.tpot_ms for record in answered if record.tpot_ms is not None], percentiles),
        itl_ms=spread([gap for record in answered for gap in record.itls_ms], percentiles),
        e2el_ms=spread([record.e2el_ms for record in answered], percentiles),
        scheduled_ttft_ms=spread([record.ttft_ms + record.delay_ms for record in answered], percentiles),
        scheduled_e2el_ms=spread([record.e2el_ms + record.delay_ms for record in answered], percentiles),
        queue_ms=spread([record.queue_ms for record in records], percentiles),
        lag_ms=spread([record.lag_ms for record in records], percentiles),
        mean_concurrency=sum(record.ended_s - record.sent_s for record in records) / duration_s,
        max_concurrency=max((running for _, running in running_over_time(records)), default=0),
    )


def running_over_time(records: Sequence[Record]) -> list[tuple[float, int]]:
    """Seconds from the start, ascending, and how many requests were under way from then on."""
    # One that ends just as another is sent makes room for it.
    steps = sorted([(record.sent_s, 1) for record in records] + [(record.ended_s, -1) for record in records])
    running = 0
    course = []
    for at_s, step in steps:
        running += step
        course.append((at_s, running))
    return course


def _total(counts: Iterable[int | None]) -> int | None:
    """Sum over those with the server's counts; None without any."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _failures(records: Sequence[Record]) -> tuple[FailureCount, ...]:
    examples: dict[str, str] = {}
    kinds: Counter[str] = Counter()
    for record in records:
        if record.failure is not None:
            kinds[record.failure.kind] += 1
            examples.setdefault(record.failure.kind, record.failure.message)
    return tuple(FailureCount(kind, count, examples[kind]) for kind, count in kinds.most_common())
