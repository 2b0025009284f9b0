"""One run of `mesh bench stress`."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from mesh.api.api_keys import KeyRecord, add_key, digest_of
from mesh.bench.paired_systems import even_split
from mesh.bench.stress import measurements
from mesh.bench.stress.checks import (
    answer_alone,
    answer_checks,
    count_clients,
    flatness_check,
    footprint_checks,
    growth_by_process,
    judge_all,
    leak_check,
    prefix_mismatches,
    saturation,
    step_of,
)
from mesh.bench.stress.client_process import Asker
from mesh.bench.stress.harness import Ground
from mesh.bench.stress.memory import footprints
from mesh.bench.stress.report import Report, RoleMemory, write_report
from mesh.bench.stress.scripts import (
    QUICK,
    WIDE,
    VisitOrder,
    bodies_of,
    draw_visits,
    mixed_scripts,
    scripts_with_shared_beginnings,
)
from mesh.lab.llama_cpp_build import build_llama_rpc
from mesh.lab.memory_watch import ROLES, MemoryWatch
from mesh.lab.network import Lab, lab_supported
from mesh.lab.systems import MeshSystem, RpcSystem
from mesh.placement.stage_sizes import StageSizes, Workload
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto import SOFTWARE_VERSION
from spanmesh_proto.errors import ClusterError, MeshError
from stages.slicing.model_facts import read_model_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh.bench.stress.answers import Told
    from mesh.bench.stress.checks import Check, Line, Reference, Step
    from mesh.bench.stress.options import LineName, StressOptions
    from mesh.bench.stress.scripts import Script
    from mesh.lab.memory_watch import MemorySample, Role
    from stages.slicing.model_facts import ModelFacts

log = structlog.get_logger()

_PEER_CTX_SIZE: Final = 2560
_CROWD_AT_ONCE: Final = 8
_LIMIT_AT_ONCE: Final = 16
_MIXED_REQUESTS: Final = 200
_WARM_UP_AT_ONCE: Final = 4
_WARM_UP_TOKENS: Final = 24
_REQUESTS_PER_USER: Final = 8
_PEER_LINES: Final = frozenset({"crowd", "prefill"})
# Between two looks at memory.
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
        folder = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mesh-bench-")))
        folder.mkdir(parents=True, exist_ok=True)
        logs = folder.resolve()
        shared = [logs, options.model.resolve().parent]
        lab = stack.enter_context(Lab(options.num_stages + 1, shared=shared))
        api_keys = tuple(secrets.token_hex(16) for _ in range(options.num_keys))
        asker = stack.enter_context(Asker(lab, api_key=api_keys[0] if api_keys else None))
        peer = None
        if programs is not None:
            slots = max((_CROWD_AT_ONCE,) if options.preset == "acceptance" else options.concurrency)
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
        mesh = _mesh(options, facts, lab, logs, api_keys)
        stack.callback(mesh.kill)
        mesh.start()
        lab.set_delay_ms(options.delay_ms)
        interval_s = _RARE_S if options.soak_minutes > _LONG_SOAK_MINUTES else _FREQUENT_S
        watch = stack.enter_context(MemoryWatch(lab, interval_s))
        run = _Run(options, facts, Ground(lab, asker, mesh, peer, {}, api_keys), watch)
        run.work()
        report = run.report()
        # Before anything else can go wrong, or somebody loses patience.
        write_report(report, options.output)
        mesh.stop()
    return report


class _Run:
    """What a run knows while it goes on."""

    def __init__(self, options: StressOptions, facts: ModelFacts, ground: Ground, watch: MemoryWatch) -> None:
        self._options = options
        self._facts = facts
        self._ground = ground
        self._watch = watch
        self._tokenizer = Tokenizer(options.model)
        self._steps: list[Step] = []
        self._ramp: list[tuple[int, float]] = []
        self._lines: list[Line] = []
        self._checks: list[Check] = []
        self._failures: list[str] = []
        self._steady: list[list[MemorySample]] = []
        self._reference: Reference | None = None
        self._visited: list[Told] = []
        self._num_mixed = 0
        self._soaked: Step | None = None
        self._started_s = time.monotonic()

    def work(self) -> None:
        """All of it; what fails is noted and passed over."""
        options = self._options
        try:
            self._warm_up()
            if options.preset == "acceptance":
                self._accept()
            else:
                self._climb()
            if options.soak_minutes:
                self._soak()
        except KeyboardInterrupt:
            self._failures.append("interrupted: what was to come after this is missing")
        except MeshError as error:
            self._failures.append(error.message)

    def report(self) -> Report:
        """Of what was measured."""
        # One more look at everybody, now that nobody asks.
        time.sleep(_FREQUENT_S)
        options, ground = self._options, self._ground
        samples = tuple(self._watch.samples)
        found = []
        stages: tuple[dict[str, Any], ...] = ()
        clients = None
        try:
            status = ground.settled_status()
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
                    [step.judgement for step in self._steps],
                    prefix_mismatches(ground.metrics()),
                )
            if self._num_mixed:
                self._lines.append(measurements.memory_line(found, self._num_mixed))
            if self._soaked is not None:
                self._lines.append(measurements.soak_line(self._soaked, status))
        self._checks = [*answer_checks(self._steps, is_exact=options.exact), *self._checks]
        return Report(
            circumstances=self._circumstances(),
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

    def _warm_up(self) -> None:
        """A first answer is slow for reasons that nobody asks about."""
        scripts = measurements.crowd(_WARM_UP_AT_ONCE, 0, _WARM_UP_TOKENS)
        measurements.require_all(self._ground.ask_mesh(scripts, num_at_once=_WARM_UP_AT_ONCE))
        if self._ground.peer is not None:
            self._ground.ask_peer(scripts, num_at_once=_WARM_UP_AT_ONCE)

    def _climb(self) -> None:
        options = self._options
        for concurrency in options.concurrency:
            num_requests = options.num_requests
            if num_requests is None and options.duration_s is None:
                num_requests = _REQUESTS_PER_USER * concurrency
            if options.num_keys:
                step = self._visit(concurrency, num_requests or _REQUESTS_PER_USER * concurrency)
            else:
                step = self._load(concurrency, num_requests, options.duration_s)
            self._ramp.append((concurrency, step.tokens_per_s))

    def _accept(self) -> None:
        options, ground = self._options, self._ground
        rounds, seed = options.rounds, options.seed
        edges = tuple(accumulate(even_split(self._facts.n_layers, options.num_stages), initial=0))

        def limit() -> Line:
            return measurements.crowd_against_limit(
                ground,
                options.model,
                edges,
                min(_LIMIT_AT_ONCE, options.num_slots),
                exact=options.exact,
                rounds=rounds,
                seed=seed,
            )

        measures: dict[LineName, Callable[[], Line]] = {
            "crowd": lambda: measurements.crowd_against_peer(
                ground, _CROWD_AT_ONCE, rounds=rounds, seed=seed
            ),
            "limit": limit,
            "prefill": lambda: measurements.prefill_against_peer(ground, rounds=rounds, seed=seed),
            "second-turn": lambda: measurements.second_turn(ground, rounds=rounds, seed=seed),
            "itl": lambda: measurements.decode_beside_prefill(ground, rounds=rounds, seed=seed),
        }
        for name in options.lines:
            if name in measures and (ground.peer is not None or name not in _PEER_LINES):
                self._measure(measures[name])
        if "memory" in options.lines:
            step = self._load(_CROWD_AT_ONCE, _MIXED_REQUESTS, None, is_steady=True)
            self._num_mixed = step.figures.num_requests

    def _soak(self) -> None:
        minutes = self._options.soak_minutes
        log.info("soak", minutes=minutes, at_once=self._options.soak_concurrency)
        self._soaked = self._load(self._options.soak_concurrency, None, minutes * 60, is_steady=True)

    def _measure(self, measure: Callable[[], Line]) -> None:
        # What is compared is not to be slowed down on one side.
        self._watch.is_paused = True
        try:
            line = measure()
        except MeshError as error:
            log.warning("not_measured", reason=error.message)
            self._failures.append(error.message)
            return
        finally:
            self._watch.is_paused = False
        self._lines.append(line)
        log.info("line", title=line.title, measured=line.measured, bound=line.bound, verdict=line.verdict)

    def _load(
        self, concurrency: int, num_requests: int | None, duration_s: float | None, *, is_steady: bool = False
    ) -> Step:
        reference = self._reference or self._answer_alone()
        ground = self._ground
        limits = {"num_requests": num_requests, "duration_s": duration_s}
        start_s = time.perf_counter()
        order = reference.order(ground.mesh.port, ground.fields, concurrency)
        outcome = ground.ask_mesh(
            reference.scripts, ids=order.ids, bodies=order.bodies, num_at_once=concurrency, **limits
        )
        stop_s = time.perf_counter()
        judgement = judge_all(
            outcome.told, reference.expected, is_exact=self._options.exact, text_of=self._text_of
        )
        rate = None
        if ground.peer is not None and not is_steady:
            theirs = reference.order(ground.peer.port, ground.peer.fields, concurrency)
            rate = ground.ask_peer(
                reference.scripts,
                ids=theirs.ids,
                bodies=theirs.bodies,
                num_at_once=concurrency,
                num_requests=len(outcome.told),
            ).tokens_per_s
        step = step_of(concurrency, outcome, judgement, rate)
        self._steps.append(step)
        if is_steady:
            samples = self._watch.between(start_s, stop_s)
            self._steady.append(samples)
            for role in ("stage", "coordinator", "join"):
                self._checks.append(flatness_check(samples, role, stop_s - start_s))
        log.info(
            "step",
            at_once=concurrency,
            answers=len(outcome.told),
            tokens_per_s=round(step.tokens_per_s, 1),
            peer=None if rate is None else round(rate, 1),
            forks=judgement.num_forks,
            problems=judgement.by_kind,
        )
        return step

    def _visit(self, concurrency: int, num_requests: int) -> Step:
        """Clients with keys ask, and some of them hang up."""
        options, ground = self._options, self._ground
        reference = self._reference or self._answer_alone()
        # Steps of one run differ in their moments.
        seed = options.seed + len(self._steps)
        log.info("visiting", requests=num_requests, hang_ups=options.hang_up_share, seed=seed)
        order = VisitOrder(
            port=ground.mesh.port,
            api_keys=ground.api_keys,
            ids=tuple(script.id for script in reference.scripts),
            bodies=tuple(map(bodies_of, reference.scripts)),
            visits=draw_visits(num_requests, reference.scripts, options.hang_up_share, seed),
            num_at_once=concurrency,
        )
        outcome = ground.asker.visit(order)
        self._visited += outcome.told
        judgement = judge_all(outcome.told, reference.expected, is_exact=options.exact, text_of=self._text_of)
        step = step_of(concurrency, outcome, judgement)
        self._steps.append(step)
        log.info(
            "step",
            at_once=concurrency,
            answers=len(outcome.told) - judgement.num_hung_up,
            hung_up=judgement.num_hung_up,
            forks=judgement.num_forks,
            problems=judgement.by_kind,
        )
        return step

    def _scripts(self) -> tuple[Script, ...]:
        options = self._options
        if options.num_keys:
            return scripts_with_shared_beginnings(options.num_scripts, options.seed)
        return mixed_scripts(
            options.num_scripts,
            QUICK if options.is_short else WIDE,
            ctx_size=min(options.ctx_size, _PEER_CTX_SIZE),
            seed=options.seed,
            is_even=self._ground.peer is not None and options.preset == "ramp",
        )

    def _answer_alone(self) -> Reference:
        ground = self._ground
        scripts = self._scripts()
        log.info("answering_alone", chats=len(scripts))
        self._reference = answer_alone(ground.asker, ground.mesh.port, scripts, ground.fields)
        alone = [one.alone for one in self._reference.expected.values() if one.alone is not None]
        judgement = judge_all(alone, self._reference.expected, is_exact=False, text_of=self._text_of)
        if judgement.problems:
            first = judgement.problems[0]
            raise MeshError(f"alone, {first.request} was answered badly: {first.kind}: {first.detail}")
        return self._reference

    def _text_of(self, tokens: Sequence[int]) -> str:
        pieces = b"".join(map(self._tokenizer.piece, tokens))
        return pieces.decode("utf-8", "replace")

    def _circumstances(self) -> dict[str, Any]:
        options = self._options
        return {
            "model": options.model.name,
            "preset": options.preset,
            "stage_hosts": options.num_stages,
            "one_way_delay_ms": options.delay_ms,
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
            "cores": len(os.sched_getaffinity(0)),
            "took_s": round(time.monotonic() - self._started_s),
            "software": f"spanmesh {SOFTWARE_VERSION}",
        }


def _mesh(
    options: StressOptions, facts: ModelFacts, lab: Lab, logs: Path, api_keys: Sequence[str]
) -> MeshSystem:
    serve = ["--speculate", options.speculate]
    serve += ["--parallel", str(options.num_slots), "--ctx-size", str(options.ctx_size)]
    serve += ["--kv-type", options.kv_type]
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
