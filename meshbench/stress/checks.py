"""Checks of answers against expected ones, and of the invariants of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from mesh.status import SessionsStatus
from meshbench.report_tools import (
    Check,
)
from meshbench.serving_metrics import Figures, work_out
from meshbench.stress.harness import open_sessions
from meshbench.stress.memory import growth_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mesh.status import MeshStatus
    from meshbench.lab.memory_watch import MemorySample
    from meshbench.load_client.answers import AnswerRecord, Outcome
    from meshbench.load_client.schedule import Request
    from meshbench.serving_metrics import Slo
    from meshbench.stress.harness import LoadTestBed
    from meshbench.stress.memory import Footprint, Growth
    from meshbench.stress.scripts import Script, Turn

_MIB: Final = 2**20
# Shorter runs cannot distinguish a leak from an allocator's fluctuations.
LEAST_STEADY_S: Final = 30.0
_MISMATCHES: Final = "mesh_prefix_mismatches_total"
PERCENTILES: Final = (50.0, 90.0, 99.0)
# More users that bring less than this more are only waiting.
LEAST_GAIN: Final = 0.1

Kind = Literal["failure", "stream", "length", "pieces", "prompt", "text"]


@dataclass(frozen=True)
class Expected:
    """A request, and its answer when sent alone."""

    turn: Turn
    """The request."""
    alone: AnswerRecord | None = None
    """The answer, or None if it was not sent alone."""


@dataclass(frozen=True)
class Problem:
    """Something that must not be."""

    kind: Kind
    """`failure`: no answer, or not all of it. `stream`: chunks that are missing, twice, or out of order.
    `length`: a finish reason that does not go with the number of tokens. `pieces`: a text that is not that of
    its own tokens. `prompt`: another number of prompt tokens than alone. `text`: another answer than alone,
    where that was promised."""
    request: str
    """Which."""
    detail: str
    """For a person."""


@dataclass(frozen=True)
class AnswerCheck:
    """Comparison of many answers."""

    num_answers: int
    """Number of compared answers."""
    num_compared: int
    """How many of them were answered alone too."""
    num_forks: int
    """How many of those became another text at some token. The fast mode allows it, the exact mode does not.
    """
    problems: tuple[Problem, ...]
    """In the order of the answers."""
    num_hung_up_early: int = 0
    """How many broke off because their clients disconnected before the first token."""
    num_hung_up_late: int = 0
    """The same after it. Their text up to then is compared."""

    @property
    def num_hung_up(self) -> int:
        """Answers whose clients did not wait for the end."""
        return self.num_hung_up_early + self.num_hung_up_late

    @property
    def fork_rate(self) -> float:
        """Share of the compared answers, 0 to 1."""
        return self.num_forks / self.num_compared if self.num_compared else 0.0

    @property
    def by_kind(self) -> dict[str, int]:
        """Problems of each kind, the most frequent first."""
        return dict(Counter(problem.kind for problem in self.problems).most_common())


@dataclass(frozen=True)
class ClientCounts:
    """Sums over all loads of a run."""

    num_requests: int
    """That were sent."""
    num_finished: int
    """That were answered to their end."""
    num_failed: int
    """That were not, though their clients waited."""
    num_hung_up_early: int
    """Requests whose clients disconnected before the first token."""
    num_hung_up_late: int
    """Requests whose clients hung up during the answer."""
    num_unlike: int
    """Requests whose text is not the one given alone, as far as it was received."""
    num_prompt_tokens: int
    """Of the finished ones."""
    num_cached_tokens: int
    """How many of those the stages held already."""
    num_begun_anew: int | None
    """Sessions whose slot did not hold what it was believed to hold, by `/metrics`; None if the mesh does not
    count them."""

    def rows(self) -> list[tuple[str, str]]:
        """Name and figure of each, for a table."""
        begun_anew = "not counted" if self.num_begun_anew is None else str(self.num_begun_anew)
        return [
            ("requests", str(self.num_requests)),
            ("finished", str(self.num_finished)),
            ("disconnected before the first token", str(self.num_hung_up_early)),
            ("disconnected during the answer", str(self.num_hung_up_late)),
            ("failed", str(self.num_failed)),
            ("texts different from the one generated alone", str(self.num_unlike)),
            ("cached tokens", f"{self.num_cached_tokens} of {self.num_prompt_tokens} in finished prompts"),
            ("restarted, since the slot had other tokens", begun_anew),
        ]


@dataclass(frozen=True)
class Reference:
    """Chats with their answers given alone."""

    scripts: tuple[Script, ...]
    """The chats."""
    answers: tuple[tuple[str, ...], ...]
    """Answers to each turn of each chat, given alone."""
    expected: Mapping[str, Expected]
    """By what the requests are called."""

    def chats(self, fields: Mapping[str, Any]) -> tuple[tuple[Request, ...], ...]:
        """All chats, later turns with the answers given alone, with these fields in each request."""
        return tuple(
            tuple(script.request(turn, answers[:turn], fields) for turn in range(len(script.turns)))
            for script, answers in zip(self.scripts, self.answers, strict=True)
        )


@dataclass(frozen=True)
class Step:
    """A load of one concurrency."""

    concurrency: int
    """Requests under way at once."""
    figures: Figures
    """Measurements."""
    answer_check: AnswerCheck
    """What the answers were like."""
    peer_tokens_per_s: float | None = None
    """The peer's rate under the same load; None if it was not measured."""

    @property
    def tokens_per_s(self) -> float:
        """Answered tokens a second, of all requests together."""
        return self.figures.output_throughput

    @property
    def ratio(self) -> float | None:
        """Ratio to the peer's speed."""
        return None if self.peer_tokens_per_s is None else self.tokens_per_s / self.peer_tokens_per_s


