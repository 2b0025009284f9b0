"""Results of `mesh bench chaos`: repairs, pauses and bounds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from meshbench.report_tools import INTERRUPTED, Line, PairedRatio
from meshbench.stress.checks import Problem, check_answers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from meshbench.chaos.fault_kinds import FaultKind
    from meshbench.load_client.answers import AnswerRecord
    from meshbench.stress.checks import Expected

_REPLICA: Final = "(had a replica)"
MEDIAN_PAUSE_S: Final = 5.0
WORST_PAUSE_S: Final = 15.0
WARM_PAUSE_S: Final = 2.5
PROBE_S: Final = 3.0
SERVING_S: Final = 10.0


@dataclass(frozen=True)
class ProbeOutcome:
    """A request that was sent right after a fault."""

    took_s: float
    """To its first token, or to its refusal."""
    outcome: str
    """`answer`, `503`, or what went wrong."""

    @property
    def is_sound(self) -> bool:
        """Whether it was answered, or asked to come again."""
        return self.outcome in {"answer", "503"}


@dataclass(frozen=True)
class Repair:
    """Result of one fault. All times in seconds."""

    number: int
    """Of the fault, from 0."""
    kind: FaultKind
    """Of the fault."""
    host: str
    """That it hit."""
    at_s: float
    """Time since the first question."""
    hold_s: float | None
    """Time for which the host stayed cut off, or the process stopped; None for other faults."""
    whole_s: float | None
    """Time from the fault until the mesh was as before, spares included; None if never."""
    repair_s: float | None
    """What the head took for repairs, from its noticing on; None if it made none."""
    pauses_s: tuple[float, ...]
    """Of each client that was being answered, the longest time between two tokens in that time, ascending."""
    silence_s: float
    """The longest time in which nothing at all came for one of them, no comment ping either."""
    newcomer: ProbeOutcome | None
    """Request right after the fault; None without one."""
    is_warm: bool | None
    """Whether there was a replica of the lost layers; None if unknown."""
    reason: str
    """Reason recorded by the mesh; empty if none."""
    rejoined: tuple[int, ...]
    """Hosts whose `mesh join` had ended and was started again."""
    problem: str
    """Why the mesh was not whole in time; empty if it was."""

    @property
    def worst_pause_s(self) -> float:
        """Longest pause of a client; 0 without any."""
        return max(self.pauses_s, default=0.0)


@dataclass(frozen=True)
class HeadLogAccount:
    """Results of one fault."""

    num_repairs: int
    """How often the ring was made whole in that time, planned moves included."""
    is_warm: bool | None
    """Whether there was a replica of all moved layers; None if nothing moved."""
    reason: str
    """Why, and how: one line; empty if the head noted nothing."""
    repair_s: float | None
    """What the repairs took from the head's noticing on, together; None if there was none."""


@dataclass(frozen=True)
class KindSummary:
    """Statistics of all faults of a kind. Times in seconds."""

    kind: FaultKind
    """Which."""
    count: int
    """How many."""
    num_warm: int
    """For how many the lost layers were loaded already."""
    median_pause_s: float | None
    """Of all clients' pauses; None if there were no clients."""
    worst_pause_s: float | None
    """The longest of them; None without any."""
    worst_silence_s: float
    """The longest time without even a comment ping."""
    median_repair_s: float | None
    """What the head took, from its noticing on; None if it repaired nothing."""
    median_whole_s: float | None
    """Until all hosts were back; None if they never were."""
    worst_newcomer_s: float | None
    """The longest that a new request waited for an answer or a 503; None without any."""
    num_not_whole: int
    """After how many the mesh was not whole in time."""


@dataclass(frozen=True)
class Tally:
    """Statistics of many streams."""

    num_streams: int
    """That began; those that were refused with 503 did not."""
    num_failed: int
    """How many of them have not all of their answer, though their clients waited."""
    num_hung_up_early: int
    """How many had clients that disconnected before the first token."""
    num_hung_up_late: int
    """The same after it."""
    num_unlike: int
    """How many of those that did not fail are not what the undisturbed run said, in text or token ids, as far
    as they came."""
    num_refused: int
    """Requests rejected with 503 before their answer began."""
    problems: tuple[Problem, ...]
    """Everything that must not be: of failed streams, unsound ones, and unlike ones where equal texts are
    promised."""


@dataclass(frozen=True)
class Scenario:
    """Result of one of `fault_kinds.SCENARIOS`."""

    name: str
    """Which."""
    lines: tuple[Line, ...]
    """Of the acceptance table."""
    repairs: tuple[Repair, ...] = ()
    """Results of its faults."""
    problems: tuple[Problem, ...] = ()
    """Of streams."""
    failures: tuple[str, ...] = ()
    """Why it ended before it was through; empty if it was."""

    @property
    def is_interrupted(self) -> bool:
        """Whether the run was interrupted: later scenarios are skipped."""
        return INTERRUPTED in self.failures


