"""Run of `mesh bench stress`."""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import structlog

from mesh.api.api_keys import KeyRecord, add_key, digest_of
from mesh.bench.paired_systems import OWN, PEERS, even_split
from mesh.bench.report_tools import INTERRUPTED
from mesh.bench.shared_options import logs_folder
from mesh.bench.stress import measurements
from mesh.bench.stress.checks import (
    answer_alone,
    answer_checks,
    check_answers,
    count_clients,
    flatness_check,
    footprint_checks,
    growth_by_process,
    leak_check,
    prefix_mismatches,
    saturation,
    step_of,
)
from mesh.bench.stress.client_process import LoadClient
from mesh.bench.stress.harness import LoadTestBed
from mesh.bench.stress.memory import footprints
from mesh.bench.stress.report import Report, RoleMemory, write_report
from mesh.bench.stress.scripts import (
    QUICK,
    WIDE,
    ClientLoad,
    bodies_of,
    draw_client_requests,
    mixed_scripts,
    scripts_with_shared_prefixes,
)
from mesh.lab.link import LinkConditions
from mesh.lab.llama_cpp_build import build_llama_rpc
from mesh.lab.memory_watch import ROLES, MemoryWatch
from mesh.lab.network import Lab, lab_supported
from mesh.lab.systems import MeshSystem, RpcSystem
from mesh.placement.memory_estimate import StageSizes, Workload
from mesh.text.tokenizer import Tokenizer
from mesh.util.processors import num_usable
from spanmesh_proto import SOFTWARE_VERSION
from spanmesh_proto.errors import ClusterError, MeshError
from stages.slicing.model_facts import read_model_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from mesh.bench.paired_systems import Kernels
    from mesh.bench.report_tools import Check, Line
    from mesh.bench.stress.answers import AnswerRecord
    from mesh.bench.stress.checks import Reference, Step
    from mesh.bench.stress.options import LineName, StressOptions
    from mesh.bench.stress.scripts import Script
    from mesh.lab.memory_watch import MemorySample, Role
    from stages.slicing.model_facts import ModelFacts

log = structlog.get_logger()

_PEER_CTX_SIZE: Final = 2560
_NUM_CONCURRENT: Final = 8
_LIMIT_AT_ONCE: Final = 16
_WIDER: Final = (16, 32)
_MIXED_REQUESTS: Final = 200
_WARM_UP_AT_ONCE: Final = 4
_WARM_UP_TOKENS: Final = 24
_REQUESTS_PER_USER: Final = 8
_PEER_LINES: Final = frozenset({"crowd", "prefill"})
# Interval of memory samples.
_FREQUENT_S: Final = 2.0
_RARE_S: Final = 10.0
_LONG_SOAK_MINUTES: Final = 5.0


def run_stress(options: StressOptions) -> Report:
    """Measure and write the report, of as much as could be measured, also when Ctrl-C ends it.

    Raises:
        MeshError: If no lab can be made here, or an input is wrong, or the mesh does not come up.
    """
    reason = lab_supported()
    if reason is not None:
        raise ClusterError(reason)
    facts = read_model_facts(options.model)
    programs = build_llama_rpc() if options.with_rpc else None
    with ExitStack() as stack:
        logs = stack.enter_context(logs_folder(options.logs))
        shared = [logs, options.model.resolve().parent]
        lab = stack.enter_context(
            Lab(options.num_stages + 1, shared=shared, is_pinned=options.is_pinned, seed=options.seed)
        )
        api_keys = tuple(secrets.token_hex(16) for _ in range(options.num_keys))
        load_client = stack.enter_context(LoadClient(lab, api_key=api_keys[0] if api_keys else None))
        peer = None
        if programs is not None:
            slots = max((_NUM_CONCURRENT,) if options.preset == "acceptance" else options.concurrency)
            peer = RpcSystem(
                lab,
                programs,
                options.model,
                logs,
                num_threads=options.num_threads,
                ctx_size=min(_PEER_CTX_SIZE, options.ctx_size),
                num_slots=slots,
            )
            stack.callback(peer.stop)
            peer.start()
            peer.pause()
        lines: list[Line] = []
        failures: list[str] = []
        if peer is not None and options.preset == "acceptance" and not options.exact:
            with _mesh_up(options, facts, lab, logs, api_keys, kernels=PEERS) as mesh:
                bed = LoadTestBed(lab, load_client, mesh, peer, {}, api_keys)
                lines, failures = _peers_kernels(options, bed)
        mesh = stack.enter_context(_mesh_up(options, facts, lab, logs, api_keys, kernels=OWN))
        interval_s = _RARE_S if options.soak_minutes > _LONG_SOAK_MINUTES else _FREQUENT_S
        watch = stack.enter_context(MemoryWatch(lab, interval_s))
        bed = LoadTestBed(lab, load_client, mesh, peer, {}, api_keys)
        run = _Run(options, facts, bed, watch, lines=lines, failures=failures)
        run.work()
        report = run.report()
        # Before a failure or an interruption can lose it.
        write_report(report, options.output)
    return report


