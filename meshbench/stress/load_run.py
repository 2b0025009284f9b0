"""Load of a mesh under test, step by step, and the report of it: the same in the lab and behind a URL."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import structlog

from meshbench.paired_systems import OWN
from meshbench.report_tools import INTERRUPTED
from meshbench.stress import measurements
from meshbench.stress.checks import (
    answer_alone,
    answer_checks,
    check_answers,
    count_clients,
    footprint_checks,
    leak_check,
    prefix_mismatches,
    saturation,
    step_of,
)
from meshbench.stress.harness import open_sessions
from meshbench.stress.report import Findings, stress_report
from meshbench.stress.scripts import (
    QUICK,
    WIDE,
    draw_client_requests,
    mixed_scripts,
    scripts_with_shared_prefixes,
)
from meshbench.under_test.status_figures import RingFigures
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from mesh.status import MeshStatus
    from mesh.text.tokenizer import Tokenizer
    from meshbench.load_client.answers import AnswerRecord
    from meshbench.report_tools import Check, Line, Report
    from meshbench.stress.checks import ClientCounts, Reference, Step
    from meshbench.stress.harness import LoadTestBed
    from meshbench.stress.lab_memory import LabMemory
    from meshbench.stress.measurements import LimitOptions
    from meshbench.stress.options import LineName, LoadPlan
    from meshbench.stress.scripts import Script
    from meshbench.under_test.links import KnownLinks

# Positions that chats use at most: also the context of a peer.
CHAT_CTX_SIZE: Final = 2560
NUM_CONCURRENT: Final = 8
_LIMIT_AT_ONCE: Final = 16
_WIDER: Final = (16, 32)
_MIXED_REQUESTS: Final = 200
_WARM_UP_AT_ONCE: Final = 4
_WARM_UP_TOKENS: Final = 24
_REQUESTS_PER_USER: Final = 8
# Interval of memory samples; one more is waited for after the load.
SAMPLE_S: Final = 2.0

log = structlog.get_logger()


@dataclass(frozen=True)
class Subject:
    """What a run knows of the mesh that it loads."""

    is_exact: bool
    """Numeric mode; then every text must be the one that was given alone."""
    num_places: int
    """Answers that the client may have at once."""
    tokenizer: Tokenizer | None
    """Tokenizer of the model; without one no text is compared with its own tokens."""

    def text_of(self) -> Callable[[Sequence[int]], str] | None:
        """The text that tokens make; None without a tokenizer."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return None
        return lambda tokens: b"".join(map(tokenizer.piece, tokens)).decode("utf-8", "replace")


@dataclass(frozen=True)
class InsideView:
    """What is measured besides of a mesh whose processes are on this machine."""

    memory: LabMemory
    """Memory of its processes."""
    limit: LimitOptions
    """What its compute limit is measured with."""


