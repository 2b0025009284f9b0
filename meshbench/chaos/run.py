"""Run of `mesh bench chaos`."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import structlog

from mesh.placement.memory_estimate import Workload
from meshbench.chaos.harness import FaultTestBed, FirstFailure, prepared_bed
from meshbench.chaos.options import least_memory_bytes
from meshbench.chaos.report import chaos_report
from meshbench.chaos.results import pause_lines
from meshbench.chaos.scenarios import try_faults, try_head_restart, try_leaving, try_no_room
from meshbench.lab.memory_watch import MemoryWatch
from meshbench.lab.network import Lab, require_lab
from meshbench.lab.systems import MeshSystem
from meshbench.load_client.client import LoadClient
from meshbench.report_tools import INTERRUPTED, Check
from meshbench.shared_options import logs_folder
from meshbench.stress.checks import flatness_check, leak_check
from meshbench.stress.harness import open_sessions
from spanmesh_proto import SOFTWARE_VERSION
from spanmesh_proto.errors import MeshError
from stages.process_limits import num_usable
from stages.slicing.model_facts import read_model_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from meshbench.chaos.options import ChaosOptions
    from meshbench.chaos.results import Scenario
    from meshbench.report_tools import Line, Report

_SCENARIOS: Final[dict[str, Callable[[FaultTestBed, FirstFailure], Scenario]]] = {
    "faults": try_faults,
    "leave": try_leaving,
    "head": try_head_restart,
    "no-room": try_no_room,
}
# Slots for probes beside the streams.
_PROBES: Final = 2
_POLL_S: Final = 5.0
_IDLE_TIMEOUT_S: Final = 10.0
_STOP_TIMEOUT_S: Final = 60.0
# Above the least that would do, for what hosts need besides.
_ROOM: Final = 1.02

log = structlog.get_logger()


class _Run:
    """State of a run, on the mesh of this checkout or of another one."""

    def __init__(self, options: ChaosOptions, checkout: Path | None = None) -> None:
        self._options = options
        self.checkout = checkout
        self._keep = FirstFailure(options.output)
        self.scenarios: list[Scenario] = []
        self._checks: list[Check] = []
        self.failures: list[str] = []
        self._compared: list[Line] = []
        self._started_s = time.monotonic()

    def on_a_mesh(self, names: tuple[str, ...], *, num_spares: int) -> None:
        """Bring a mesh up, try scenarios on it, and see that nothing is left of it."""
        try:
            with self._bed(num_spares, is_tight="no-room" in names) as bed:
                with MemoryWatch(bed.lab, _POLL_S) as watch:
                    for name in names:
                        scenario = self._try(name, bed, watch)
                        if scenario.is_interrupted:
                            break
                    self._check_idle(bed, names)
                self._stop(bed, names)
        except MeshError as error:
            self.note(f"{_and(names)}: {error.message}")

    @property
    def is_interrupted(self) -> bool:
        """Whether a scenario was."""
        return any(scenario.is_interrupted for scenario in self.scenarios)

    def compare(self, other: _Run) -> None:
        """Hold the clients' pauses against those of another checkout at the same faults."""
        assert other.checkout is not None  # noqa: S101 - compared with another one
        name = f"the mesh of {other.checkout.name}"
        self.failures += [f"{name}: {failure}" for failure in other.failures]
        theirs = {scenario.name: scenario for scenario in other.scenarios}
        for own in self.scenarios:
            if own.name in theirs:
                self._compared += pause_lines(own, theirs[own.name], name)

    def note(self, failure: str) -> None:
        """Record in the report that something failed."""
        log.warning("not_done", reason=failure)
        self.failures.append(failure)

    def report(self) -> Report:
        """Report of the results."""
        options = self._options
        circumstances: dict[str, Any] = {
            "model": options.model.name,
            "stage_hosts": options.num_stages,
            "spare_hosts": options.num_spares,
            "one_way_delay_ms": options.delay_ms,
            "links": str(options.link),
            "hosts": "pinned to processors" if options.is_pinned else "on all processors",
            "streams": options.num_streams,
            "hang_ups": options.hang_up_share,
            "questions": options.num_questions,
            "answer_tokens": " ".join(map(str, options.answer_tokens)),
            "numeric_mode": "exact" if options.exact else "fast",
            "threads_per_stage": options.num_threads,
            "speculate": options.speculate,
            "serve_options": " ".join(options.serve_options) or "none",
            "against": "nothing" if options.against is None else options.against.name,
            "kinds": " ".join(options.kinds),
            "seed": options.seed,
            "cores": num_usable(),
            "took_s": round(time.monotonic() - self._started_s),
            "software": f"spanmesh {SOFTWARE_VERSION}",
        }
        return chaos_report(circumstances, self.scenarios, self._checks, self.failures, self._compared)

    @contextmanager
    def _bed(self, num_spares: int, *, is_tight: bool) -> Iterator[FaultTestBed]:
        options = self._options
        facts = read_model_facts(options.model)
        num_slots = options.num_streams + _PROBES
        join_options: tuple[str, ...] = ()
        if is_tight:
            workload = Workload(options.ctx_size, num_slots, is_exact=options.exact)
            memory_bytes = int(least_memory_bytes(facts, workload, options.num_stages) * _ROOM)
            join_options = ("--memory", str(memory_bytes))
        with ExitStack() as stack:
            kind = "no-room" if is_tight else "mesh" if self.checkout is None else "against"
            logs = stack.enter_context(logs_folder(options.logs)) / kind
            logs.mkdir(exist_ok=True)
            shared = [logs, options.model.resolve().parent]
            num_hosts = 1 + options.num_stages + num_spares
            lab = stack.enter_context(
                Lab(num_hosts, shared=shared, is_pinned=options.is_pinned, seed=options.seed)
            )
            serve = ["--speculate", options.speculate, "--parallel", str(num_slots)]
            serve += ["--ctx-size", str(options.ctx_size), *["--exact"] * options.exact]
            mesh = MeshSystem(
                lab,
                options.model,
                logs,
                num_spares=num_spares,
                num_threads=options.num_threads,
                options=[*serve, *options.serve_options],
                join_options=join_options,
                checkout=self.checkout,
            )
            stack.callback(mesh.kill)
            mesh.start()
            lab.set_link(options.link)
            client = stack.enter_context(LoadClient(lab))
            yield prepared_bed(lab, mesh, client, options)

    def _try(self, name: str, bed: FaultTestBed, watch: MemoryWatch) -> Scenario:
        log.info("scenario", name=name)
        begun_s = time.perf_counter()
        scenario = _SCENARIOS[name](bed, self._keep)
        self.scenarios.append(scenario)
        for line in scenario.lines:
            log.info("line", title=line.title, measured=line.measured, bound=line.bound, verdict=line.verdict)
        if name == "faults":
            stop_s = time.perf_counter()
            samples = watch.between(begun_s, stop_s)
            self._checks.append(flatness_check(samples, "coordinator", stop_s - begun_s))
        return scenario

    def _check_idle(self, bed: FaultTestBed, names: tuple[str, ...]) -> None:
        """Check that no session is left without requests."""
        deadline_s = time.monotonic() + _IDLE_TIMEOUT_S
        while True:
            try:
                status = bed.snapshot().status
            except MeshError as error:
                self.note(error.message)
                return
            if status is not None and not open_sessions(status):
                break
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.2)
        if status is None:
            self.note("the head does not answer at the end")
        else:
            check = leak_check(status)
            self._checks.append(Check(f"{check.name}, after {_and(names)}", check.holds, check.detail))

    def _stop(self, bed: FaultTestBed, names: tuple[str, ...]) -> None:
        """Ctrl-C everywhere; nothing may be left."""
        try:
            codes = bed.mesh.stop(timeout_s=_STOP_TIMEOUT_S)
        except MeshError as error:
            self.note(error.message)
            return
        left = bed.injector.leftover_pids()
        detail = ", ".join(left) or f"none; exit codes {', '.join(map(str, codes))}"
        self._checks.append(Check(f"no process left, after {_and(names)}", not left, detail))


def run_chaos(options: ChaosOptions) -> Report:
    """Try everything and write the report, of as much as could be done, also when Ctrl-C ends it.

    Raises:
        ClusterError: If no lab can be made here.
    """
    require_lab()
    run = _Run(options)
    # They need other hosts.
    together: tuple[str, ...] = tuple(name for name in options.scenarios if name != "no-room")
    try:
        if together:
            run.on_a_mesh(together, num_spares=options.num_spares)
        if "no-room" in options.scenarios and not run.is_interrupted:
            run.on_a_mesh(("no-room",), num_spares=0)
        if options.against is not None and not run.is_interrupted:
            # The seed gives both the same faults, at different moments of their streams.
            other = _Run(replace(options, against=None), checkout=options.against)
            if together:
                other.on_a_mesh(together, num_spares=options.num_spares)
            run.compare(other)
    except KeyboardInterrupt:
        run.note(INTERRUPTED)
    report = run.report()
    report.write(options.output)
    return report


def _and(names: tuple[str, ...]) -> str:
    return " and ".join(names)