@contextmanager
def _mesh_up(
    options: StressOptions,
    facts: ModelFacts,
    lab: Lab,
    logs: Path,
    api_keys: Sequence[str],
    *,
    kernels: Kernels,
) -> Iterator[MeshSystem]:
    """A mesh with these kernels, from its start to its end."""
    mesh = _mesh(options, facts, lab, logs, api_keys, kernels=kernels)
    try:
        lab.set_link(LinkConditions())
        mesh.start()
        lab.set_link(options.link)
        yield mesh
        mesh.stop()
    finally:
        mesh.kill()


def _peers_kernels(options: StressOptions, bed: LoadTestBed) -> tuple[list[Line], list[str]]:
    """Lines of a mesh with the peer's kernels, and why some are missing."""
    lines: list[Line] = []
    try:
        _warm_up(bed)
        if "crowd" in options.lines:
            lines.append(
                measurements.concurrency_against_peer(
                    bed, _NUM_CONCURRENT, kernels=PEERS, rounds=options.rounds, seed=options.seed
                )
            )
        if "prefill" in options.lines:
            lines.append(
                measurements.prefill_against_peer(
                    bed, kernels=PEERS, rounds=options.rounds, seed=options.seed
                )
            )
    except MeshError as error:
        return lines, [f"mesh {PEERS}: {error.message}"]
    return lines, []


def _warm_up(bed: LoadTestBed) -> None:
    """Warm up: a first answer is slower for unrelated reasons."""
    scripts = measurements.short_prompts(_WARM_UP_AT_ONCE, 0, _WARM_UP_TOKENS)
    measurements.require_all(bed.ask_mesh(scripts, num_at_once=_WARM_UP_AT_ONCE))
    if bed.peer is not None:
        bed.ask_peer(scripts, num_at_once=_WARM_UP_AT_ONCE)