class LoadRun:
    """State of a run.

    Args:
        plan: What is measured.
        bed: The mesh, and what loads it.
        subject: What is known of the mesh.
        inside: What is measured from inside; None for a mesh that is only reached by its API.
        lines: Lines of the acceptance table that were measured before.
        failures: What could not be measured before.
    """

    def __init__(
        self,
        plan: LoadPlan,
        bed: LoadTestBed,
        subject: Subject,
        *,
        inside: InsideView | None = None,
        lines: Sequence[Line] = (),
        failures: Sequence[str] = (),
    ) -> None:
        self._plan = plan
        self._bed = bed
        self._subject = subject
        self._inside = inside
        self._text_of = subject.text_of()
        self._steps: list[Step] = []
        self._ramp: list[tuple[int, float]] = []
        self._lines = list(lines)
        self._checks: list[Check] = []
        self._failures = list(failures)
        self._reference: Reference | None = None
        self._client_answers: list[AnswerRecord] = []
        self._num_mixed = 0
        self._soaked: Step | None = None
        self._before: MeshStatus | None = None
        self._mismatches_before = 0
        self._started_s = time.monotonic()

    def work(self) -> None:
        """Run everything; failures are recorded and skipped."""
        plan = self._plan
        try:
            self._before = self._bed.mesh.status()
            if plan.with_clients:
                self._mismatches_before = prefix_mismatches(self._bed.mesh.metrics()) or 0
            warm_up(self._bed, min(_WARM_UP_AT_ONCE, self._subject.num_places))
            if plan.preset == "acceptance":
                self._accept()
            else:
                self._climb()
            if plan.soak_minutes:
                self._soak()
        except KeyboardInterrupt:
            self._failures.append(INTERRUPTED)
        except MeshError as error:
            self._failures.append(error.message)

    def report(
        self, conditions: dict[str, Any], *, links: KnownLinks | None = None, omitted: Sequence[str] = ()
    ) -> Report:
        """Report of the measurements.

        Args:
            conditions: How they were made, by name.
            links: Links between the hosts, if they were measured.
            omitted: What such a run does not measure, and why.
        """
        plan, inside = self._plan, self._inside
        if inside is not None:
            # One more sample of all processes, without load.
            time.sleep(SAMPLE_S)
        figures = RingFigures()
        found = []
        clients = None
        try:
            status = self._bed.settled_status()
            if plan.with_clients:
                clients = self._client_counts()
        except MeshError as error:
            self._failures.append(error.message)
        else:
            before = self._before or status
            figures = RingFigures.between(before, status)
            if inside is not None:
                found = inside.memory.footprints(status)
            self._checks += [leak_check(status, open_sessions(before)), *footprint_checks(found)]
            if self._num_mixed:
                self._lines.append(measurements.memory_line(found, self._num_mixed))
            if self._soaked is not None:
                self._lines.append(measurements.soak_line(self._soaked, status))
        findings = Findings(
            conditions={**conditions, "took_s": round(time.monotonic() - self._started_s)},
            steps=tuple(self._steps),
            has_ramp=len(self._ramp) > 1,
            saturation=saturation(self._ramp),
            lines=tuple(self._lines),
            checks=(*answer_checks(self._steps, is_exact=self._subject.is_exact), *self._checks),
            footprints=tuple(found),
            stages=figures.stages,
            memory=() if inside is None else inside.memory.by_role(),
            samples=() if inside is None else inside.memory.samples,
            failures=tuple(self._failures),
            clients=clients,
            links=links,
            ring_links=figures.links,
            groups_found=figures.groups_found,
            omitted=(*omitted, *(() if links is None else links.missing)),
        )
        return stress_report(findings)

    def _client_counts(self) -> ClientCounts:
        num_begun_anew = prefix_mismatches(self._bed.mesh.metrics())
        if num_begun_anew is not None:
            num_begun_anew = max(0, num_begun_anew - self._mismatches_before)
        return count_clients(
            self._client_answers, [step.answer_check for step in self._steps], num_begun_anew
        )

    def _climb(self) -> None:
        plan = self._plan
        for num_at_once in plan.concurrency:
            num_requests = plan.num_requests
            if num_requests is None and plan.duration_s is None:
                num_requests = _REQUESTS_PER_USER * num_at_once
            if plan.with_clients:
                step = self._client_load(num_at_once, num_requests or _REQUESTS_PER_USER * num_at_once)
            else:
                step = self._load(num_at_once, num_requests, plan.duration_s)
            self._ramp.append((num_at_once, step.tokens_per_s))

    def _accept(self) -> None:
        bed, inside, places = self._bed, self._inside, self._subject.num_places
        rounds, seed = self._plan.rounds, self._plan.seed
        wider = _WIDER if places >= _WIDER[1] else (places // 2, places)
        limit_options = None if inside is None else inside.limit

        def limit() -> list[Line]:
            return measurements.many_at_once(
                bed,
                min(_LIMIT_AT_ONCE, places),
                limit=limit_options,
                rounds=rounds,
                seed=seed,
            )

        def concurrency() -> list[Line]:
            is_paired = bed.peer is not None and bed.peer.is_mesh
            counts = (1, NUM_CONCURRENT, _LIMIT_AT_ONCE) if is_paired else (NUM_CONCURRENT,)
            lines = []
            for count in counts:
                lines += measurements.concurrency(
                    bed, min(count, places), kernels=OWN, limit=limit_options, rounds=rounds, seed=seed
                )
            return lines

        measures: dict[LineName, Callable[[], list[Line]]] = {
            "crowd": concurrency,
            "limit": limit,
            "wider": lambda: [measurements.more_at_once(bed, *wider, rounds=rounds, seed=seed)],
            "prefill": lambda: measurements.prefill(
                bed, kernels=OWN, limit=limit_options, rounds=rounds, seed=seed
            ),
            "second-turn": lambda: [measurements.second_turn(bed, rounds=rounds, seed=seed)],
            "itl": lambda: [measurements.decode_beside_prefill(bed, rounds=rounds, seed=seed)],
            "context": lambda: measurements.behind_contexts(
                bed,
                self._plan.contexts,
                min(NUM_CONCURRENT, places),
                kernels=OWN,
                rounds=rounds,
                seed=seed,
            ),
        }
        if places < 2:
            # One at a time is all that such a mesh answers.
            del measures["wider"], measures["itl"]
        for name in self._plan.lines:
            if name in measures:
                self._measure(measures[name])
        if "memory" in self._plan.lines and inside is not None:
            step = self._load(min(NUM_CONCURRENT, places), _MIXED_REQUESTS, None, is_steady=True)
            self._num_mixed = step.figures.num_requests

    def _soak(self) -> None:
        minutes = self._plan.soak_minutes
        log.info("soak", minutes=minutes, at_once=self._plan.soak_concurrency)
        self._soaked = self._load(self._plan.soak_concurrency, None, minutes * 60, is_steady=True)

    def _measure(self, measure: Callable[[], list[Line]]) -> None:
        inside = self._inside
        unsampled: AbstractContextManager[None] = nullcontext() if inside is None else inside.memory.paused()
        try:
            with unsampled:
                lines = measure()
        except MeshError as error:
            log.warning("not_measured", reason=error.message)
            self._failures.append(error.message)
            return
        self._lines += lines
        for line in lines:
            log.info("line", title=line.title, measured=line.measured, bound=line.bound, verdict=line.verdict)

    def _load(
        self, num_at_once: int, num_requests: int | None, duration_s: float | None, *, is_steady: bool = False
    ) -> Step:
        reference = self._reference or self._answer_alone()
        bed = self._bed
        limits: dict[str, Any] = {"num_requests": num_requests, "duration_s": duration_s}
        start_s = time.perf_counter()
        outcome = bed.ask_mesh(chats=reference.chats(bed.mesh.fields), num_at_once=num_at_once, **limits)
        stop_s = time.perf_counter()
        answer_check = check_answers(
            outcome.answers, reference.expected, is_exact=self._subject.is_exact, text_of=self._text_of
        )
        rate = None
        if bed.peer is not None and not is_steady:
            rate = bed.ask_peer(
                chats=reference.chats(bed.peer.fields),
                num_at_once=num_at_once,
                num_requests=len(outcome.answers),
            ).tokens_per_s
        step = step_of(num_at_once, outcome, answer_check, rate, slos=self._plan.slos)
        self._steps.append(step)
        if is_steady and self._inside is not None:
            self._checks += self._inside.memory.steady_checks(start_s, stop_s)
        log.info(
            "step",
            at_once=num_at_once,
            answers=len(outcome.answers),
            tokens_per_s=round(step.tokens_per_s, 1),
            peer=None if rate is None else round(rate, 1),
            forks=answer_check.num_forks,
            problems=answer_check.by_kind,
        )
        return step

    def _client_load(self, num_at_once: int, num_requests: int) -> Step:
        """Load of single requests from several clients, some of which hang up."""
        plan, bed = self._plan, self._bed
        reference = self._reference or self._answer_alone()
        # Steps of one run differ in their moments.
        seed = plan.seed + len(self._steps)
        log.info("clients", requests=num_requests, hang_ups=plan.hang_up_share, seed=seed)
        requests = draw_client_requests(
            num_requests, reference.scripts, plan.hang_up_share, seed, bed.mesh.fields
        )
        outcome = bed.ask_mesh(
            chats=tuple((request,) for request in requests),
            num_at_once=num_at_once,
            num_requests=num_requests,
            api_keys=bed.mesh.api_keys,
        )
        self._client_answers += outcome.answers
        answer_check = check_answers(
            outcome.answers, reference.expected, is_exact=self._subject.is_exact, text_of=self._text_of
        )
        step = step_of(num_at_once, outcome, answer_check, slos=plan.slos)
        self._steps.append(step)
        log.info(
            "step",
            at_once=num_at_once,
            answers=len(outcome.answers) - answer_check.num_hung_up,
            hung_up=answer_check.num_hung_up,
            forks=answer_check.num_forks,
            problems=answer_check.by_kind,
        )
        return step

    def _scripts(self) -> tuple[Script, ...]:
        plan = self._plan
        if plan.with_clients:
            return scripts_with_shared_prefixes(plan.num_scripts, plan.seed)
        return mixed_scripts(
            plan.num_scripts,
            QUICK if plan.is_short else WIDE,
            ctx_size=min(self._bed.ctx_size, CHAT_CTX_SIZE),
            seed=plan.seed,
            is_even=self._bed.peer is not None and plan.preset == "ramp",
        )

    def _answer_alone(self) -> Reference:
        bed = self._bed
        scripts = self._scripts()
        log.info("answering_alone", chats=len(scripts))
        self._reference = answer_alone(bed, scripts)
        alone = [one.alone for one in self._reference.expected.values() if one.alone is not None]
        answer_check = check_answers(alone, self._reference.expected, is_exact=False, text_of=self._text_of)
        if answer_check.problems:
            first = answer_check.problems[0]
            raise MeshError(f"{first.request}, alone, failed: {first.kind}: {first.detail}")
        return self._reference


def warm_up(bed: LoadTestBed, num_at_once: int = _WARM_UP_AT_ONCE) -> None:
    """Have some answers given that do not count: a first answer is slower for unrelated reasons."""
    scripts = measurements.short_prompts(num_at_once, 0, _WARM_UP_TOKENS)
    bed.measure_mesh(scripts, num_at_once=num_at_once)
    if bed.peer is not None:
        bed.ask_peer(scripts, num_at_once=num_at_once)
