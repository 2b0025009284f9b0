"""Measurements for the acceptance table of `mesh bench stress`."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import structlog

from mesh.bench.datasets import made_up_prompts
from mesh.bench.paired_systems import OWN, PEERS, Kernels
from mesh.bench.report_tools import Line
from mesh.bench.stress.compute_limit import compute_limit
from mesh.bench.stress.harness import open_sessions
from mesh.bench.stress.memory import ALLOWED_OVERHEAD_BYTES
from mesh.bench.stress.scripts import Script, Turn
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mesh.bench.request_record import Record
    from mesh.bench.stress.answers import Outcome
    from mesh.bench.stress.checks import Step
    from mesh.bench.stress.harness import LoadTestBed
    from mesh.bench.stress.memory import Footprint

log = structlog.get_logger()

CONCURRENCY_RATIO: Final[dict[Kernels, float]] = {OWN: 2.75, PEERS: 1.9}
LIMIT_SHARE: Final = 0.65
LARGE_LIMIT_SHARE: Final = 0.8
SLOWEST_SHARE: Final = 0.7
PREFILL_RATIO: Final[dict[Kernels, float]] = {OWN: 1.5, PEERS: 1.8}
SECOND_TURN_SHARE: Final = 0.25
ITL_RATIO: Final = 3.0
SHORT_ANSWER_TOKENS: Final = 128

_SHORT_PROMPT_TOKENS: Final = 24
_LONG_PROMPT_TOKENS: Final = 2000
_LONGER_PROMPT_TOKENS: Final = 4000
_DECODING_TOKENS: Final = 192
# The decoding session is well under way when the prefill begins.
_PREFILL_AT_S: Final = 1.0
_MB: Final = 10**6
# What a row costs around llama.cpp is a smaller share of a large model: 1.1 billion parameters in 4 bits,
# say.
_LARGE_BYTES: Final = 400 * _MB
_MEMORY_TITLE: Final = "memory of a stage host beyond weights + KV, MB"


def concurrency_against_peer(
    bed: LoadTestBed, num_at_once: int, *, kernels: Kernels, rounds: int, seed: int
) -> Line:
    """Total tokens per second of requests that all begin at once, against the peer's."""
    pairs = []
    for number in range(rounds):
        scripts = short_prompts(num_at_once, seed + number)
        ours = bed.ask_mesh(scripts, num_at_once=num_at_once)
        require_all(ours)
        theirs = bed.ask_peer(scripts, num_at_once=num_at_once)
        pairs.append((ours.tokens_per_s, theirs.tokens_per_s))
        log.info(
            "crowd",
            kernels=kernels,
            at_once=num_at_once,
            mesh=round(pairs[-1][0], 1),
            peer=round(pairs[-1][1], 1),
        )
    return Line(
        f"total tokens/s at {num_at_once} concurrent, mesh {kernels} over llama.cpp RPC with as many slots",
        median(ours / theirs for ours, theirs in pairs),
        CONCURRENCY_RATIO[kernels],
        note="; ".join(f"{ours:.1f} against {theirs:.1f}" for ours, theirs in pairs),
    )


def concurrency_against_limit(
    bed: LoadTestBed,
    model: Path,
    edges: Sequence[int],
    num_at_once: int,
    *,
    exact: bool,
    rounds: int,
    seed: int,
) -> list[Line]:
    """Load of many requests that all begin at once, and what the cores can compute: see `compute_limit`.

    Returns:
        Total tokens per second as a share of the limit; the slowest request's rate, as a share of the mean;
        rows of a batch; processor time of all processes outside llama.cpp, per token.
    """
    shares, slowest, rows, around_ms, notes = [], [], [], [], []
    for number in range(rounds):
        before = _totals(bed)
        ours = bed.ask_mesh(short_prompts(num_at_once, seed + number), num_at_once=num_at_once)
        spent = _totals(bed) - before
        require_all(ours)
        prompts = [one.record.num_input_tokens or 0 for one in ours.answers]
        bed.mesh.pause()  # an idle mesh takes processor time, too
        try:
            limits = compute_limit(
                model,
                edges,
                num_sessions=num_at_once,
                prompt_tokens=round(median(prompts)),
                answer_tokens=SHORT_ANSWER_TOKENS,
                exact=exact,
            )
        finally:
            bed.mesh.resume()
        num_tokens = sum(one.record.num_output_tokens for one in ours.answers)
        rates = [_decode_rate(one.record) for one in ours.answers]
        shares.append(ours.tokens_per_s / max(limits.values()))
        slowest.append(min(rates) / mean(rates))
        rows.append(spent.num_rows / max(1, spent.num_decodes))
        around_ms.append((spent.cpu_ms - spent.decode_cpu_ms) / num_tokens)
        found = ", ".join(f"{rate:.1f} in batches of {size}" for size, rate in limits.items())
        notes.append(f"{ours.tokens_per_s:.1f} against {found}")
        log.info("limit", at_once=num_at_once, mesh=round(ours.tokens_per_s, 1), limits=found)
    is_large = model.stat().st_size > _LARGE_BYTES
    when = f"at {num_at_once} concurrent"
    return [
        Line(
            f"total tokens/s {when}, of the compute limit",
            median(shares),
            LARGE_LIMIT_SHARE if is_large else LIMIT_SHARE,
            note="; ".join(notes),
        ),
        Line(
            f"rate of the slowest request {when}, of the mean rate",
            median(slowest),
            SLOWEST_SHARE,
            note=_figures(slowest),
        ),
        Line(f"rows a batch {when}, prompts included", median(rows), None, note=_figures(rows)),
        Line(
            f"processor time a token {when} outside llama_decode, all processes of the mesh, ms",
            median(around_ms),
            None,
            note=_figures(around_ms),
        ),
    ]