class _Run:
    """State of a run."""

    def __init__(
        self,
        options: StressOptions,
        facts: ModelFacts,
        bed: LoadTestBed,
        watch: MemoryWatch,
        *,
        lines: Sequence[Line],
        failures: Sequence[str],
    ) -> None:
        self._options = options
        self._facts = facts
        self._bed = bed
        self._watch = watch
        self._tokenizer = Tokenizer(options.model)
        self._steps: list[Step] = []
        self._ramp: list[tuple[int, float]] = []
        self._lines = list(lines)
        self._checks: list[Check] = []
        self._failures = list(failures)
        self._steady: list[list[MemorySample]] = []
        self._reference: Reference | None = None
        self._visited: list[AnswerRecord] = []
        self._num_mixed = 0
        self._soaked: Step | None = None
        self._started_s = time.monotonic()

    def work(self) -> None:
        """Run everything; failures are recorded and skipped."""
        options = self._options
        try:
            _warm_up(self._bed)
            if options.preset == "acceptance":
                self._accept()
            else:
                self._climb()
            if options.soak_minutes:
                self._soak()
        except KeyboardInterrupt:
            self._failures.append(INTERRUPTED)
        except MeshError as error:
            self._failures.append(error.message)

    def report(self) -> Report:
        """Report of the measurements."""
        # One more sample of all processes, without load.
        time.sleep(_FREQUENT_S)
        options, bed = self._options, self._bed
        samples = tuple(self._watch.samples)
        found = []
        stages: tuple[dict[str, Any], ...] = ()
        clients = None
        try:
            status = bed.settled_status()
        except MeshError as error:
            self._failures.append(error.message)
        else:
            workload = Workload(
                options.ctx_size, options.num_slots, kv_type=options.kv_type, is_exact=options.exact
            )
            sizes = StageSizes(self._facts, workload)
            stages = tuple(status["stages"])
            hosts = [int(stage["host"].removeprefix("host")) for stage in status["stages"]]
            found = footprints(status["stages"], hosts, sizes, samples)
            self._checks += [leak_check(status), *footprint_checks(found)]
            if options.num_keys:
                clients = count_clients(
                    self._visited,
                    [step.answer_check for step in self._steps],
                    prefix_mismatches(bed.metrics()),
                )
            if self._num_mixed:
                self._lines.append(measurements.memory_line(found, self._num_mixed))
            if self._soaked is not None:
                self._lines.append(measurements.soak_line(self._soaked, status))
        self._checks = [*answer_checks(self._steps, is_exact=options.exact), *self._checks]
        return Report(
            conditions=self._conditions(),
            steps=tuple(self._steps),
            has_ramp=len(self._ramp) > 1,
            saturation=saturation(self._ramp),
            lines=tuple(self._lines),
            checks=tuple(self._checks),
            footprints=tuple(found),
            stages=stages,
            memory=_memory(samples, self._steady),
            samples=samples,
            failures=tuple(self._failures),
            clients=clients,
        )

    def _climb(self) -> None:
        options = self._options
        for concurrency in options.concurrency:
            num_requests = options.num_requests
            if num_requests is None and options.duration_s is None:
                num_requests = _REQUESTS_PER_USER * concurrency
            if options.num_keys:
                step = self._client_load(concurrency, num_requests or _REQUESTS_PER_USER * concurrency)
            else:
                step = self._load(concurrency, num_requests, options.duration_s)
            self._ramp.append((concurrency, step.tokens_per_s))

    def _accept(self) -> None:
        options, bed = self._options, self._bed
        rounds, seed = options.rounds, options.seed
        edges = tuple(accumulate(even_split(self._facts.n_layers, options.num_stages), initial=0))

        def limit() -> list[Line]:
            return measurements.concurrency_against_limit(
                bed,
                options.model,
                edges,
                min(_LIMIT_AT_ONCE, options.num_slots),
                exact=options.exact,
                rounds=rounds,
                seed=seed,
            )

        measures: dict[LineName, Callable[[], list[Line]]] = {
            "crowd": lambda: [
                measurements.concurrency_against_peer(
                    bed, _NUM_CONCURRENT, kernels=OWN, rounds=rounds, seed=seed
                )
            ],
            "limit": limit,
            "wider": lambda: [measurements.more_at_once(bed, *_WIDER, rounds=rounds, seed=seed)],
            "prefill": lambda: [
                measurements.prefill_against_peer(bed, kernels=OWN, rounds=rounds, seed=seed)
            ],
            "second-turn": lambda: [measurements.second_turn(bed, rounds=rounds, seed=seed)],
            "itl": lambda: [measurements.decode_beside_prefill(bed, rounds=rounds, seed=seed)],
        }
        for name in options.lines:
            if name in measures and (bed.peer is not None or name not in _PEER_LINES):
                self._measure(measures[name])
        if "memory" in options.lines:
            step = self._load(_NUM_CONCURRENT, _MIXED_REQUESTS, None, is_steady=True)
            self._num_mixed = step.figures.num_requests

    def _soak(self) -> None:
        minutes = self._options.soak_minutes
        log.info("soak", minutes=minutes, at_once=self._options.soak_concurrency)
        self._soaked = self._load(self._options.soak_concurrency, None, minutes * 60, is_steady=True)

    def _measure(self, measure: Callable[[], list[Line]]) -> None:
        # Sampling must not slow one side of a comparison.
        self._watch.is_paused = True
        try:
            lines = measure()
        except MeshError as error:
            log.warning("not_measured", reason=error.message)
            self._failures.append(error.message)
            return
        finally:
            self._watch.is_paused = False
        self._lines += lines
        for line in lines:
            log.info("line", title=line.title, measured=line.measured, bound=line.bound, verdict=line.verdict)

    def _load(
        self, concurrency: int, num_requests: int | None, duration_s: float | None, *, is_steady: bool = False
    ) -> Step:
        reference = self._reference or self._answer_alone()
        bed = self._bed
        limits = {"num_requests": num_requests, "duration_s": duration_s}
        start_s = time.perf_counter()
        order = reference.order(bed.mesh.port, bed.fields, concurrency)
        outcome = bed.ask_mesh(
            reference.scripts, ids=order.ids, bodies=order.bodies, num_at_once=concurrency, **limits
        )
        stop_s = time.perf_counter()
        answer_check = check_answers(
            outcome.answers, reference.expected, is_exact=self._options.exact, text_of=self._text_of
        )
        rate = None
        if bed.peer is not None and not is_steady:
            theirs = reference.order(bed.peer.port, bed.peer.fields, concurrency)
            rate = bed.ask_peer(
                reference.scripts,
                ids=theirs.ids,
                bodies=theirs.bodies,
                num_at_once=concurrency,
                num_requests=len(outcome.answers),
            ).tokens_per_s
        step = step_of(concurrency, outcome, answer_check, rate)
        self._steps.append(step)
        if is_steady:
            samples = self._watch.between(start_s, stop_s)
            self._steady.append(samples)
            for role in ("stage", "coordinator", "join"):
                self._checks.append(flatness_check(samples, role, stop_s - start_s))
        log.info(
            "step",
            at_once=concurrency,
            answers=len(outcome.answers),
            tokens_per_s=round(step.tokens_per_s, 1),
            peer=None if rate is None else round(rate, 1),
            forks=answer_check.num_forks,
            problems=answer_check.by_kind,
        )
        return step

    def _client_load(self, concurrency: int, num_requests: int) -> Step:
        """Load of clients with keys, some of which hang up."""
        options, bed = self._options, self._bed
        reference = self._reference or self._answer_alone()
        # Steps of one run differ in their moments.
        seed = options.seed + len(self._steps)
        log.info("visiting", requests=num_requests, hang_ups=options.hang_up_share, seed=seed)
        load = ClientLoad(
            port=bed.mesh.port,
            api_keys=bed.api_keys,
            ids=tuple(script.id for script in reference.scripts),
            bodies=tuple(map(bodies_of, reference.scripts)),
            visits=draw_client_requests(num_requests, reference.scripts, options.hang_up_share, seed),
            num_at_once=concurrency,
        )
        outcome = bed.load_client.run_clients(load)
        self._visited += outcome.answers
        answer_check = check_answers(
            outcome.answers, reference.expected, is_exact=options.exact, text_of=self._text_of
        )
        step = step_of(concurrency, outcome, answer_check)
        self._steps.append(step)
        log.info(
            "step",
            at_once=concurrency,
            answers=len(outcome.answers) - answer_check.num_hung_up,
            hung_up=answer_check.num_hung_up,
            forks=answer_check.num_forks,
            problems=answer_check.by_kind,
        )
        return step

    def _scripts(self) -> tuple[Script, ...]:
        options = self._options
        if options.num_keys:
            return scripts_with_shared_prefixes(options.num_scripts, options.seed)
        return mixed_scripts(
            options.num_scripts,
            QUICK if options.is_short else WIDE,
            ctx_size=min(options.ctx_size, _PEER_CTX_SIZE),
            seed=options.seed,
            is_even=self._bed.peer is not None and options.preset == "ramp",
        )

    def _answer_alone(self) -> Reference:
        bed = self._bed
        scripts = self._scripts()
        log.info("answering_alone", chats=len(scripts))
        self._reference = answer_alone(bed.load_client, bed.mesh.port, scripts, bed.fields)
        alone = [one.alone for one in self._reference.expected.values() if one.alone is not None]
        answer_check = check_answers(alone, self._reference.expected, is_exact=False, text_of=self._text_of)
        if answer_check.problems:
            first = answer_check.problems[0]
            raise MeshError(f"{first.request}, alone, failed: {first.kind}: {first.detail}")
        return self._reference

    def _text_of(self, tokens: Sequence[int]) -> str:
        pieces = b"".join(map(self._tokenizer.piece, tokens))
        return pieces.decode("utf-8", "replace")

    def _conditions(self) -> dict[str, Any]:
        options = self._options
        return {
            "model": options.model.name,
            "preset": options.preset,
            "stage_hosts": options.num_stages,
            "one_way_delay_ms": options.delay_ms,
            "links": str(options.link),
            "hosts": "pinned to processors" if options.is_pinned else "on all processors",
            "numeric_mode": "exact" if options.exact else "fast",
            "ctx_size": options.ctx_size,
            "slots": options.num_slots,
            "kv_type": options.kv_type,
            "threads_per_stage": options.num_threads,
            "speculate": options.speculate,
            "serve_options": " ".join(options.serve_options) or "none",
            "api_keys": options.num_keys,
            "hang_ups": options.hang_up_share,
            "chats": options.num_scripts,
            "seed": options.seed,
            "cores": num_usable(),
            "took_s": round(time.monotonic() - self._started_s),
            "software": f"spanmesh {SOFTWARE_VERSION}",
        }


