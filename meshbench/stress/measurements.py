"""Measurements for the acceptance table of `mesh bench stress`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import structlog

from mesh.status import as_json
from meshbench.datasets import made_up_prompts
from meshbench.paired_systems import OWN, PEERS, Kernels
from meshbench.report_tools import Line, PairedRatio
from meshbench.stress.compute_limit import compute_limit
from meshbench.stress.harness import open_sessions
from meshbench.stress.memory import ALLOWED_OVERHEAD_BYTES
from meshbench.stress.scripts import TOKENS_AROUND, WORD_TOKENS, Script, Turn, prompt_id
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from mesh.status import MeshStatus, StageStatus
    from meshbench.lab.systems import MeshSystem, RpcSystem
    from meshbench.load_client.answers import Outcome
    from meshbench.request_record import Record
    from meshbench.stress.checks import Step
    from meshbench.stress.harness import LoadTestBed
    from meshbench.stress.memory import Footprint

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
# Both answers of a chat and the second message, with room to spare.
_SECOND_TURN_TOKENS: Final = 128
_CONTEXT_ANSWER_TOKENS: Final = 48
# Both answers and the second message, with room to spare.
_CONTEXT_TOKENS: Final = 160
# Prompts of many thousand tokens, several at once.
_CONTEXT_TIMEOUT_S: Final = 1800.0
# The decoding session is well under way when the prefill begins.
_PREFILL_AT_S: Final = 1.0
# Until a mesh that repairs itself tells its counts again.
_LONGEST_SILENCE_S: Final = 60.0
_MB: Final = 10**6
# What a row costs around llama.cpp is a smaller share of a large model: 1.1 billion parameters in 4 bits,
# say.
_LARGE_BYTES: Final = 400 * _MB
_MEMORY_TITLE: Final = "memory of a stage host beyond weights + KV, MB"

log = structlog.get_logger()


@dataclass(frozen=True)
class LimitOptions:
    """What the compute limit of a mesh on this machine is measured with."""

    model: Path
    """A GGUF."""
    edges: tuple[int, ...]
    """First layers of the stages, and the number of layers."""
    exact: bool
    """Numeric mode."""

    @property
    def is_large(self) -> bool:
        """Whether a row costs little beside computing it."""
        return self.model.stat().st_size > _LARGE_BYTES


@dataclass(frozen=True)
class _Behind:
    """Chats that all begin with a long message at once: how it is read, and what tokens take behind it."""

    read_per_s: float
    """Tokens of the long messages, until the last chat's first token."""
    ttft_ms: float
    """From the second question to its first token; the longest of all chats."""
    tokens_per_s: float
    """Of all chats together, behind their first tokens."""


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


def concurrency(
    bed: LoadTestBed,
    num_at_once: int,
    *,
    kernels: Kernels,
    limit: LimitOptions | None,
    rounds: int,
    seed: int,
) -> list[Line]:
    """Load of some requests that all begin at once.

    Args:
        bed: Where.
        num_at_once: How many.
        kernels: Of the mesh.
        limit: See `many_at_once`.
        rounds: How often.
        seed: Of the prompts.

    Returns:
        Total tokens per second. If there is a peer, over its rate; and what the processors can compute, over
        its rate, too.
    """
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(rounds):
        scripts = short_prompts(num_at_once, seed + number)
        answered = bed.measure_mesh(scripts, num_at_once=num_at_once)
        ours.append(answered.tokens_per_s)
        if bed.peer is not None:
            theirs.append(bed.ask_peer(scripts, num_at_once=num_at_once).tokens_per_s)
        log.info("crowd", kernels=kernels, at_once=num_at_once, mesh=_latest(ours), peer=_latest(theirs))
    title = f"total tokens/s at {num_at_once} concurrent"
    if bed.peer is None or bed.peer.is_mesh:
        return _alone_or_paired(bed.peer, title, ours, theirs)
    lines = [
        _against_peer(
            f"{title}, mesh {kernels} over llama.cpp RPC with as many slots",
            ours,
            theirs,
            CONCURRENCY_RATIO[kernels],
            "{:.1f} against {:.1f}",
        )
    ]
    if limit is not None:
        most = max(_limits(bed, limit, answered, num_at_once, kernels=kernels).values())
        lines.append(_limit_over_peer(f"{title}, {kernels}", most, theirs))
    return lines