def answer_checks(steps: Sequence[Step], *, is_exact: bool) -> list[Check]:
    """Check of every answer."""
    found = []
    for step in steps:
        answer_check = step.answer_check
        kinds = ", ".join(f"{count} {kind}" for kind, count in answer_check.by_kind.items())
        examples = "; ".join(f"{problem.request}: {problem.detail}" for problem in answer_check.problems[:3])
        forks = f"{answer_check.num_forks} of {answer_check.num_compared} texts differ from alone"
        if answer_check.num_hung_up:
            forks += f", {answer_check.num_hung_up} clients disconnected"
        promise = "every answer sound and byte-equal to alone" if is_exact else "every answer sound"
        found.append(
            Check(
                f"{promise}, {step.concurrency} at once",
                not answer_check.problems,
                f"{answer_check.num_answers} answers, {kinds or 'no problem'}, {forks}"
                + (f" ({examples})" if examples else ""),
            )
        )
    return found


def leak_check(status: MeshStatus, num_before: int = 0) -> Check:
    """Check that no session is left without requests.

    Args:
        status: Status of the mesh when no request of ours is running.
        num_before: Sessions that were open before the load: with those of other clients among them one cannot
            say whose is left.
    """
    sessions = status.sessions or SessionsStatus()
    at_stages = [stage.open_sessions for stage in status.stages]
    counts = ", ".join("not told" if count is None else str(count) for count in at_stages)
    detail = f"{sessions.running} running, {sessions.waiting} waiting, open at the stages: {counts}"
    if num_before:
        detail += f"; {num_before} of other clients were open before the load"
    is_clean = open_sessions(status) == 0
    return Check("no session left when idle", None if num_before and not is_clean else is_clean, detail)


def footprint_checks(footprints: Sequence[Footprint]) -> list[Check]:
    """Check of every stage's memory."""
    return [
        Check(
            f"memory of stage {each.index} within weights + KV + 300 MB",
            each.is_within,
            f"{each.process_bytes / _MIB:.0f} MiB at most, {each.weight_bytes / _MIB:.0f} weights + "
            f"{each.cache_bytes / _MIB:.0f} KV; {each.host_bytes / _MIB:.0f} with Ray and all on its host",
        )
        for each in footprints
    ]