def more_at_once(bed: LoadTestBed, fewer: int, more: int, *, rounds: int, seed: int) -> Line:
    """Total tokens per second with more requests at once, over those with fewer."""
    pairs = []
    for number in range(rounds):
        scripts = short_prompts(more, seed + number)
        few, many = (bed.ask_mesh(scripts, num_at_once=at_once) for at_once in (fewer, more))
        require_all(few)
        require_all(many)
        pairs.append((many.tokens_per_s, few.tokens_per_s))
        log.info("wider", more=round(pairs[-1][0], 1), fewer=round(pairs[-1][1], 1))
    return Line(
        f"total tokens/s at {more} concurrent, over {fewer}",
        median(many / few for many, few in pairs),
        1.0,
        note="; ".join(f"{many:.1f} against {few:.1f}" for many, few in pairs),
    )


def prefill_against_peer(bed: LoadTestBed, *, kernels: Kernels, rounds: int, seed: int) -> Line:
    """Prompt tokens per second until the first token, against the peer's."""
    pairs = []
    for number in range(rounds):
        script = Script("prefill", (Turn(_text(_LONG_PROMPT_TOKENS, seed + number), 1, is_cold=True),))
        ours = bed.ask_mesh([script])
        require_all(ours)
        theirs = bed.ask_peer([script])
        pairs.append((_prefill_rate(ours.answers[0].record), _prefill_rate(theirs.answers[0].record)))
        log.info("prefill", kernels=kernels, mesh=round(pairs[-1][0]), peer=round(pairs[-1][1]))
    return Line(
        f"prefill tokens/s, {_LONG_PROMPT_TOKENS}-word prompt, mesh {kernels} over llama.cpp RPC",
        median(ours / theirs for ours, theirs in pairs),
        PREFILL_RATIO[kernels],
        note="; ".join(f"{ours:.0f} against {theirs:.0f}" for ours, theirs in pairs),
    )


def second_turn(bed: LoadTestBed, *, rounds: int, seed: int) -> Line:
    """Time to first token of a chat's second turn, as a share of the first turn's."""
    shares, notes = [], []
    for number in range(rounds):
        said = _text(_LONG_PROMPT_TOKENS, seed + number)
        script = Script("chat", (Turn(said, 32, is_cold=True), Turn("And what follows from that?", 8)))
        first = bed.ask_mesh([script])
        require_all(first)
        body = script.body(1, [first.answers[0].text], bed.fields).decode()
        second = bed.ask_mesh([script], bodies=((body,),))
        require_all(second)
        one, two = first.answers[0].record, second.answers[0].record
        shares.append(two.ttft_ms / one.ttft_ms)
        cached = f"{two.num_cached_tokens or 0} of {two.num_input_tokens} tokens cached"
        notes.append(f"{two.ttft_ms:.0f} of {one.ttft_ms:.0f} ms, {cached}")
        log.info("second_turn", first_ms=round(one.ttft_ms), second_ms=round(two.ttft_ms), cached=cached)
    return Line(
        f"second turn of a {_LONG_PROMPT_TOKENS}-word chat, time to first token, of the first turn's",
        median(shares),
        SECOND_TURN_SHARE,
        is_ceiling=True,
        note="; ".join(notes),
    )