def many_at_once(
    bed: LoadTestBed, num_at_once: int, *, limit: LimitOptions | None, rounds: int, seed: int
) -> list[Line]:
    """Load of many requests that all begin at once, and what the cores can compute: see `compute_limit`.

    Args:
        bed: Where.
        num_at_once: How many.
        limit: Of a mesh whose processes are on this machine; None leaves out the limit and processor times.
        rounds: How often.
        seed: Of the prompts.

    Returns:
        Total tokens per second as a share of the limit, or as they are without one; the slowest request's
        rate, as a share of the mean; rows of a batch; processor time of all processes outside llama.cpp, per
        token.
    """
    totals, shares, slowest, rows, around_ms, notes = [], [], [], [], [], []
    for number in range(rounds):
        before = _totals(bed)
        ours = bed.measure_mesh(short_prompts(num_at_once, seed + number), num_at_once=num_at_once)
        spent = _totals(bed) - before
        totals.append(ours.tokens_per_s)
        rates = [_decode_rate(one.record) for one in ours.answers]
        slowest.append(min(rates) / mean(rates))
        rows.append(spent.num_rows / max(1, spent.num_decodes))
        if limit is not None:
            limits = _limits(bed, limit, ours, num_at_once)
            shares.append(ours.tokens_per_s / max(limits.values()))
            num_tokens = sum(one.record.num_output_tokens for one in ours.answers)
            around_ms.append((spent.cpu_ms - spent.decode_cpu_ms) / num_tokens)
            found = ", ".join(f"{rate:.1f} in batches of {size}" for size, rate in limits.items())
            notes.append(f"{ours.tokens_per_s:.1f} against {found}")
        log.info("limit", at_once=num_at_once, mesh=_latest(totals), limits=notes[-1] if notes else None)
    when = f"at {num_at_once} concurrent"
    lines = [
        Line(
            f"rate of the slowest request {when}, of the mean rate",
            median(slowest),
            SLOWEST_SHARE,
            note=_figures(slowest),
        ),
        Line(f"rows a batch {when}, prompts included", median(rows), None, note=_figures(rows)),
    ]
    if limit is None:
        return [Line(f"total tokens/s {when}", median(totals), None, note=_figures(totals)), *lines]
    return [
        Line(
            f"total tokens/s {when}, of the compute limit",
            median(shares),
            LARGE_LIMIT_SHARE if limit.is_large else LIMIT_SHARE,
            note="; ".join(notes),
        ),
        *lines,
        Line(
            f"processor time a token {when} outside llama_decode, all processes of the mesh, ms",
            median(around_ms),
            None,
            note=_figures(around_ms),
        ),
    ]


def _limits(
    bed: LoadTestBed,
    limit: LimitOptions,
    ours: Outcome,
    num_at_once: int,
    *,
    kernels: Kernels = OWN,
    answer_tokens: int = SHORT_ANSWER_TOKENS,
) -> dict[int, float]:
    prompts = [one.record.num_input_tokens or 0 for one in ours.answers]
    mesh = bed.processes
    assert mesh is not None  # noqa: S101 - a limit is that of processes on this machine
    mesh.pause()  # an idle mesh takes processor time, too
    try:
        return compute_limit(
            limit.model,
            limit.edges,
            num_sessions=num_at_once,
            prompt_tokens=round(median(prompts)),
            answer_tokens=answer_tokens,
            exact=limit.exact,
            repacks=kernels == OWN,
        )
    finally:
        mesh.resume()


def more_at_once(bed: LoadTestBed, fewer: int, more: int, *, rounds: int, seed: int) -> Line:
    """Total tokens per second with more requests at once, over those with fewer."""
    pairs = []
    for number in range(rounds):
        scripts = short_prompts(more, seed + number)
        few, many = (bed.measure_mesh(scripts, num_at_once=at_once) for at_once in (fewer, more))
        pairs.append((many.tokens_per_s, few.tokens_per_s))
        log.info("wider", more=round(pairs[-1][0], 1), fewer=round(pairs[-1][1], 1))
    return Line(
        f"total tokens/s at {more} concurrent, over {fewer}",
        median(many / few for many, few in pairs),
        1.0,
        note="; ".join(f"{many:.1f} against {few:.1f}" for many, few in pairs),
    )


