"""Runner of phases: each in a process of its own, within its time, once; what is done is not done again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import structlog

from spanmesh_proto.errors import MeshError
from tests.qualification.gpu_day.phases import Bench, model_path, run_phase
from tests.qualification.gpu_day.scale import phases_of
from tests.qualification.programs import program_command

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.qualification.gpu_day.scale import Phase

_LAST_LINES: Final = 12

log = structlog.get_logger()


@dataclass(frozen=True)
class PhaseResult:
    """Result of a phase."""

    name: str
    """Name of the phase."""
    took_s: float
    """Time that it took."""
    figures: dict[str, Any]
    """What it measured; empty if it failed."""
    failure: str = ""
    """Reason why it failed; empty if it did not."""


class ResultStore:
    """Results of phases in a folder, a file each.

    Args:
        folder: The protocol's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "results"
        self._folder.mkdir(parents=True, exist_ok=True)

    def of(self, phase: Phase) -> PhaseResult | None:
        """The result of a phase, or None if it has none."""
        try:
            return PhaseResult(**json.loads(self._path(phase).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None

    def keep(self, phase: Phase, result: PhaseResult) -> None:
        """Write a result, as a whole."""
        path = self._path(phase)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(vars(result), indent=1), encoding="utf-8")
        part.replace(path)

    def forget(self, phase: Phase) -> None:
        """Remove the result of a phase, if it has one."""
        self._path(phase).unlink(missing_ok=True)

    def is_done(self, phase: Phase) -> bool:
        """Whether a phase has figures; one that failed is tried again."""
        result = self.of(phase)
        return result is not None and not result.failure

    def _path(self, phase: Phase) -> Path:
        return self._folder / f"{phase.name}.json"


def run_here(phase: Phase, bench: Bench) -> PhaseResult:
    """Run a phase in this process and keep its result.

    Args:
        phase: The phase.
        bench: Where it runs.
    """
    start_s = time.monotonic()
    try:
        figures, failure = run_phase(phase, bench), ""
    except MeshError as error:
        figures, failure = {}, error.message
    result = PhaseResult(phase.name, time.monotonic() - start_s, figures, failure)
    ResultStore(bench.folder).keep(phase, result)
    return result


def run_all(
    bench: Bench,
    *,
    wanted: Sequence[str] = (),
    limit_s: float,
    budget_s: float | None = None,
    keeps_models: bool = False,
    clock_s: Callable[[], float] = time.monotonic,
) -> list[PhaseResult]:
    """Run all phases that are not done yet, one after the other.

    Args:
        bench: Where they run.
        wanted: Names of phases; all unless given.
        limit_s: Longest time of a phase, in seconds.
        budget_s: No phase begins that might end later than so many seconds from now; None for no bound.
        keeps_models: Whether models stay on the disk when their phases are done.
        clock_s: Monotonic, seconds.

    Returns:
        Results of the phases that ran now.
    """
    store = ResultStore(bench.folder)
    start_s = clock_s()
    phases = [phase for phase in phases_of(bench.scale) if not wanted or phase.name in wanted]
    results = []
    for phase in phases:
        if store.is_done(phase):
            continue
        left_s = limit_s if budget_s is None else min(limit_s, budget_s - (clock_s() - start_s))
        if budget_s is not None and left_s < min(limit_s, budget_s) / 2:
            log.info("budget_spent", next=phase.name, left_s=round(left_s))
            break
        log.info("phase", name=phase.name)
        result = _run_apart(phase, bench, left_s)
        store.keep(phase, result)
        log.info("phase_done", name=phase.name, took_s=round(result.took_s, 1), failure=result.failure)
        results.append(result)
        if not keeps_models and phase.model:
            _drop_model(bench, store, phase.model)
    return results


def _drop_model(bench: Bench, store: ResultStore, model: str) -> None:
    """Remove a model's file once all of its phases are done."""
    if all(store.is_done(phase) for phase in phases_of(bench.scale) if phase.model == model):
        model_path(bench, model).unlink(missing_ok=True)


def _run_apart(phase: Phase, bench: Bench, limit_s: float) -> PhaseResult:
    """Run a phase in a process of its own, which takes its memory of the card with it."""
    command = program_command("tests.qualification.gpu_day", str(bench.folder), "--here")
    command += ["--phase", phase.name, "--scale", bench.scale.name, "--threads", str(bench.num_threads)]
    if bench.device is not None:
        command += ["--device", bench.device]
    store = ResultStore(bench.folder)
    store.forget(phase)
    start_s = time.monotonic()
    output = bench.folder / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    try:
        failure = f"exit code {process.wait(limit_s)}"
    except subprocess.TimeoutExpired:
        failure = f"it took longer than {limit_s:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            # With processes of its own that a phase may have started.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    # A driver may fail after all was measured.
    result = store.of(phase)
    if result is not None:
        return result
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
    return PhaseResult(phase.name, time.monotonic() - start_s, {}, "\n".join([failure, *lines]))