def _mesh(
    options: StressOptions,
    facts: ModelFacts,
    lab: Lab,
    logs: Path,
    api_keys: Sequence[str],
    *,
    kernels: Kernels,
) -> MeshSystem:
    serve = ["--speculate", options.speculate]
    serve += ["--parallel", str(options.num_slots), "--ctx-size", str(options.ctx_size)]
    serve += ["--kv-type", options.kv_type, *["--no-repack"] * (kernels == PEERS)]
    if api_keys:
        key_file = logs / "api-keys"
        key_file.unlink(missing_ok=True)
        for number, key in enumerate(api_keys):
            add_key(key_file, KeyRecord(f"bench-{number}", digest_of(key)))
        serve += ["--api-key-file", str(key_file)]
    return MeshSystem(
        lab,
        options.model,
        logs,
        num_threads=options.num_threads,
        split=even_split(facts.n_layers, options.num_stages),
        options=[*serve, *["--exact"] * options.exact, *options.serve_options],
    )


def _memory(
    samples: Sequence[MemorySample], steady: Sequence[Sequence[MemorySample]]
) -> tuple[RoleMemory, ...]:
    """By host and role, over all looks."""
    looks: dict[tuple[int, Role], dict[int, list[int]]] = {}
    for sample in samples:
        if sample.role != "other":
            by_look = looks.setdefault((sample.host, sample.role), {})
            by_look.setdefault(sample.look, []).append(sample.own_bytes)
    growths = [(role, growth_by_process(part, role)) for part in steady for role in ROLES]
    return tuple(
        RoleMemory(
            host=host,
            role=role,
            num_processes=max(map(len, by_look.values())),
            max_bytes=max(map(sum, by_look.values())),
            growth=tuple(
                growth for of, found in growths if of == role for where, growth in found if where == host
            ),
        )
        for (host, role), by_look in sorted(looks.items())
    )