def prefill(
    bed: LoadTestBed, *, kernels: Kernels, limit: LimitOptions | None, rounds: int, seed: int
) -> list[Line]:
    """Prompt tokens per second until the first token; see `concurrency`.

    The processors compute as many prompts at once as can be, so their limit is above that of one prompt.
    """
    num_words = _fitting_words(bed, _LONG_PROMPT_TOKENS, answer_tokens=1)
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(rounds):
        script = Script("prefill", (Turn(_text(num_words, seed + number), 1, is_cold=True),))
        answered = bed.measure_mesh([script])
        ours.append(_prefill_rate(answered.answers[0].record))
        if bed.peer is not None:
            theirs.append(_prefill_rate(bed.ask_peer([script]).answers[0].record))
        log.info("prefill", kernels=kernels, mesh=_latest(ours), peer=_latest(theirs))
    title = f"prefill tokens/s, {num_words}-word prompt"
    if bed.peer is None or bed.peer.is_mesh:
        return _alone_or_paired(bed.peer, title, ours, theirs)
    lines = [
        _against_peer(
            f"{title}, mesh {kernels} over llama.cpp RPC",
            ours,
            theirs,
            PREFILL_RATIO[kernels],
            "{:.0f} against {:.0f}",
        )
    ]
    if limit is not None:
        prompts = max(_limits(bed, limit, answered, 1, kernels=kernels, answer_tokens=1).values())
        num_tokens = answered.answers[0].record.num_input_tokens or 0
        lines.append(_limit_over_peer(f"{title}, {kernels}", prompts * num_tokens, theirs))
    return lines


def second_turn(bed: LoadTestBed, *, rounds: int, seed: int) -> Line:
    """Time to first token of a chat's second turn, as a share of the first turn's."""
    num_words = _fitting_words(bed, _LONG_PROMPT_TOKENS, answer_tokens=_SECOND_TURN_TOKENS)
    shares, notes = [], []
    for number in range(rounds):
        text = _text(num_words, seed + number)
        script = Script("chat", (Turn(text, 32, is_cold=True), Turn("And what follows from that?", 8)))
        first = bed.measure_mesh([script])
        request = script.request(1, [first.answers[0].text], bed.mesh.fields)
        second = bed.measure_mesh(chats=((request,),), num_requests=1)
        one, two = first.answers[0].record, second.answers[0].record
        shares.append(two.ttft_ms / one.ttft_ms)
        cached = f"{two.num_cached_tokens or 0} of {two.num_input_tokens} tokens cached"
        notes.append(f"{two.ttft_ms:.0f} of {one.ttft_ms:.0f} ms, {cached}")
        log.info("second_turn", first_ms=round(one.ttft_ms), second_ms=round(two.ttft_ms), cached=cached)
    return Line(
        f"second turn of a {num_words}-word chat, time to first token, of the first turn's",
        median(shares),
        SECOND_TURN_SHARE,
        is_ceiling=True,
        note="; ".join(notes),
    )


def _behind(ask: Callable[..., Outcome], scripts: Sequence[Script], fields: Mapping[str, Any]) -> _Behind:
    # Otherwise the peer keeps no prompt.
    kept = {name: value for name, value in fields.items() if name != "cache_prompt"}

    def answered(turn: int, answers: Mapping[str, str]) -> Outcome:
        chats = tuple((script.request(turn, [answers[script.id]] * turn, kept),) for script in scripts)
        count = len(scripts)
        return ask(chats=chats, num_at_once=count, num_requests=count, timeout_s=_CONTEXT_TIMEOUT_S)

    first = answered(0, {script.id: "" for script in scripts})
    num_read = sum(one.record.num_input_tokens or 0 for one in first.answers)
    read_ms = max(one.record.ttft_ms for one in first.answers)
    texts = {one.record.prompt_id: one.text for one in first.answers}
    second = answered(1, {script.id: texts[prompt_id(script.id, 0)] for script in scripts})
    records = [one.record for one in second.answers]
    begun_s, ended_s = max(one.parts_s[0] for one in records), min(one.parts_s[-1] for one in records)
    if begun_s >= ended_s:
        raise MeshError(
            f"of {len(scripts)} chats one had ended when the last one began to answer: no rate of all"
        )
    within = [sum(begun_s < part_s <= ended_s for part_s in one.parts_s) for one in records]
    return _Behind(
        1e3 * num_read / read_ms, max(one.ttft_ms for one in records), sum(within) / (ended_s - begun_s)
    )