def decode_beside_prefill(bed: LoadTestBed, *, rounds: int, seed: int) -> Line:
    """ITL p99 of a decoding session while a long prompt is computed, over its ITL p99 alone."""
    alone_ms: list[float] = []
    beside_ms: list[float] = []
    for number in range(rounds):
        decoding = Script("decoding", (Turn(_text(24, seed + number), _DECODING_TOKENS, is_cold=True),))
        prompt = _text(_LONGER_PROMPT_TOKENS, seed + 1000 + number)
        prefill = Script("prefill", (Turn(prompt, 1, is_cold=True),))
        alone = bed.ask_mesh([decoding], arrivals_s=(0.0,))
        both = bed.ask_mesh([decoding, prefill], arrivals_s=(0.0, _PREFILL_AT_S))
        require_all(alone)
        require_all(both)
        alone_ms += alone.answers[0].record.itls_ms
        beside_ms += itls_during(both.answers[0].record, both.answers[1].record)
    if not beside_ms:
        return Line("ITL p99 beside a prefill, over alone", None, ITL_RATIO, is_ceiling=True)
    p99_alone, p99_beside = (float(np.percentile(gaps, 99)) for gaps in (alone_ms, beside_ms))
    log.info("itl", alone_ms=round(p99_alone, 1), beside_ms=round(p99_beside, 1))
    return Line(
        f"ITL p99 of a decoding session while a {_LONGER_PROMPT_TOKENS}-word prefill runs, over alone",
        p99_beside / p99_alone,
        ITL_RATIO,
        is_ceiling=True,
        note=f"{p99_beside:.1f} ms ({len(beside_ms)} gaps, median {median(beside_ms):.1f}) against "
        f"{p99_alone:.1f} ms ({len(alone_ms)} gaps, median {median(alone_ms):.1f})",
    )


def memory_line(footprints: Sequence[Footprint], num_requests: int) -> Line:
    """Memory of the largest stage host besides weights and KV cache, in MB."""
    most = max(footprints, key=lambda each: each.host_overhead_bytes, default=None)
    if most is None:
        return Line(_MEMORY_TITLE, None, ALLOWED_OVERHEAD_BYTES / _MB, is_ceiling=True)
    return Line(
        _MEMORY_TITLE,
        most.host_overhead_bytes / _MB,
        ALLOWED_OVERHEAD_BYTES / _MB,
        is_ceiling=True,
        note=f"stage {most.index} after {num_requests} requests of mixed length; its own process "
        f"{most.overhead_bytes / _MB:.0f}, the rest is Ray and `mesh join`",
    )


def soak_line(step: Step, status: dict[str, Any]) -> Line:
    """Failed, faulty or left-over requests, of which a long load must have none."""
    minutes = step.figures.duration_s / 60
    kinds = ", ".join(f"{count} {kind}" for kind, count in step.answer_check.by_kind.items())
    num_left = open_sessions(status)
    return Line(
        f"errors and sessions left after {minutes:.1f} minutes of mixed load, {step.concurrency} at once",
        len(step.answer_check.problems) + num_left,
        0.0,
        is_ceiling=True,
        note=f"{step.answer_check.num_answers} answers, {kinds or 'no error'}, {num_left} sessions left",
    )


def itls_during(decoding: Record, prefill: Record) -> list[float]:
    """Inter-token latencies, ms, that fall at least in part between a prefill's sending and its end."""
    if not prefill.parts_s:
        return []
    start_s, stop_s = prefill.sent_s, prefill.parts_s[0]
    gaps = zip(decoding.parts_s, decoding.parts_s[1:], strict=False)
    return [(later - earlier) * 1e3 for earlier, later in gaps if later > start_s and earlier < stop_s]


def short_prompts(count: int, seed: int, answer_tokens: int = SHORT_ANSWER_TOKENS) -> list[Script]:
    """Short prompts, no two the same, with answers of one length."""
    prompts = made_up_prompts(count, _SHORT_PROMPT_TOKENS, seed)
    return [
        Script(f"crowd {index}", (Turn(prompt.text, answer_tokens, is_cold=True),))
        for index, prompt in enumerate(prompts)
    ]


def require_all(outcome: Outcome) -> None:
    """Check that every request was answered: no figure is to come from half of an answer.

    Raises:
        MeshError: If one was not.
    """
    for one in outcome.answers:
        if one.record.failure is not None:
            raise MeshError(f"the mesh: {one.record.failure.kind}: {one.record.failure.message}")


@dataclass(frozen=True)
class _Totals:
    """Counts of a mesh since its start, or between two readings."""

    num_rows: int
    num_decodes: int
    cpu_ms: float
    decode_cpu_ms: float

    def __sub__(self, other: _Totals) -> _Totals:
        return _Totals(
            self.num_rows - other.num_rows,
            self.num_decodes - other.num_decodes,
            self.cpu_ms - other.cpu_ms,
            self.decode_cpu_ms - other.decode_cpu_ms,
        )


def _totals(bed: LoadTestBed) -> _Totals:
    stages = bed.status()["stages"]
    return _Totals(
        num_rows=sum(stage["rows"] for stage in stages),
        num_decodes=sum(stage["decodes"] for stage in stages),
        cpu_ms=1000 * bed.mesh.cpu_s(),
        decode_cpu_ms=sum(stage["decode_cpu_ms"] for stage in stages),
    )


def _decode_rate(record: Record) -> float:
    """Tokens per second behind the first."""
    return (record.num_output_tokens - 1) / (record.parts_s[-1] - record.parts_s[0])


def _figures(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _prefill_rate(record: Record) -> float:
    return (record.num_input_tokens or 0) / (record.ttft_ms / 1e3)


def _text(num_tokens: int, seed: int) -> str:
    (prompt,) = made_up_prompts(1, num_tokens, seed)
    return prompt.text