def flatness_check(samples: Sequence[MemorySample], role: str, duration_s: float) -> Check:
    """Memory of all processes of a role together, under a steady load.

    Args:
        samples: Of the time of that load.
        role: See `memory_watch.Role`.
        duration_s: Of that load.
    """
    name = f"memory of {role} flat after warm-up"
    growths = growth_by_process(samples, role)
    if duration_s < LEAST_STEADY_S or not growths:
        return Check(name, None, f"{duration_s:.0f} s of steady load are too short to say")
    details = [
        f"host{host}: {growth.first_bytes / _MIB:.1f} to {growth.last_bytes / _MIB:.1f} MiB, most "
        f"{growth.max_bytes / _MIB:.1f}, {growth.slope_bytes_per_hour / _MIB:+.1f} MiB/h"
        for host, growth in growths
    ]
    return Check(name, all(growth.is_flat for _, growth in growths), "; ".join(details))


def growth_by_process(samples: Sequence[MemorySample], role: str) -> list[tuple[int, Growth]]:
    """Host number and growth of each process of a role that was there long enough."""
    by_process: dict[tuple[int, int], list[MemorySample]] = {}
    for sample in samples:
        if sample.role == role:
            by_process.setdefault((sample.host, sample.pid), []).append(sample)
    found = []
    for (host, _pid), own in sorted(by_process.items()):
        growth = growth_of([each.at_s for each in own], [each.own_bytes for each in own])
        if growth is not None:
            found.append((host, growth))
    return found


def check_answers(
    answers: Sequence[AnswerRecord],
    expected: Mapping[str, Expected],
    *,
    is_exact: bool,
    text_of: Callable[[Sequence[int]], str] | None,
) -> AnswerCheck:
    """Compare every answer.

    Args:
        answers: The answers.
        expected: By `scripts.prompt_id`.
        is_exact: Whether every text must be the one that was given alone.
        text_of: The text that an answer's tokens make; None if the server does not send them.
    """
    problems: list[Problem] = []
    num_compared = num_forks = num_early = num_late = 0
    for one in answers:
        wanted = expected[one.record.prompt_id]
        failure, alone = one.record.failure, wanted.alone
        is_part = failure is not None and failure.is_hang_up
        if is_part:
            is_early = not one.token_ids and not one.text
            num_early += is_early
            num_late += not is_early
            if is_early:
                continue
        else:
            problems += _problems(one, wanted, text_of)
        if alone is None or alone.record.failure is not None or (failure is not None and not is_part):
            continue
        num_compared += 1
        is_as_alone = _begins(alone, one) if is_part else _equals(alone, one)
        if not is_as_alone:
            num_forks += 1
            if is_exact:
                place = f"differs from the answer given alone at character {_fork(one.text, alone.text)}"
                problems.append(Problem("text", one.record.prompt_id, place))
    return AnswerCheck(len(answers), num_compared, num_forks, tuple(problems), num_early, num_late)


def _equals(alone: AnswerRecord, one: AnswerRecord) -> bool:
    return one.text == alone.text and one.record.finish == alone.record.finish


def _begins(alone: AnswerRecord, part: AnswerRecord) -> bool:
    """Whether the text up to the hang-up is the beginning of the answer given alone."""
    has_tokens = alone.token_ids[: len(part.token_ids)] == part.token_ids
    return alone.text.startswith(part.text) and (has_tokens or not alone.token_ids)


def _problems(
    one: AnswerRecord, wanted: Expected, text_of: Callable[[Sequence[int]], str] | None
) -> Iterable[Problem]:
    record, turn = one.record, wanted.turn
    request = record.prompt_id
    if record.failure is not None:
        yield Problem("failure", request, f"{record.failure.kind}: {record.failure.message}")
        return
    for fault in one.faults:
        yield Problem("stream", request, fault)
    count = record.num_output_tokens
    finishes = {"length"} if turn.is_full else {"stop", "length"}
    if record.finish not in finishes or (record.finish == "length") != (count == turn.max_tokens):
        # An end token may be the last that was allowed.
        is_last_stop = record.finish == "stop" and count <= turn.max_tokens and not turn.is_full
        if not is_last_stop:
            yield Problem("length", request, f"{record.finish} after {count} of {turn.max_tokens} tokens")
    if len(record.parts_s) > count:
        yield Problem("stream", request, f"{len(record.parts_s)} chunks with tokens for {count} tokens")
    if text_of is not None and one.token_ids and text_of(one.token_ids) != one.text:
        yield Problem("pieces", request, "the text is not that of its own tokens")
    alone = wanted.alone
    if alone is not None and record.num_input_tokens != alone.record.num_input_tokens:
        counts = f"{record.num_input_tokens} prompt tokens, alone {alone.record.num_input_tokens}"
        yield Problem("prompt", request, counts)