def probe_outcome(stream: AnswerRecord) -> ProbeOutcome:
    """Result of a request that was sent right after a fault."""
    record = stream.record
    failure = record.failure
    if failure is None:
        return ProbeOutcome(record.parts_s[0] - record.sent_s, "answer")
    took_s = record.ended_s - record.sent_s
    if stream.is_refused and failure.retry_after is not None:
        return ProbeOutcome(took_s, "503")
    return ProbeOutcome(took_s, f"{failure.kind}: {failure.message}")


def pauses_s(streams: Iterable[AnswerRecord], start_s: float, stop_s: float) -> tuple[float, ...]:
    """Of every stream that ran when that time began, its longest pause within it, the longest last.

    Streams whose clients hung up within it are left out: their whole wait is unknown.
    """
    return tuple(sorted(each.pause_s(start_s, stop_s) for each in _running(streams, start_s, stop_s)))


def silence_s(streams: Iterable[AnswerRecord], start_s: float, stop_s: float) -> float:
    """The longest silence of any of them in that time; 0 without any."""
    return max((each.silence_s(start_s, stop_s) for each in _running(streams, start_s, stop_s)), default=0.0)


def _running(streams: Iterable[AnswerRecord], start_s: float, stop_s: float) -> Iterator[AnswerRecord]:
    for each in streams:
        record = each.record
        has_hung_up = record.failure is not None and record.failure.is_hang_up
        if record.sent_s < start_s < record.ended_s and not (has_hung_up and record.ended_s < stop_s):
            yield each


def events_of(lines: str) -> list[dict[str, Any]]:
    """The events of a log that is JSON lines; other lines, such as what is meant for people, are left out."""
    found = []
    for line in lines.splitlines():
        if line.startswith("{"):
            try:
                event = json.loads(line)
            except ValueError:  # the end of a line that is still being written
                continue
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                found.append(event)
    return found


def account_of(events: Iterable[dict[str, Any]]) -> HeadLogAccount:
    """Result of a fault, by the events after it.

    A ring that breaks is `repaired`, which says how long it took. One that is left is `moving` until it is
    `ring_whole_again`.
    """
    causes: list[str] = []
    ways: list[str] = []
    took_s: list[float] = []
    moving_s: float | None = None
    for event in events:
        match event["event"]:
            case "ring_broken":
                causes.append(str(event["reason"]))
            case "repaired":
                ways.append(str(event["how"]))
                took_s.append(float(event["seconds"]))
            case "moving":
                ways.append(str(event["how"]))
                moving_s = _time_s(event)
            case "ring_whole_again" if moving_s is not None:
                took_s.append(_time_s(event) - moving_s)
                moving_s = None
    moves = sum(way.count(" to ") for way in ways)
    copies = sum(way.count(_REPLICA) for way in ways)
    return HeadLogAccount(
        num_repairs=len(took_s),
        is_warm=copies == moves if moves else None,
        reason="; ".join(dict.fromkeys([*causes, *ways])),
        repair_s=round(sum(took_s), 3) if took_s else None,
    )