def behind_contexts(
    bed: LoadTestBed, contexts: Sequence[int], num_at_once: int, *, kernels: Kernels, rounds: int, seed: int
) -> list[Line]:
    """Tokens behind long prompts, of one chat and of several at once.

    Each chat begins with a long message and a short answer. Measured are how fast it is read, and the second
    turn, whose prompt is held: the time to its first token, and tokens per second while all chats decode.
    Several at once are measured behind prompts of up to 4,000 words: longer ones take many minutes.

    Args:
        bed: Where.
        contexts: Words of the long messages; those that the mesh's context does not hold are left out.
        num_at_once: Chats at once, beside one.
        kernels: Of the mesh.
        rounds: How often.
        seed: Of the prompts.

    Returns:
        Rates, over the peer's if there is one.

    Raises:
        MeshError: If a request failed, or the chats did not all decode at the same time.
    """
    most = int((bed.ctx_size - _CONTEXT_TOKENS) / WORD_TOKENS)
    fitting = [words for words in contexts if words <= most]
    sizes = [(words, 1) for words in fitting]
    if num_at_once > 1:
        sizes += [(words, num_at_once) for words in fitting if words <= _LONGER_PROMPT_TOKENS]
    lines = []
    for words, count in sizes:
        ours, theirs = [], []
        for number in range(rounds):
            scripts = _long_chats(words, count, seed + 100 * number)
            ours.append(_behind(bed.measure_mesh, scripts, bed.mesh.fields))
            if bed.peer is not None:
                theirs.append(_behind(bed.ask_peer, scripts, bed.peer.fields))
            log.info("context", words=words, chats=count, mesh=ours[-1], peer=theirs[-1] if theirs else None)
        lines += _context_lines(bed.peer, f"{count} behind {words} words each, mesh {kernels}", ours, theirs)
    return lines


def _long_chats(num_words: int, count: int, seed: int) -> list[Script]:
    return [
        Script(
            f"context {number}",
            (
                Turn(_text(num_words, seed + number), 8, is_cold=True),
                Turn("And what follows from that?", _CONTEXT_ANSWER_TOKENS),
            ),
        )
        for number in range(count)
    ]


def _context_lines(
    peer: RpcSystem | MeshSystem | None, title: str, ours: Sequence[_Behind], theirs: Sequence[_Behind]
) -> list[Line]:
    kinds: tuple[tuple[str, Callable[[_Behind], float]], ...] = (
        (f"prefill tokens/s of {title}", lambda each: each.read_per_s),
        (f"tokens/s of {title}", lambda each: each.tokens_per_s),
        (f"time to first token of a second turn, ms, {title}", lambda each: each.ttft_ms),
    )
    lines = []
    for name, value in kinds:
        if peer is not None:
            pairs = [(value(our), value(their)) for our, their in zip(ours, theirs, strict=True)]
            note = "; ".join(f"{our:.1f} against {their:.1f}" for our, their in pairs)
            share = median(our / their for our, their in pairs)
            lines.append(Line(f"{name}, over {peer.name}", share, None, note=note))
        else:
            values = list(map(value, ours))
            lines.append(Line(name, median(values), None, note=_figures(values)))
    return lines