def _fork(text: str, other: str) -> int:
    pairs = zip(text, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(text), len(other)))


def count_clients(
    answers: Iterable[AnswerRecord], answer_checks: Iterable[AnswerCheck], num_begun_anew: int | None
) -> ClientCounts:
    """Add all loads up."""
    records = [one.record for one in answers]
    judged = tuple(answer_checks)
    finished = [record for record in records if record.failure is None]
    early, late = (
        sum(one.num_hung_up_early for one in judged),
        sum(one.num_hung_up_late for one in judged),
    )
    return ClientCounts(
        num_requests=len(records),
        num_finished=len(finished),
        num_failed=len(records) - len(finished) - early - late,
        num_hung_up_early=early,
        num_hung_up_late=late,
        num_unlike=sum(one.num_forks for one in judged),
        num_prompt_tokens=sum(record.num_input_tokens or 0 for record in finished),
        num_cached_tokens=sum(record.num_cached_tokens or 0 for record in finished),
        num_begun_anew=num_begun_anew,
    )


def prefix_mismatches(exposition: str) -> int | None:
    """Value of a metric, summed over all models; None if `/metrics` does not have it."""
    values = [
        float(line.rpartition(" ")[2])
        for line in exposition.splitlines()
        if line.startswith((f"{_MISMATCHES}{{", f"{_MISMATCHES} "))
    ]
    return round(sum(values)) if values else None


def answer_alone(bed: LoadTestBed, scripts: Sequence[Script]) -> Reference:
    """Send turn after turn, one request at a time, each prompt computed from its first token on."""
    cold = {**bed.mesh.fields, "cache_prompt": False}
    answers: list[list[str]] = [[] for _ in scripts]
    expected: dict[str, Expected] = {}
    for turn in range(max(len(script.turns) for script in scripts)):
        places = [place for place, script in enumerate(scripts) if turn < len(script.turns)]
        chats = tuple((scripts[place].request(turn, answers[place], cold),) for place in places)
        outcome = bed.ask_mesh(chats=chats, num_requests=len(chats))
        for place, answer in zip(places, outcome.answers, strict=True):
            answers[place].append(answer.text)
            expected[answer.record.prompt_id] = Expected(scripts[place].turns[turn], answer)
    return Reference(tuple(scripts), tuple(map(tuple, answers)), expected)


def step_of(
    concurrency: int,
    outcome: Outcome,
    answer_check: AnswerCheck,
    peer_tokens_per_s: float | None = None,
    *,
    slos: tuple[Slo, ...] = (),
) -> Step:
    """Figures of a load; requests whose clients hung up are left out.

    Args:
        concurrency: Requests under way at once.
        outcome: What became of them.
        answer_check: What the answers were like.
        peer_tokens_per_s: The peer's rate under the same load; None if it was not measured.
        slos: Limits for goodput.
    """
    records = [
        one.record
        for one in outcome.answers
        if one.record.failure is None or not one.record.failure.is_hang_up
    ]
    figures = work_out(records, outcome.duration_s, percentiles=PERCENTILES, slos=slos)
    return Step(concurrency, figures, answer_check, peer_tokens_per_s)


def saturation(rates: Sequence[tuple[int, float]], least_gain: float = LEAST_GAIN) -> int | None:
    """The concurrency after which no higher one brings that much more throughput.

    Args:
        rates: Concurrency and tokens per second.
        least_gain: Share of the rate.

    Returns:
        None if the highest concurrency still brought more than all below it: then the ramp was too short.
    """
    ordered = sorted(rates)
    for index, (concurrency, rate) in enumerate(ordered[:-1]):
        if all(later <= rate * (1 + least_gain) for _, later in ordered[index + 1 :]):
            return concurrency
    return None