def _time_s(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def by_kind(repairs: Sequence[Repair]) -> list[KindSummary]:
    """Statistics by kind, in the order of their first faults."""
    found = []
    for kind in dict.fromkeys(repair.kind for repair in repairs):
        own = [repair for repair in repairs if repair.kind == kind]
        pauses = [pause_s for each in own for pause_s in each.pauses_s]
        repair_s = [each.repair_s for each in own if each.repair_s is not None]
        whole_s = [each.whole_s for each in own if each.whole_s is not None]
        found.append(
            KindSummary(
                kind=kind,
                count=len(own),
                num_warm=sum(each.is_warm is True for each in own),
                median_pause_s=median(pauses) if pauses else None,
                worst_pause_s=max(pauses, default=None),
                worst_silence_s=max(each.silence_s for each in own),
                median_repair_s=median(repair_s) if repair_s else None,
                median_whole_s=median(whole_s) if whole_s else None,
                worst_newcomer_s=max((each.newcomer.took_s for each in own if each.newcomer), default=None),
                num_not_whole=sum(each.whole_s is None for each in own),
            )
        )
    return found


def tally(streams: Iterable[AnswerRecord], expected: Mapping[str, Expected], *, is_exact: bool) -> Tally:
    """Compare every stream.

    Args:
        streams: Those of the clients.
        expected: Answers of the undisturbed run, by question.
        is_exact: Whether every text must be that.
    """
    all_streams = list(streams)
    answers = [stream for stream in all_streams if not stream.is_refused]
    answer_check = check_answers(answers, expected, is_exact=is_exact, text_of=None)
    problems = list(answer_check.problems)
    num_unlike = answer_check.num_forks
    for one in answers:
        alone = expected[one.record.prompt_id].alone
        is_compared = alone is not None and one.record.failure is None
        # Other ids can make the same text.
        if alone is not None and is_compared and one.text == alone.text and one.token_ids != alone.token_ids:
            num_unlike += 1
            if is_exact:
                problems.append(Problem("text", one.record.prompt_id, "the same text of other token ids"))
    return Tally(
        num_streams=len(answers),
        num_failed=sum(one.record.failure is not None for one in answers) - answer_check.num_hung_up,
        num_hung_up_early=answer_check.num_hung_up_early,
        num_hung_up_late=answer_check.num_hung_up_late,
        num_unlike=num_unlike,
        num_refused=len(all_streams) - len(answers),
        problems=tuple(problems),
    )


def stream_lines(found: Tally, when: str, *, is_exact: bool) -> list[Line]:
    """Checks that no answer fails or differs."""
    refused = f"; {found.num_refused} requests were rejected with Retry-After" if found.num_refused else ""
    early, late = found.num_hung_up_early, found.num_hung_up_late
    hung_up = (
        f"; {early + late} clients disconnected, {early} of them before the first token"
        if early + late
        else ""
    )
    failed = Line(
        f"{when}: failed streams",
        found.num_failed,
        0,
        is_ceiling=True,
        note=f"of {found.num_streams}{hung_up}{refused}",
    )
    if not is_exact:
        return [failed]
    num_whole = found.num_streams - found.num_failed - early - late
    parts = f" and {late} beginnings" if late else ""
    unlike = Line(
        f"{when}: texts different from the undisturbed run",
        found.num_unlike,
        0,
        is_ceiling=True,
        note=f"of {num_whole}{parts}, text and token ids",
    )
    return [failed, unlike]


def repair_lines(repairs: Sequence[Repair]) -> list[Line]:
    """Figures of pauses that clients see."""
    pauses = [pause_s for repair in repairs for pause_s in repair.pauses_s]
    worst = [repair.worst_pause_s for repair in repairs if repair.pauses_s]
    warm = [pause_s for repair in repairs if repair.is_warm for pause_s in repair.pauses_s]
    worst_warm = [repair.worst_pause_s for repair in repairs if repair.is_warm and repair.pauses_s]
    probes = [repair.newcomer for repair in repairs if repair.newcomer is not None]
    answered = sum(probe.outcome == "answer" for probe in probes)
    unsound = [probe for probe in probes if not probe.is_sound]
    of_each = "of the longest pause after each fault, median"
    return [
        _ceiling(
            "pause seen by a client, median, s",
            _median(pauses),
            MEDIAN_PAUSE_S,
            f"{len(pauses)} pauses; {of_each}: {_shown(worst)}",
        ),
        _ceiling("pause, worst, s", max(pauses, default=None), WORST_PAUSE_S),
        _ceiling(
            "pause where a spare had the layers loaded, median, s",
            _median(warm),
            WARM_PAUSE_S,
            f"{len(warm)} pauses after {len(worst_warm)} faults; {of_each}: {_shown(worst_warm)}",
        ),
        _ceiling(
            "a new request's answer or 503, worst, s",
            max((probe.took_s for probe in probes), default=None),
            PROBE_S,
            f"{answered} of {len(probes)} got an answer; median {_shown([probe.took_s for probe in probes])}",
        ),
        _ceiling(
            "new requests with neither",
            len(unsound) if probes else None,
            0,
            "; ".join(dict.fromkeys(probe.outcome for probe in unsound)),
        ),
    ]


def pause_lines(own: Scenario, theirs: Scenario, other: str) -> list[Line]:
    """The longest pause after each fault, over that of another checkout at the same fault."""
    pauses = {repair.number: repair.worst_pause_s for repair in theirs.repairs if repair.pauses_s}
    pairs = [
        (repair.worst_pause_s, pauses[repair.number])
        for repair in own.repairs
        if repair.pauses_s and repair.number in pauses
    ]
    if not pairs:
        return []
    medians = " against ".join(f"{median(side):.2f}" for side in zip(*pairs, strict=True))
    title, note = f"{own.name}: longest pause of each fault", f"{len(pairs)} faults, medians {medians} s"
    return [PairedRatio.of(pairs).line(title, other, note)]


def _ceiling(title: str, measured: float | None, most: float, note: str = "") -> Line:
    return Line(f"faults: {title}", measured, most, is_ceiling=True, note=note)


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _shown(values: Sequence[float]) -> str:
    return f"{median(values):.2f}" if values else "none"