def decode_beside_prefill(bed: LoadTestBed, *, rounds: int, seed: int) -> Line:
    """ITL p99 of a decoding session while a long prompt is computed, over its ITL p99 alone."""
    num_words = _fitting_words(bed, _LONGER_PROMPT_TOKENS, answer_tokens=1)
    alone_ms: list[float] = []
    beside_ms: list[float] = []
    for number in range(rounds):
        decoding = Script("decoding", (Turn(_text(24, seed + number), _DECODING_TOKENS, is_cold=True),))
        prompt = _text(num_words, seed + 1000 + number)
        prefill = Script("prefill", (Turn(prompt, 1, is_cold=True),))
        alone = bed.measure_mesh([decoding], arrivals_s=(0.0,))
        both = bed.measure_mesh([decoding, prefill], arrivals_s=(0.0, _PREFILL_AT_S))
        alone_ms += alone.answers[0].record.itls_ms
        beside_ms += itls_during(both.answers[0].record, both.answers[1].record)
    if not beside_ms:
        return Line("ITL p99 beside a prefill, over alone", None, ITL_RATIO, is_ceiling=True)
    p99_alone, p99_beside = (float(np.percentile(gaps, 99)) for gaps in (alone_ms, beside_ms))
    log.info("itl", alone_ms=round(p99_alone, 1), beside_ms=round(p99_beside, 1))
    return Line(
        f"ITL p99 of a decoding session while a {num_words}-word prefill runs, over alone",
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


def soak_line(step: Step, status: MeshStatus) -> Line:
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


def _alone_or_paired(
    other: RpcSystem | MeshSystem | None, title: str, ours: Sequence[float], theirs: Sequence[float]
) -> list[Line]:
    """Rates of the mesh, and their ratio to those of another checkout's, if there is one."""
    if other is None:
        return [Line(title, median(ours), None, note=_figures(ours))]
    pairs = list(zip(ours, theirs, strict=True))
    note = f"{len(pairs)} rounds: " + "; ".join(f"{our:.1f} against {their:.1f}" for our, their in pairs)
    return PairedRatio.of(pairs).lines(title, other.name, note)


def _against_peer(
    title: str, ours: Sequence[float], theirs: Sequence[float], wanted: float, words: str
) -> Line:
    pairs = list(zip(ours, theirs, strict=True))
    return Line(
        title,
        median(our / their for our, their in pairs),
        wanted,
        note="; ".join(words.format(our, their) for our, their in pairs),
    )


def _limit_over_peer(title: str, most: float, theirs: Sequence[float]) -> Line:
    """Ratio to the peer of a mesh whose processors only compute, as its stages do: see `compute_limit`."""
    against = f"{most:.0f} against {median(theirs):.0f}"
    return Line(
        f"{title}: compute limit of all processors over llama.cpp RPC",
        most / median(theirs),
        None,
        note=against,
    )


def _latest(rates: Sequence[float]) -> float | None:
    return round(rates[-1], 1) if rates else None


def _fitting_words(bed: LoadTestBed, wanted: int, *, answer_tokens: int) -> int:
    """Words of a long prompt: as many as wanted, or as fit into the mesh's context with the answer."""
    room = bed.ctx_size - answer_tokens - TOKENS_AROUND
    return max(1, min(wanted, int(room / WORD_TOKENS)))


def short_prompts(count: int, seed: int, answer_tokens: int = SHORT_ANSWER_TOKENS) -> list[Script]:
    """Short prompts, no two the same, with answers of one length."""
    prompts = made_up_prompts(count, _SHORT_PROMPT_TOKENS, seed)
    return [
        Script(f"short {index}", (Turn(prompt.text, answer_tokens, is_cold=True),))
        for index, prompt in enumerate(prompts)
    ]


def _counts(bed: LoadTestBed) -> tuple[StageStatus, ...] | None:
    """What each stage counts; None if one tells nothing, as while a mesh repairs itself after a pause."""
    status = bed.mesh.status()
    if all(stage.rows is not None for stage in status.stages):
        return status.stages
    log.warning("no_counts", ready=status.ready, lost=status.lost, repairs=as_json(status.repairs))
    return None


def _totals(bed: LoadTestBed) -> _Totals:
    stages = _counts(bed)
    until_s = time.monotonic() + _LONGEST_SILENCE_S
    while stages is None and time.monotonic() < until_s:
        time.sleep(1.0)
        stages = _counts(bed)
    if stages is None:
        raise MeshError("the stages do not tell their counts: one of them did not answer the head in time")
    return _Totals(
        num_rows=sum(stage.rows or 0 for stage in stages),
        num_decodes=sum(stage.decodes or 0 for stage in stages),
        cpu_ms=0.0 if bed.processes is None else 1000 * bed.processes.cpu_s(),
        decode_cpu_ms=sum(stage.decode_cpu_ms or 0.0 for stage in stages),
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
